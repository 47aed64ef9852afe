"""One process owns a directory: a lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import weakref
from dataclasses import dataclass

from tierkv.errors import StoreError, StoreLockedError, StoreReadOnlyError

_ASKED_TRIES = 1000


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds (or last held) a directory."""

    pid: int | None
    host: str | None
    since: float | None


class DirectoryLock:
    """An exclusive flock on the ``lock`` file, with the owner's name inside.

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
            kind = StoreReadOnlyError if error.errno == errno.EROFS else StoreError
            raise kind(
                f"{path}: cannot be opened for writing ({error.strerror}); "
                "check permissions, or open the store with read_only=True"
            ) from error
        if not _take(fd):
            owner = read_owner(path)
            os.close(fd)
            raise StoreLockedError(
                f"{os.path.dirname(path)}: in use by process {owner.pid} on {owner.host}; "
                "close that store first, or open this one with read_only=True",
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
    """Take the exclusive lock unless an owner has it.

    Somebody may be asking ``is_locked`` at this very moment, with a shared lock: where a
    shared lock can be had too, there is no owner, and the question is over in no time.
    """
    for _ in range(_ASKED_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return False
    return False


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
        # A shared lock asks without ever standing in the way of another question.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
