"""A kit for testing tiers: faults on demand, power cuts, a clock to set, pages to recognise.

Nothing here needs root, a broken disk or a wait; tests of other tiers may use it as well.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierkv.storage.aligned import ByteArray, aligned_empty
from tierkv.storage.backend import IOBackend, OsBackend
from tierkv.storage.format import PageInfo
from tierkv.storage.power_cut import CrashBackend, kill_image
from tierkv.storage.types import PageWrite

__all__ = [
    "TEST_NAMESPACE",
    "CrashBackend",
    "FaultyBackend",
    "Gate",
    "ManualClock",
    "kill_image",
    "make_page",
    "page_bytes",
    "page_key",
]

TEST_NAMESPACE = hashlib.sha256(b"tierkv/testing").digest()


# -- pages -------------------------------------------------------------------------------


def page_key(number: int) -> bytes:
    """Return the key of test page ``number``."""
    return hashlib.sha256(f"page {number}".encode()).digest()


def page_bytes(number: int, size: int, version: int = 0) -> ByteArray:
    """Return the bytes of a test page, recomputable from its number and version."""
    out = aligned_empty(size)
    seed = int.from_bytes(hashlib.sha256(f"{number}/{version}".encode()).digest()[:8], "little")
    out[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return out


def make_page(
    number: int, size: int, *, version: int = 0, layer_bytes: int = 0, **info: int | bytes
) -> PageWrite:
    """Return a test page ready to be put; ``info`` overrides fields of its PageInfo."""
    fields: dict[str, int | bytes] = {"namespace": TEST_NAMESPACE, "end_token": number, **info}
    page_info = PageInfo(key=page_key(number), **fields)  # type: ignore[arg-type]
    return PageWrite(page_info, page_bytes(number, size, version), layer_bytes)


# -- time --------------------------------------------------------------------------------


class ManualClock:
    """A clock that only a test moves."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._monotonic = 0.0
        self._time = now

    def monotonic(self) -> float:
        """Return the interval clock."""
        return self._monotonic

    def time(self) -> float:
        """Return the wall clock."""
        return self._time

    def advance(self, seconds: float) -> None:
        """Move both clocks on."""
        self._monotonic += seconds
        self._time += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator might."""
        self._time += seconds


# -- faults ------------------------------------------------------------------------------


class Gate:
    """Holds a call up until the test opens it: a device that hangs."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def hold(self) -> None:
        """Say that the call has arrived, and wait."""
        self.reached.set()
        if not self.opened.wait(60):
            raise TimeoutError("nobody opened the gate")


@dataclass(slots=True)
class _Injection:
    op: str
    skip: int
    times: int | None
    action: int | BaseException | Gate | str
    match: str
    fired: int = field(default=0)


class FaultyBackend:
    """Passes everything to another backend, except for what a test injects.

    Operations are the names of ``IOBackend``'s methods.  Thread-safe.
    """

    def __init__(self, inner: IOBackend | None = None) -> None:
        self._inner: IOBackend = inner or OsBackend()
        self._lock = threading.Lock()
        self._injections: list[_Injection] = []
        self._paths: dict[int, str] = {}
        self.calls: Counter[str] = Counter()

    def inject(
        self,
        op: str,
        action: int | BaseException | Gate | str,
        *,
        skip: int = 0,
        times: int | None = 1,
        match: str = "",
    ) -> None:
        """Make later calls of an operation go wrong.

        Args:
            op: the operation.
            action: an errno to raise; an exception to raise; a ``Gate`` to wait at;
                ``"short"``: transfer one 4 KiB unit only; ``"flip"``: turn one bit of the
                last buffer.
            skip: calls that pass before.
            times: calls that go wrong; None for all from then on.
            match: only calls on paths that contain this.
        """
        with self._lock:
            self._injections.append(_Injection(op, skip, times, action, match))

    def clear(self) -> None:
        """Let everything pass again."""
        with self._lock:
            self._injections.clear()

    def fired(self, op: str) -> int:
        """Return how many calls of an operation went wrong."""
        with self._lock:
            return sum(i.fired for i in self._injections if i.op == op)

    def _next(self, op: str, path: str) -> int | BaseException | Gate | str | None:
        with self._lock:
            self.calls[op] += 1
            for injection in self._injections:
                if injection.op != op or injection.match not in path:
                    continue
                if injection.skip:
                    injection.skip -= 1
                elif injection.times is None or injection.fired < injection.times:
                    injection.fired += 1
                    return injection.action
        return None

    def _trouble(self, op: str, path: str) -> str | None:
        action = self._next(op, path)
        if isinstance(action, int):
            raise OSError(action, os.strerror(action), path)
        if isinstance(action, BaseException):
            raise action
        if isinstance(action, Gate):
            action.hold()
            return None
        return action

    def open(self, path: str, *, write: bool, direct: bool, create: bool = False) -> int:
        """See ``IOBackend``."""
        self._trouble("open", path)
        fd = self._inner.open(path, write=write, direct=direct, create=create)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """See ``IOBackend``."""
        self._paths.pop(fd, None)
        self._inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """See ``IOBackend``."""
        trouble = self._trouble("preadv", self._paths.get(fd, ""))
        if trouble == "short":
            return self._inner.preadv(fd, [buffers[0][:4096]], offset)
        count = self._inner.preadv(fd, buffers, offset)
        if trouble == "flip":
            buffers[-1][buffers[-1].nbytes // 2] ^= 1
        return count

    def pwritev(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """See ``IOBackend``."""
        trouble = self._trouble("pwritev", self._paths.get(fd, ""))
        if trouble == "short":
            return self._inner.pwritev(fd, [buffers[0][:4096]], offset)
        if trouble == "flip":
            last = aligned_empty(buffers[-1].nbytes)
            np.copyto(last, buffers[-1])
            last[last.nbytes // 2] ^= 1
            buffers = [*buffers[:-1], last]
        return self._inner.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """See ``IOBackend``."""
        self._trouble("fdatasync", self._paths.get(fd, ""))
        self._inner.fdatasync(fd)

    def fallocate(self, fd: int, size: int) -> None:
        """See ``IOBackend``."""
        self._trouble("fallocate", self._paths.get(fd, ""))
        self._inner.fallocate(fd, size)

    def sync_index(self, path: str, sync: Callable[[], None]) -> None:
        """See ``IOBackend``."""
        self._trouble("sync_index", path)
        self._inner.sync_index(path, sync)

    def commit_index(self, path: str, commit: Callable[[], None]) -> None:
        """See ``IOBackend``."""
        self._trouble("commit_index", path)
        self._inner.commit_index(path, commit)

    def write_file(self, path: str, data: bytes) -> None:
        """See ``IOBackend``."""
        self._trouble("write_file", path)
        self._inner.write_file(path, data)

    def remove_file(self, path: str) -> None:
        """See ``IOBackend``."""
        self._trouble("remove_file", path)
        self._inner.remove_file(path)

    def rename(self, source: str, target: str) -> None:
        """See ``IOBackend``."""
        self._trouble("rename", target)
        self._inner.rename(source, target)
