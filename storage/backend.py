"""The seam between the tier and the operating system.

Every byte of slab data passes through an ``IOBackend``, and so does every sync: tests put a
faulty or a crashing backend in its place and need neither root nor a broken disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from tierkv.storage.aligned import ALIGNMENT, ByteArray

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class IOBackend(Protocol):
    """What the tier asks of a filesystem.  Every method may raise OSError.

    Called from several threads at once; one file descriptor may be used by all of them.
    """

    def open(self, path: str, *, write: bool, direct: bool, create: bool = False) -> int:
        """Open a slab file and return its descriptor."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def size(self, fd: int) -> int:
        """Return the length of the open file."""
        ...

    def preadv(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """Read into ``buffers`` and return how many bytes came; may be short."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """Write ``buffers`` and return how many bytes went; may be short."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Make everything written to the file durable."""
        ...

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve ``size`` bytes from the start of the file."""
        ...

    def sync_index(self, path: str, sync: Callable[[], None]) -> None:
        """Call ``sync``, which makes the index database at ``path`` durable."""
        ...

    def commit_index(self, path: str, commit: Callable[[], None]) -> None:
        """Call ``commit``, which commits one index transaction."""
        ...

    def write_file(self, path: str, data: bytes) -> None:
        """Replace a small file, whole or not at all, and durably."""
        ...

    def remove_file(self, path: str) -> None:
        """Remove a file durably; one that is not there is no error."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory durably."""
        ...


class OsBackend:
    """The operating system, through ``os``."""

    def open(self, path: str, *, write: bool, direct: bool, create: bool = False) -> int:
        """Open a file, with O_DIRECT when asked."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        flags |= _O_DIRECT if direct else 0
        flags |= os.O_CREAT | os.O_TRUNC if create else 0
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the length of the open file."""
        return os.fstat(fd).st_size

    def preadv(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """Read with ``os.preadv``."""
        return os.preadv(fd, cast("Any", buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """Write with ``os.pwritev``."""
        return os.pwritev(fd, cast("Any", buffers), offset)

    def fdatasync(self, fd: int) -> None:
        """Sync with ``os.fdatasync``."""
        os.fdatasync(fd)

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve with ``os.posix_fallocate``: a sparse file would only promise space."""
        os.posix_fallocate(fd, 0, size)
        os.fsync(fd)

    def sync_index(self, path: str, sync: Callable[[], None]) -> None:
        """Sync the index."""
        sync()

    def commit_index(self, path: str, commit: Callable[[], None]) -> None:
        """Commit to the index."""
        commit()

    def write_file(self, path: str, data: bytes) -> None:
        """Write beside, sync, rename over, sync the directory."""
        new = path + ".new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        self.rename(new, path)

    def remove_file(self, path: str) -> None:
        """Unlink, then sync the directory."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        sync_directory(os.path.dirname(path))

    def rename(self, source: str, target: str) -> None:
        """Rename, then sync the directory."""
        os.rename(source, target)
        sync_directory(os.path.dirname(target))


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


Transfer = Callable[[int, Sequence[ByteArray], int], int]


def transfer_all(call: Transfer, fd: int, buffers: Sequence[ByteArray], offset: int) -> bool:
    """Read or write all of ``buffers``, resuming after short transfers.

    Args:
        call: ``backend.preadv`` or ``backend.pwritev``.
        fd: an open descriptor.
        buffers: 4 KiB-aligned buffers, whole multiples of 4 KiB.
        offset: where in the file, a multiple of 4 KiB.

    Returns:
        False when the file ends (or the device takes no more) before the buffers do.
    """
    total = sum(b.nbytes for b in buffers)
    count = call(fd, buffers, offset)
    if count == total:
        return True
    done, stalled = 0, 0
    while True:
        # O_DIRECT must resume on an aligned offset, so a ragged end is transferred again.
        advanced = (count & -ALIGNMENT) if count < total - done else count
        stalled = 0 if advanced else stalled + 1
        done += advanced
        if done >= total:
            return True
        if stalled > 1:
            return False
        count = call(fd, _skip(buffers, done), offset + done)


def _skip(buffers: Sequence[ByteArray], count: int) -> list[ByteArray]:
    """Return the buffers without their first ``count`` bytes."""
    rest: list[ByteArray] = []
    for buffer in buffers:
        if count < buffer.nbytes:
            rest.append(buffer[count:])
        count = max(0, count - buffer.nbytes)
    return rest
