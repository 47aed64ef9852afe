"""Emptying a store directory that nobody has open."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from tierkv.errors import NotAStoreError
from tierkv.storage.backend import IOBackend, OsBackend
from tierkv.storage.layout import Layout, load_meta
from tierkv.storage.lock import DirectoryLock
from tierkv.storage.recovery import remove_index
from tierkv.storage.slabs import SlabFiles


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What emptying a store removed.

    Attributes:
        slabs: slab files.
        bytes: bytes of these files, given back to the filesystem.
    """

    slabs: int
    bytes: int


def clear_directory(
    path: str | os.PathLike[str], *, backend: IOBackend | None = None
) -> ClearReport:
    """Remove all pages of a store and the files that held them.

    The directory stays a store of the same identity; files that are not ours stay.  When the
    process dies meanwhile, the store opens as usual, with some of its pages.

    Raises:
        NotAStoreError, StoreVersionError: the directory holds something else.
        StoreLockedError: a process has it open.
        StoreError: it may not be changed.
    """
    io = backend or OsBackend()
    layout = Layout(os.path.abspath(os.fspath(path)))
    if load_meta(layout.meta) is None:
        raise NotAStoreError(f"{layout.root}: not a tierkv store (no meta file)")
    lock = DirectoryLock.acquire(layout.lock, now=time.time())
    try:
        return _clear(layout, io)
    finally:
        lock.release()


def _clear(layout: Layout, backend: IOBackend) -> ClearReport:
    meta = load_meta(layout.meta)  # again, now that nobody else changes it
    if meta is None:
        raise NotAStoreError(f"{layout.root}: its meta file was removed meanwhile")
    # Without the marker and the index, what is left at any moment is what the slabs hold.
    backend.remove_file(layout.clean)
    for index in (layout.index, layout.index + ".new", layout.index + ".old"):
        remove_index(index, backend)
    files = SlabFiles(layout, meta, backend, write=True, direct=False)
    try:
        for slab in meta.slabs:
            files.drop(slab.id)
    finally:
        files.close()
    return ClearReport(len(meta.slabs), sum(slab.file_bytes for slab in meta.slabs))
