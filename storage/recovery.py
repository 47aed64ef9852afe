"""Finding the pages of a store at open: from its index after an orderly close, else by scan."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tierkv.storage.backend import IOBackend, sync_directory
from tierkv.storage.format import IndexRecord, decode_record, encode_record, record_of, record_sum
from tierkv.storage.index import IndexDamagedError, LmdbIndex, write_index
from tierkv.storage.layout import CleanMark, Layout, SlabMeta, hash_file
from tierkv.storage.lock import is_locked
from tierkv.storage.slotio import SlotIO

logger = logging.getLogger(__name__)

Loaded = list[tuple[IndexRecord, int]]


@dataclass(frozen=True, slots=True)
class Scan:
    """What the slot headers say."""

    records: list[IndexRecord]
    max_seq: int


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
        index = LmdbIndex(layout.index, backend, read_only=read_only)
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
    lock = os.access(os.path.join(layout.index, "lock.mdb"), os.W_OK, effective_ids=True)
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


def _decode_all(index: LmdbIndex) -> Iterator[tuple[IndexRecord, int]]:
    for key, value in index.records():
        record = decode_record(key, value)
        if record is None:
            raise IndexDamagedError(f"index record {key[:8].hex()} does not match its checksum")
        yield record, record_sum(value)


def scan_slabs(slot_io: SlotIO, slabs: Sequence[SlabMeta], threads: int) -> Scan:
    """Read every slot header; where a key was written twice, the later write counts.

    Only headers are checked here: payloads are checked whenever they are read.
    """
    newest: dict[bytes, IndexRecord] = {}
    max_seq = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="tierkv-scan") as pool:
        for records in pool.map(lambda slab: _scan_slab(slot_io, slab), slabs):
            for record in records:
                max_seq = max(max_seq, record.seq)
                known = newest.get(record.info.key)
                if known is None or known.seq < record.seq:
                    newest[record.info.key] = record
    return Scan(list(newest.values()), max_seq)


def _scan_slab(slot_io: SlotIO, slab: SlabMeta) -> list[IndexRecord]:
    records = []
    for slot in range(slab.slots):
        try:
            header = slot_io.read_header(slab, slot)
        except OSError as error:
            logger.warning("slab %04d slot %d: %s", slab.id, slot, error.strerror)
            continue
        if header is not None:
            records.append(record_of(header, slab.id))
    return records


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
