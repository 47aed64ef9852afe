"""Faults that tests inject into a device: given to it openly, never patched in."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tierkv.errors import CapacityError
from tierkv.units import format_bytes


class InjectedFaultError(OSError):
    """A copy that was told to fail."""


class WorkerDeath(BaseException):
    """Ends a stream's worker; no Exception, so that no handler of copy errors keeps it alive."""


@dataclass(slots=True)
class _Fault:
    what: str  # "copy", "hang", "death" or "memory"
    stream: str | None
    after: int
    count: int | None
    seconds: float = 0.0

    def strikes(self, what: str, stream: str | None) -> bool:
        """Count one occasion; return whether the fault strikes at it."""
        if what != self.what or (self.stream is not None and stream != self.stream):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.count is None:
            return True
        self.count -= 1
        return self.count >= 0


class Faults:
    """What shall go wrong, and when.  Thread-safe.

    Every method takes ``after``, how many batches (or allocations) pass unharmed first, and
    where it makes sense ``count``, how many are struck then (None: all of them).  A stream of
    None means any.
    """

    def __init__(self) -> None:
        self.struck = 0
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._released = threading.Event()

    def fail_copies(
        self, stream: str | None = None, *, after: int = 0, count: int | None = 1
    ) -> None:
        """Make batches of copies fail."""
        self._add(_Fault("copy", stream, after, count))

    def hang(self, stream: str | None = None, *, after: int = 0, seconds: float = 3600.0) -> None:
        """Make one batch take so much longer (virtual seconds where time is simulated)."""
        self._released.clear()
        self._add(_Fault("hang", stream, after, 1, seconds))

    def kill(self, stream: str | None = None, *, after: int = 0) -> None:
        """End a stream's worker at a batch."""
        self._add(_Fault("death", stream, after, 1))

    def fail_allocations(self, *, after: int = 0, count: int | None = 1) -> None:
        """Let the device have no memory left."""
        self._add(_Fault("memory", None, after, count))

    def clear(self) -> None:
        """Let nothing more go wrong, and end the hanging where time is real."""
        with self._lock:
            self._faults.clear()
        self._released.set()

    # -- called by devices ---------------------------------------------------------------

    def allocating(self, size: int) -> None:
        """Raise CapacityError when this allocation shall fail."""
        if self._strike("memory", None) is not None:
            raise CapacityError(
                f"device pool: {format_bytes(size)} cannot be allocated (a fault that was asked "
                "for); give a smaller budget"
            )

    def copying(self, stream: str) -> float:
        """Return the seconds that this batch shall hang; raise when it shall fail."""
        if self._strike("death", stream) is not None:
            raise WorkerDeath(f"the worker of stream {stream!r} was told to die")
        if self._strike("copy", stream) is not None:
            raise InjectedFaultError(f"a copy on stream {stream!r} was told to fail")
        fault = self._strike("hang", stream)
        return 0.0 if fault is None else fault.seconds

    def hold(self, seconds: float) -> None:
        """Block for the time that a batch hangs, at most until ``clear``."""
        if seconds:
            self._released.wait(seconds)

    def _add(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _strike(self, what: str, stream: str | None) -> _Fault | None:
        if not self._faults:
            return None
        with self._lock:
            struck = [fault for fault in self._faults if fault.strikes(what, stream)]
            self.struck += bool(struck)
        return struck[0] if struck else None
