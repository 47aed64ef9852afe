"""Opening a store directory: checks, lock, meta, index or scan, capacity."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lmdb

from tierkv.errors import NotAStoreError, StoreError, StoreReadOnlyError
from tierkv.storage.backend import IOBackend
from tierkv.storage.breaker import Breaker
from tierkv.storage.catalog import Catalog
from tierkv.storage.clock import Clock
from tierkv.storage.codec import make_codec
from tierkv.storage.core import Core, Removed, SsdConfig
from tierkv.storage.counters import Counters
from tierkv.storage.index import LmdbIndex
from tierkv.storage.layout import (
    CleanMark,
    Layout,
    SlabMeta,
    StoreMeta,
    encode_meta,
    encode_names,
    load_clean,
    load_meta,
    load_names,
)
from tierkv.storage.lock import DirectoryLock, is_locked
from tierkv.storage.memory_index import MemoryIndex
from tierkv.storage.recovery import (
    Loaded,
    Scan,
    load_clean_index,
    load_live_index,
    rebuild_index,
    scan_slabs,
)
from tierkv.storage.slabs import SlabFiles, fit_capacity
from tierkv.storage.slotio import SlotIO

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """The pages of a store, however they were found."""

    index: LmdbIndex | MemoryIndex
    loaded: Loaded
    max_seq: int
    durable_seq: int
    clean: bool


def open_core(config: SsdConfig, backend: IOBackend, clock: Clock) -> Core:
    """Open (or create) a store directory; on any error everything is given back.

    Raises:
        StoreError: see ``SsdTier.open``.
        CapacityError: the capacity cannot be had.
    """
    layout = Layout(config.path)
    _prepare_directory(layout, config.read_only)
    lock = None if config.read_only else DirectoryLock.acquire(layout.lock, now=clock.time())
    try:
        return _open_locked(config, layout, backend, clock, lock)
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, (OSError, lmdb.Error)) and not isinstance(error, StoreError):
            raise _refused(layout.root, error) from error
        raise


def _open_locked(
    config: SsdConfig,
    layout: Layout,
    backend: IOBackend,
    clock: Clock,
    lock: DirectoryLock | None,
) -> Core:
    write = not config.read_only
    meta = _meta(layout, backend, write)
    files = SlabFiles(layout, meta, backend, write=write, direct=config.direct)
    slot_io = SlotIO(files, backend, make_codec(config.codec), config.io_threads)
    started = clock.monotonic()
    index: LmdbIndex | MemoryIndex | None = None
    try:
        if write:
            files.sweep()
        slabs = _usable_slabs(files, write)
        capacity = config.capacity_bytes
        if write:
            capacity = fit_capacity(
                layout.slabs, config.capacity_bytes, config.slot_bytes, files.total_bytes
            )
        found = _find(config, layout, backend, files, slot_io, slabs, locked=lock is not None)
        index = found.index
        catalog = Catalog(config.slot_bytes)
        for slab in slabs:
            catalog.add_slab(slab)
        purge = catalog.load(found.loaded)
        if write:
            purge += _shrink(catalog, files, capacity)
        if isinstance(index, LmdbIndex) and write:
            index.commit(delete=purge)
            _describe(layout, backend, config.namespaces)
        removed = Removed()
        removed.add(purge)
        elapsed = 0.0 if found.clean else clock.monotonic() - started
        return Core(
            config=config,
            layout=layout,
            backend=backend,
            clock=clock,
            lock=lock,
            files=files,
            index=index,
            catalog=catalog,
            slot_io=slot_io,
            counters=Counters(),
            breaker=Breaker(threshold=config.breaker_threshold),
            removed=removed,
            capacity_bytes=capacity,
            next_seq=found.max_seq + 1,
            durable_seq=found.durable_seq,
            pid=os.getpid(),
            clean_open=found.clean,
            recover_seconds=elapsed,
            recovered_pages=0 if found.clean else len(catalog),
        )
    except BaseException:
        if index is not None:
            index.close()
        files.close()
        raise


def _prepare_directory(layout: Layout, read_only: bool) -> None:
    """Create the directory, or make sure that it is a store's (or an empty one)."""
    root = layout.root
    try:
        if not read_only:
            os.makedirs(root, mode=0o700, exist_ok=True)
        entries = os.listdir(root)
    except FileNotFoundError:
        raise NotAStoreError(f"{root}: no such directory; a read-only open creates none") from None
    except OSError as error:
        raise _refused(root, error) from error
    if "meta" in entries:
        return
    if read_only or layout.files()[1]:
        raise NotAStoreError(
            f"{root}: not a tierkv store (no meta file); choose an empty or a new directory"
        )


def _meta(layout: Layout, backend: IOBackend, write: bool) -> StoreMeta:
    try:
        meta = load_meta(layout.meta)
        if meta is None and write:
            meta = StoreMeta(uuid.uuid4().hex)
            os.makedirs(layout.slabs, mode=0o700, exist_ok=True)
            backend.write_file(layout.meta, encode_meta(meta))
        elif write:
            os.makedirs(layout.slabs, mode=0o700, exist_ok=True)
    except StoreError:
        raise
    except OSError as error:
        raise _refused(layout.root, error) from error
    if meta is None:
        raise NotAStoreError(f"{layout.root}: not a tierkv store (no meta file)")
    return meta


def _refused(root: str, error: OSError | lmdb.Error) -> StoreError:
    number = getattr(error, "errno", None)
    if number == errno.EROFS:
        return StoreReadOnlyError(
            f"{root}: on a read-only filesystem; `tierkv ls` and `tierkv verify` can look at a "
            "store there, but it cannot be used"
        )
    reason = getattr(error, "strerror", None) or error
    return StoreError(
        f"{root}: cannot be opened ({reason}); check the path (a directory?), its owner, its "
        "free space and the disk"
    )


def _usable_slabs(files: SlabFiles, write: bool) -> list[SlabMeta]:
    """Return the slabs whose files are whole; forget the others with all their pages."""
    usable = []
    for slab in files.meta.slabs:
        damage = files.damage(slab)
        if damage is None:
            usable.append(slab)
            continue
        logger.warning("slab %04d is %s; its pages are lost", slab.id, damage)
        if write:
            files.drop(slab.id)
    return usable


def _find(
    config: SsdConfig,
    layout: Layout,
    backend: IOBackend,
    files: SlabFiles,
    slot_io: SlotIO,
    slabs: Sequence[SlabMeta],
    *,
    locked: bool,
) -> _Found:
    """Find the pages: index after an orderly close, scan otherwise."""
    mark = load_clean(layout.clean)
    if not locked:
        return _find_to_read(config, layout, backend, slot_io, slabs, mark)
    # Gone before the index is used: should reading it kill the process, the next open scans.
    backend.remove_file(layout.clean)
    clean = None if mark is None else load_clean_index(layout, backend, mark)
    if mark is not None and clean is not None:
        return _Found(*clean, mark.max_seq, mark.durable_seq, clean=True)
    scan = scan_slabs(slot_io, slabs, config.io_threads)
    # What a dead process wrote may not be durable yet, and a flush will promise it.
    for slab_id in {record.slab for record in scan.records}:
        backend.fdatasync(files.descriptor(slab_id))
    rebuilt, loaded = rebuild_index(layout, backend, scan.records)
    return _Found(rebuilt, loaded, scan.max_seq, scan.max_seq, clean=not slabs)


def _find_to_read(
    config: SsdConfig,
    layout: Layout,
    backend: IOBackend,
    slot_io: SlotIO,
    slabs: Sequence[SlabMeta],
    mark: CleanMark | None,
) -> _Found:
    """Likewise without the lock and without writing: a scan stays in memory."""
    found = None
    if mark is not None:
        found = load_clean_index(layout, backend, mark, read_only=True)
    elif is_locked(layout.lock):
        found = load_live_index(layout, backend)
    if found is not None:
        return _Found(*found, 0, 0, clean=mark is not None)
    scan = scan_slabs(slot_io, slabs, config.io_threads)
    index = MemoryIndex(scan.records)
    return _Found(index, _with_sums(index, scan), scan.max_seq, 0, clean=not slabs)


def _with_sums(index: MemoryIndex, scan: Scan) -> Loaded:
    sums = {key: int.from_bytes(value[-8:], "little") for key, value in index.records()}
    return [(record, sums[record.info.key]) for record in scan.records]


def _describe(layout: Layout, backend: IOBackend, namespaces: Mapping[bytes, str]) -> None:
    """Add descriptions of namespaces to those known, for whoever lists the pages."""
    names = load_names(layout.names)
    if any(names.get(digest) != text for digest, text in namespaces.items()):
        backend.write_file(layout.names, encode_names({**names, **namespaces}))


def _shrink(catalog: Catalog, files: SlabFiles, capacity: int) -> list[bytes]:
    """Drop slabs until they fit a smaller capacity; return the keys lost."""
    lost: list[bytes] = []
    while files.total_bytes > capacity:
        reclaimable = catalog.reclaimable()
        slab = (
            reclaimable[0]
            if reclaimable
            else min(files.meta.slabs, key=lambda s: (catalog.pages_in(s.id), -s.id))
        )
        keys = catalog.drop_slab(slab.id)
        assert keys is not None, "I/O in flight while opening"
        files.drop(slab.id)
        lost += keys
        logger.warning(
            "slab %04d with %d pages dropped: the disk tier became smaller", slab.id, len(keys)
        )
    return lost
