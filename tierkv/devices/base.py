"""The device protocol: memory, streams, events and copies.

Everything above this file is written once against it.  A stream runs its copies in
order; an event marks a point in a stream; the compute stream is the one on which the
caller's model runs.  Work on two streams, or on a stream and the host, is ordered by events
only: whoever touches bytes that another stream has touched waits for an event after that.
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
    """One copy between uint8 tensors of one shape: whole pages, or ranges of them.

    Up to four dimensions with any strides; the last one is contiguous.
    """

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


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a stream's finished batches of copies took, since it was created.

    Attributes:
        batches: calls of ``copy``.
        bytes: bytes copied.
        seconds: time that the stream spent in copies (virtual time where time is simulated).
    """

    batches: int
    bytes: int
    seconds: float


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
    """An ordered queue of copies and kernels.  Thread-safe."""

    name: str

    def copy(self, ops: Sequence[CopyOp]) -> None:
        """Enqueue a batch of copies; memory must stay valid until an event after it is done.

        The copies of one batch have no order among themselves.

        Raises:
            DeviceError: a copy failed at once, on the compute stream; elsewhere the next event
                reports it.
            StoreClosedError: the device is closed.
        """
        ...

    def record(self, event: Event | None = None) -> Event:
        """Return an event for the end of everything enqueued so far.

        Args:
            event: an event of this device to record anew; everybody who needs its earlier
                point must have waited for it.
        """
        ...

    def wait(self, event: Event, timeout_s: float) -> None:
        """Order everything enqueued from now on after ``event``.

        If the event's work fails or is late, what is ordered after it is not done, and the
        next event recorded here reports it.

        Raises:
            DeviceError: where waiting blocks the caller: the work failed, or the time is up.
        """
        ...

    def use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Say what a kernel of the caller's, enqueued here, reads and writes.

        Only devices with ``checks_order`` look at it; call it for those only.

        Args:
            what: names the kernel in reports.
            reads: ranges of device memory or pinned host memory.
            writes: likewise.
        """
        ...

    def traffic(self) -> Traffic:
        """Return what the finished copies took."""
        ...


class Device(Protocol):
    """Memory and streams of one accelerator, or of the CPU standing in for one."""

    name: str
    torch_device: str
    checks_order: bool

    @property
    def compute(self) -> Stream:
        """The stream on which the caller's model runs."""
        ...

    def allocate(self, rows: int, row_bytes: int) -> Tensor:
        """Return uint8 memory of shape ``[rows, row_bytes]``.

        Raises:
            CapacityError: the memory cannot be had.
        """
        ...

    def pin(self, memory: memoryview) -> None:
        """Register host memory for copies to and from the device, until ``close``.

        Raises:
            CapacityError: the system does not allow to pin so much.
        """
        ...

    def stream(self, name: str) -> Stream:
        """Return the copy stream of that name, created at the first call."""
        ...

    def host_use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Say that the host itself is about to read or write pinned memory (disk I/O).

        Only devices with ``checks_order`` look at it; call it for those only.
        """
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
