"""One process owns a directory: a lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import weakref
from dataclasses import dataclass

from tierkv.errors import StoreError, StoreLockedError, StoreReadOnlyError

# A lock of the open file description: like flock it dies with its process, and unlike flock
# one can ask about it without taking it, so that a question never makes an opening fail.
_FLOCK = struct.Struct("@hhqqi0q")
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds (or last held) a directory."""

    pid: int | None
    host: str | None
    since: float | None


class DirectoryLock:
    """An exclusive lock on the ``lock`` file, with the owner's name inside.

    The kernel drops the lock when the process dies, however it dies.  The file itself stays:
    removing it would let two processes lock two different files of one name.
    """

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        _held.add(self)

    @classmethod
    def acquire(cls, path: str, *, now: float) -> DirectoryLock:
        """Take the lock.

        Args:
            path: the lock file, created when missing.
            now: Unix seconds, written into the file.

        Raises:
            StoreLockedError: another process (or another store here) has it.
            StoreReadOnlyError: the filesystem is read-only.
            StoreError: the file cannot be created or opened.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno == errno.EROFS:
                raise StoreReadOnlyError(
                    f"{path}: on a read-only filesystem; `tierkv ls` and `tierkv verify` can "
                    "look at a store there, but it cannot be used"
                ) from error
            raise StoreError(
                f"{path}: cannot be opened for writing ({error.strerror}); check permissions"
            ) from error
        try:
            taken = _take(fd)
        except OSError as error:
            os.close(fd)
            raise StoreError(
                f"{path}: cannot be locked ({error.strerror}); the filesystem must support "
                "locks of open file descriptions"
            ) from error
        if not taken:
            owner = read_owner(path)
            os.close(fd)
            raise StoreLockedError(
                f"{os.path.dirname(path)}: in use by process {owner.pid} on {owner.host}; "
                "close that store first",
                pid=owner.pid,
                host=owner.host,
                since=owner.since,
            )
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
        except OSError:
            pass  # The lock holds all the same; only its owner's name is unknown.
        return cls(path, fd)

    def release(self) -> None:
        """Give the directory up.  Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _held.discard(self)


# A forked child inherits the descriptor and, with it, the lock: it would keep the directory
# locked after its parent died.  Closing the child's copy leaves the parent's lock alone.
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


def _take(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def read_owner(path: str) -> LockOwner:
    """Return who the lock file names; all None when it says nothing readable."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(4096))
        return LockOwner(int(value["pid"]), str(value["host"]), float(value["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return LockOwner(None, None, None)


def is_locked(path: str) -> bool:
    """Whether a live process holds the lock.  Changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
