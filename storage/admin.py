"""Looking at and clearing store directories, for the command line and for async programs.

Nothing here opens a tier or disturbs one that is open elsewhere.  The async forms do the same
work on an executor (through aiofiles), so that an event loop is never held up by a disk.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import aiofiles.os

from tierkv.errors import StoreError
from tierkv.storage.clearing import ClearReport, clear_directory
from tierkv.storage.layout import Layout, StoreMeta, load_meta
from tierkv.storage.lock import LockOwner, is_locked, read_owner
from tierkv.storage.ssd import SsdTier
from tierkv.storage.types import VerifyReport

__all__ = [
    "ClearReport",
    "DirectoryInfo",
    "clear_directory",
    "clear_directory_async",
    "inspect_directory",
    "inspect_directory_async",
    "verify_async",
]


@dataclass(frozen=True, slots=True)
class DirectoryInfo:
    """What a directory holds, as far as can be seen from outside.

    Attributes:
        path: the directory.
        is_store: it is a store that this version can open.
        problem: why it is not, in words; empty when it is.
        fingerprint: the store's own id, empty when unknown.
        locked: a live process has it open for writing.
        owner: who that is, or who had it open last.
        clean: the last shutdown was orderly.
        slabs: slab files.
        slot_bytes: sizes of slots in use.
        slab_bytes: bytes of all slabs, as allocated on disk.
        index_bytes: bytes of the index.
        total_bytes: bytes of all our files.
        unknown_files: files that are not a store's.
    """

    path: str
    is_store: bool
    problem: str
    fingerprint: str
    locked: bool
    owner: LockOwner
    clean: bool
    slabs: int
    slot_bytes: tuple[int, ...]
    slab_bytes: int
    index_bytes: int
    total_bytes: int
    unknown_files: tuple[str, ...]


def inspect_directory(path: str | os.PathLike[str]) -> DirectoryInfo:
    """Return what a directory holds.  Changes nothing, raises nothing for a bad directory."""
    layout = Layout(os.path.abspath(os.fspath(path)))
    meta, problem = _meta_or_problem(layout)
    known, unknown = layout.files()
    sizes = {name: _allocated(os.path.join(layout.root, name)) for name in known}
    return DirectoryInfo(
        path=layout.root,
        is_store=meta is not None,
        problem=problem,
        fingerprint="" if meta is None else meta.fingerprint,
        locked=is_locked(layout.lock),
        owner=read_owner(layout.lock),
        clean=os.path.exists(layout.clean),
        slabs=0 if meta is None else len(meta.slabs),
        slot_bytes=() if meta is None else tuple(sorted({s.slot_bytes for s in meta.slabs})),
        slab_bytes=sum(n for name, n in sizes.items() if name.startswith("slabs" + os.sep)),
        index_bytes=sum(n for name, n in sizes.items() if name.startswith("index")),
        total_bytes=sum(sizes.values()),
        unknown_files=tuple(unknown),
    )


async def inspect_directory_async(path: str | os.PathLike[str]) -> DirectoryInfo:
    """Like ``inspect_directory``, without holding up the event loop."""
    call = cast("Callable[..., Awaitable[DirectoryInfo]]", aiofiles.os.wrap(inspect_directory))
    return await call(path)


async def clear_directory_async(path: str | os.PathLike[str]) -> ClearReport:
    """Like ``clear_directory``, without holding up the event loop.

    Once begun it runs to its end, even if the task is cancelled.
    """
    call = cast("Callable[..., Awaitable[ClearReport]]", aiofiles.os.wrap(clear_directory))
    return await call(path)


async def verify_async(tier: SsdTier, *, repair: bool = False) -> VerifyReport:
    """Like ``tier.verify``, without holding up the event loop.

    Once begun it runs to its end, even if the task is cancelled: the tier must stay open.
    """
    call = cast("Callable[..., Awaitable[VerifyReport]]", aiofiles.os.wrap(tier.verify))
    return await call(repair=repair)


def _meta_or_problem(layout: Layout) -> tuple[StoreMeta | None, str]:
    if not os.path.isdir(layout.root):
        return None, "no such directory"
    try:
        meta = load_meta(layout.meta)
    except StoreError as error:
        return None, str(error)
    return meta, "" if meta is not None else "not a tierkv store (no meta file)"


def _allocated(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0
