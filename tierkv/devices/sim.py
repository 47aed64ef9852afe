"""A simulated accelerator: virtual time, real copies, and a check of every access's order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tierkv.devices.base import CopyOp, DeviceError, DeviceStats
from tierkv.devices.faults import Faults
from tierkv.devices.sim_memory import DEVICE, DISK, HOST, Memory, MemoryMap
from tierkv.devices.sim_model import H100_PCIE5, HardwareModel, LinkSchedule
from tierkv.devices.sim_order import HOST as HOST_TIMELINE
from tierkv.devices.sim_order import OrderChecker
from tierkv.devices.sim_stream import SimPoint, SimStream, device_error, perform
from tierkv.errors import CapacityError, InvalidInputError, StoreClosedError
from tierkv.units import format_bytes

_ASKING_S = 1e-6  # so that a loop that asks whether something is done comes to an end
_SHARED = {"h2d": "h2d", "d2h": "d2h", "d2d": "d2d", "read": "nvme", "write": "nvme"}
_LINKS = {
    (HOST, DEVICE): "h2d",
    (DEVICE, HOST): "d2h",
    (DISK, HOST): "read",
    (HOST, DISK): "write",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the modelled timeline: something that a stream did, in virtual seconds."""

    stream: str
    what: str
    start_s: float
    end_s: float
    bytes: int


class SimDevice:
    """Implements :class:`tierkv.devices.base.Device` in virtual time.  Thread-safe.

    The host has a clock that moves when it waits for an event, asks for one, or is told to;
    a stream begins what it is given at the host's time or later.  Nothing depends on real
    time: the same program gives the same timeline.  Copies are made when somebody waits for
    them, computation on the compute stream at once, by the caller.

    Memory that was neither allocated here nor pinned counts as the device's, as the pool of
    an engine does.

    Args:
        model: the hardware.
        byte_scale: modelled bytes that each real byte stands for.
        faults: what shall go wrong, for tests.
        trace: keep ``timeline``.

    Attributes:
        compute: the stream of the caller's kernels; has ``run``.
        order: the order checker.
        timeline: what happened when, if it is kept.
    """

    name = "sim"
    torch_device = "cpu"
    checks_order = True

    def __init__(
        self,
        model: HardwareModel = H100_PCIE5,
        *,
        byte_scale: float = 1.0,
        faults: Faults | None = None,
        trace: bool = False,
    ) -> None:
        if not byte_scale > 0:
            raise InvalidInputError(f"byte_scale must be positive, got {byte_scale}")
        self.model = model
        self.faults = faults or Faults()
        self.lock = threading.RLock()
        self.order = OrderChecker(MemoryMap())
        self.timeline: list[Span] = []
        self._trace = trace
        self._byte_scale = byte_scale
        self._now = 0.0
        self._links = {name: LinkSchedule() for name in set(_SHARED.values())}
        self._memory: list[Tensor] = []
        self._streams: dict[str, SimStream] = {}
        self._closed = False
        self.compute = SimStream(
            self, "compute", self.order.add_timeline("compute", copying=False), eager=True
        )

    # -- the protocol --------------------------------------------------------------------

    def allocate(self, rows: int, row_bytes: int) -> Tensor:
        """Return zeroed uint8 memory of shape ``[rows, row_bytes]``."""
        return self._allocate("device pool", DEVICE, rows, row_bytes)

    def pin(self, memory: memoryview) -> None:
        """Take host memory as such; copies from and to it use the links."""
        view = np.frombuffer(memory, np.uint8)
        with self.lock:
            self.must_be_open()
            slot = self.order.memory.slot_bytes_for(view.nbytes)
            self.order.memory.add(Memory("host memory", HOST, view.ctypes.data, view.nbytes, slot))

    def stream(self, name: str) -> SimStream:
        """Return the copy stream of that name."""
        with self.lock:
            self.must_be_open()
            if name not in self._streams:
                number = self.order.add_timeline(name, copying=True)
                self._streams[name] = SimStream(self, name, number, eager=False)
            return self._streams[name]

    def host_use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Say that the host itself is about to read or write pinned memory (disk I/O)."""
        with self.lock:
            self.order.use(HOST_TIMELINE, what, reads, writes)

    def stats(self) -> DeviceStats:
        """Return counters of the copies made so far."""
        with self.lock:
            streams = [self.compute, *self._streams.values()]
            return DeviceStats(
                name=self.name,
                allocated_bytes=sum(memory.numel() for memory in self._memory),
                copies=sum(s.copies for s in streams),
                copied_bytes=sum(s.copied_bytes for s in streams),
                failed_copies=sum(s.failed for s in streams),
                streams=len(self._streams),
            )

    def check(self) -> None:
        """Raise AssertionError on a violation of order, or when a stream's worker has died."""
        with self.lock:
            self.order.raise_violation()
            dead = {s.name: s.died for s in self._streams.values() if s.died is not None}
            assert not dead, f"streams whose worker died: {dead}"

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the streams and release the memory.

        Raises:
            OrderError: order was violated before, or work of a copy stream never waited for.
            DeviceError: a stream needs more than ``timeout_s`` virtual seconds.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = True
            streams = [*self._streams.values()]
            late = [s for s in streams if s.time_s > self._now + timeout_s]
            for stream in streams:
                if stream in late:
                    stream.abandon(DeviceError("the device was closed"))
                else:
                    self.advance_to(stream.time_s)
            for stream in streams:
                stream.perform_all()
            self._memory.clear()
            self.order.raise_violation()
            self.order.check_waited({s.timeline for s in late})
            self.order.memory.clear()
            if late:
                raise DeviceError(
                    f"streams {[s.name for s in late]} did not finish within {timeout_s} s"
                )

    # -- extras of the simulation --------------------------------------------------------

    def disk(self, rows: int, row_bytes: int) -> Tensor:
        """Return memory that stands for an NVMe drive: copies to and from host memory only."""
        return self._allocate("disk", DISK, rows, row_bytes)

    def now(self) -> float:
        """Return the host's virtual time in seconds."""
        return self._now

    def advance_host(self, seconds: float) -> None:
        """Let the host be busy for so long."""
        with self.lock:
            self._now += seconds

    def check_waited(self) -> None:
        """Raise OrderError when nobody waited for the last work of a copy stream."""
        with self.lock:
            self.order.check_waited()

    # -- for its streams and events, with the lock held ----------------------------------

    def must_be_open(self) -> None:
        """Raise StoreClosedError after ``close``."""
        if self._closed:
            raise StoreClosedError("the device is closed")

    def advance_to(self, time_s: float) -> None:
        """Move the host's clock forward."""
        self._now = max(self._now, time_s)

    def sizes(self, ops: Sequence[CopyOp]) -> dict[str, int]:
        """Return the bytes that a batch moves over each link."""
        sizes: dict[str, int] = {}
        for op in ops:
            link = self._link(op)
            sizes[link] = sizes.get(link, 0) + op.source.nbytes
        return sizes

    def carry(self, sizes: dict[str, int], ready: float, stream: str) -> float:
        """Book a batch on the links that it needs, one after the other; return its end."""
        end = ready
        for link, size in sizes.items():
            seconds = self.model.seconds(link, size * self._byte_scale)
            start = self._links[_SHARED[link]].book(end, seconds, now=self._now)
            end = start + seconds
            self.note(stream, link, start, end, size)
        return end

    def note(self, stream: str, what: str, start_s: float, end_s: float, size: int) -> None:
        """Enter a span into the timeline."""
        if self._trace:
            self.timeline.append(Span(stream, what, start_s, end_s, size))

    def host_asks(self, point: SimPoint) -> bool:
        """Return whether a point is reached, which takes a moment."""
        with self.lock:
            self._now += _ASKING_S
            if self._now < point.time_s:
                return False
            self._reach(point)
            return True

    def host_waits(self, point: SimPoint, timeout_s: float) -> bool:
        """Move the host's clock to a point, if that is not too far."""
        with self.lock:
            if point.time_s > self._now + timeout_s:
                self._now += timeout_s
                return False
            self.advance_to(point.time_s)
            self._reach(point)
            if point.error is not None:
                raise device_error(point.error)
            return True

    def _reach(self, point: SimPoint) -> None:
        self.order.join(HOST_TIMELINE, point.moment)
        perform(point)

    def _link(self, op: CopyOp) -> str:
        memory, settled = self.order.memory, self.order.settled
        if op.source.numel() == 0:
            return "d2d"
        ends = memory.find(op.source, settled).kind, memory.find(op.destination, settled).kind
        if ends in ((DISK, DEVICE), (DEVICE, DISK)):
            raise InvalidInputError("a copy between disk and device must go through host memory")
        return _LINKS.get(ends, "d2d")

    def _allocate(self, name: str, kind: str, rows: int, row_bytes: int) -> Tensor:
        size = rows * row_bytes
        with self.lock:
            self.must_be_open()
            if kind == DEVICE:
                self.faults.allocating(size)
            try:
                memory = torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))
            except MemoryError as error:
                raise CapacityError(
                    f"{name}: {rows} pages of {format_bytes(row_bytes)} ({format_bytes(size)}) "
                    "cannot be allocated; give a smaller budget"
                ) from error
            self._memory.append(memory)
            self.order.memory.add(Memory(name, kind, memory.data_ptr(), size, row_bytes))
            return memory
