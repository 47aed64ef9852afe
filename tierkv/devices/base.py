"""The device protocol: memory, streams, events and copies.

Everything above this file is written once against it.  A stream runs its copies in
order; an event marks a point in a stream; the compute stream is the one on which the
caller's model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from torch import Tensor


class DeviceError(TierKVError, RuntimeError):
    """A copy failed, or did not finish within its deadline."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One copy of equally many bytes: a whole page or one layer's range of it."""

    destination: Tensor
    source: Tensor


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """What a device did so far."""

    name: str
    allocated_bytes: int
    copies: int
    copied_bytes: int
    failed_copies: int
    streams: int


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Return whether everything before the point has finished; never blocks."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block the calling thread until done; False when the time is up.

        Raises:
            DeviceError: work before the point failed.
        """
        ...


class Stream(Protocol):
    """An ordered queue of copies."""

    def copy(self, ops: Sequence[CopyOp]) -> None:
        """Enqueue a batch of copies; memory must stay valid until an event after it is done."""
        ...

    def record(self) -> Event:
        """Return an event for the end of everything enqueued so far."""
        ...

    def wait(self, event: Event, timeout_s: float) -> None:
        """Order everything enqueued from now on after ``event``.

        Raises:
            DeviceError: the event's work failed, or (where waiting blocks) the time is up.
        """
        ...


class Device(Protocol):
    """Memory and streams of one accelerator, or of the CPU standing in for one."""

    name: str
    torch_device: str
    compute: Stream

    def allocate(self, rows: int, row_bytes: int) -> Tensor:
        """Return uint8 memory of shape ``[rows, row_bytes]``.

        Raises:
            CapacityError: the memory cannot be had.
        """
        ...

    def stream(self, name: str) -> Stream:
        """Return the copy stream of that name, created at the first call."""
        ...

    def stats(self) -> DeviceStats:
        """Return counters."""
        ...

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the streams and release the memory; idempotent."""
        ...
