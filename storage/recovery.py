"""Finding the pages of a store at open: from its index after an orderly close, else by scan."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.backend import IOBackend, sync_directory
from tierkv.storage.columns import Location
from tierkv.storage.format import (
    IndexRecord,
    SlotHeader,
    decode_record,
    encode_record,
    record_of,
    record_sum,
)
from tierkv.storage.index import IndexDamagedError, LmdbIndex, write_index
from tierkv.storage.layout import CleanMark, Layout, SlabMeta, hash_file
from tierkv.storage.lock import is_locked
from tierkv.storage.slotio import SlotIO
from tierkv.storage.wanted import Wanted

logger = logging.getLogger(__name__)

Loaded = list[tuple[IndexRecord, int]]


@dataclass(frozen=True, slots=True)
class Scan:
    """What the slots say: the latest good write of each key, and what was left out."""

    records: list[IndexRecord]
    max_seq: int
    torn: int


def load_clean_index(
    layout: Layout, backend: IOBackend, mark: CleanMark, *, read_only: bool = False
) -> tuple[LmdbIndex, Loaded] | None:
    """Open the index of a store that was closed in order.

    Returns:
        The index and its records with their checksums; None when it is not, to the last bit,
        what the marker says.
    """
    data = os.path.join(layout.index, "data.mdb")
    try:
        if hash_file(data) != (mark.index_bytes, mark.index_hash):
            logger.warning("%s: changed since the store was closed; rebuilding it", data)
            return None
        lock = not read_only or _may_lock(layout)
        index = LmdbIndex(layout.index, backend, read_only=read_only, lock=lock)
    except (IndexDamagedError, OSError) as error:
        logger.warning("%s; rebuilding the index from the slabs", error)
        return None
    try:
        loaded = list(_decode_all(index))
        total = sum(checksum for _, checksum in loaded) % (1 << 64)
        if len(loaded) == mark.pages and total == mark.record_sum:
            return index, loaded
        logger.warning("%s: not what its shutdown marker says; rebuilding it", layout.index)
    except IndexDamagedError as error:
        logger.warning("%s; rebuilding the index from the slabs", error)
    index.close()
    return None


def load_live_index(layout: Layout, backend: IOBackend) -> tuple[LmdbIndex, Loaded] | None:
    """Open the index read-only as it is now, beside a live writer.

    Damaged records are left out; every read checks the slot anyway.  Where LMDB's lock file
    may not be written (another user's store, a read-only filesystem) the index is read
    without it, if no writer is there.
    """
    lock = _may_lock(layout)
    if not lock and is_locked(layout.lock):
        return None
    try:
        index = LmdbIndex(layout.index, backend, read_only=True, lock=lock)
    except IndexDamagedError:
        return None
    try:
        decoded = ((decode_record(k, v), record_sum(v)) for k, v in index.records())
        return index, [(record, total) for record, total in decoded if record is not None]
    except IndexDamagedError:
        index.close()
        return None


def _may_lock(layout: Layout) -> bool:
    return os.access(os.path.join(layout.index, "lock.mdb"), os.W_OK, effective_ids=True)


def _decode_all(index: LmdbIndex) -> Iterator[tuple[IndexRecord, int]]:
    for key, value in index.records():
        record = decode_record(key, value)
        if record is None:
            raise IndexDamagedError(f"index record {key[:8].hex()} does not match its checksum")
        yield record, record_sum(value)


def scan_slabs(slot_io: SlotIO, slabs: Sequence[SlabMeta], threads: int) -> Scan:
    """Read every slot header; where a key was written twice, the later good write counts.

    Headers say up to which write everything was whole and synced.  The payloads of later
    writes are read too: one that a crash tore must not be taken for the page.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="tierkv-scan") as pool:
        found = [
            (slab, header)
            for slab, headers in zip(
                slabs, pool.map(lambda slab: _headers(slot_io, slab), slabs), strict=True
            )
            for header in headers
        ]
        durable = max((header.durable_seq for _, header in found), default=0)
        late = [(slab, header) for slab, header in found if header.seq > durable]
        whole = pool.map(lambda pair: _is_whole(slot_io, *pair), late)
        torn = {header.seq for (_, header), good in zip(late, whole, strict=True) if not good}
    newest: dict[bytes, IndexRecord] = {}
    for slab, header in found:
        if header.seq not in torn:
            record = record_of(header, slab.id)
            known = newest.get(record.info.key)
            if known is None or known.seq < record.seq:
                newest[record.info.key] = record
    if torn:
        logger.warning("%d pages were not written to their end; they are left out", len(torn))
    max_seq = max((header.seq for _, header in found), default=0)
    return Scan(list(newest.values()), max_seq, len(torn))


def _headers(slot_io: SlotIO, slab: SlabMeta) -> list[SlotHeader]:
    headers = []
    for slot in range(slab.slots):
        try:
            header = slot_io.read_header(slab, slot)
        except OSError as error:
            logger.warning("slab %04d slot %d: %s", slab.id, slot, error.strerror)
            continue
        if header is not None:
            headers.append(header)
    return headers


def _is_whole(slot_io: SlotIO, slab: SlabMeta, header: SlotHeader) -> bool:
    """Whether a slot holds all of the page that its header describes."""
    location = Location(slab.id, header.slot, header.seq, header.raw_bytes, header.stored_bytes)
    wanted = Wanted(header.info.key, None, location, aligned_empty(header.raw_bytes))
    try:
        return slot_io.read(slab, wanted).fault is None
    except OSError as error:
        logger.warning("slab %04d slot %d: %s", slab.id, header.slot, error.strerror)
        return False


def rebuild_index(
    layout: Layout, backend: IOBackend, records: Sequence[IndexRecord]
) -> tuple[LmdbIndex, Loaded]:
    """Write a new index, put it into the place of the old one, and open it.

    The old one is not read: LMDB may take the process down over a damaged file.  What only
    it knew (hits and last use) is lost; pages are not.
    """
    new = layout.index + ".new"
    remove_index(new, backend)
    write_index(new, backend, records)
    sync_directory(new)
    remove_index(layout.index, backend)
    backend.rename(new, layout.index)
    index = LmdbIndex(layout.index, backend)
    return index, [(record, record_sum(encode_record(record))) for record in records]


def remove_index(path: str, backend: IOBackend) -> None:
    """Remove an index directory, if it is there."""
    if os.path.isdir(path):
        for name in ("data.mdb", "lock.mdb"):
            backend.remove_file(os.path.join(path, name))
        os.rmdir(path)
