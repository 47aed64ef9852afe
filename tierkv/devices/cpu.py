"""The CPU as a device: plain memory, one worker thread a copy stream.

The caller's model computes on the calling thread, so the compute stream is that thread:
what it enqueued is done, and waiting blocks it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tierkv.devices.base import CopyOp, DeviceError, DeviceStats, Event, Stream, Traffic
from tierkv.devices.cpu_stream import CpuEvent, CpuStream, copy_exactly, traffic_after
from tierkv.devices.faults import Faults
from tierkv.errors import CapacityError, StoreClosedError
from tierkv.units import format_bytes

__all__ = ["CpuDevice", "CpuEvent", "CpuStream"]


class _CallerStream:
    """The thread that calls: whatever it ran is done."""

    name = "compute"

    def __init__(self, faults: Faults) -> None:
        self.copies = 0
        self.failed = 0
        self._traffic = Traffic(0, 0, 0.0)
        self._closed = False
        self._faults = faults
        self._lock = threading.Lock()  # of the counters

    def copy(self, ops: Sequence[CopyOp]) -> None:
        if self._closed:
            raise StoreClosedError("the device is closed")
        started = time.perf_counter()
        try:
            self._faults.hold(self._faults.copying(self.name))
            size = sum(copy_exactly(op) for op in ops)
        except Exception as error:  # whatever numpy says of the tensors: the caller gets it
            with self._lock:
                self.failed += 1
            raise DeviceError(f"a copy on the CPU device failed: {error!r}") from error
        with self._lock:
            self.copies += len(ops)
            self._traffic = traffic_after(self._traffic, size, time.perf_counter() - started)

    def record(self, event: Event | None = None) -> CpuEvent:
        event = CpuEvent.again(event)
        event.finish(None)
        return event

    def wait(self, event: Event, timeout_s: float) -> None:
        if not event.wait(timeout_s):
            raise DeviceError(f"a copy did not finish within {timeout_s} s")

    def use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        pass

    def traffic(self) -> Traffic:
        return self._traffic

    def close(self) -> None:
        self._closed = True


class CpuDevice:
    """Implements :class:`tierkv.devices.base.Device` in ordinary memory.  Thread-safe.

    Args:
        bandwidth: bytes a second that a copy stream carries at most, None for what the
            memory gives.  The rest of the time the stream sleeps, so that the core is free.
        latency_s: seconds that each batch of a copy stream takes besides.
        faults: what shall go wrong, for tests.
    """

    name = "cpu"
    torch_device = "cpu"
    checks_order = False

    def __init__(
        self,
        *,
        bandwidth: float | None = None,
        latency_s: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults or Faults()
        self._caller = _CallerStream(self._faults)
        self.compute: Stream = self._caller
        self._seconds_per_byte = 0.0 if bandwidth is None else 1.0 / bandwidth
        self._latency_s = latency_s
        self._streams: dict[str, CpuStream] = {}
        self._memory: list[Tensor] = []
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, rows: int, row_bytes: int) -> Tensor:
        """Return zeroed uint8 memory of shape ``[rows, row_bytes]``."""
        self._must_be_open()
        self._faults.allocating(rows * row_bytes)
        try:
            memory = torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))
        except MemoryError as error:
            raise CapacityError(
                f"device pool: {rows} pages of {format_bytes(row_bytes)} "
                f"({format_bytes(rows * row_bytes)}) cannot be allocated; give a smaller budget"
            ) from error
        with self._lock:
            self._memory.append(memory)
        return memory

    def pin(self, memory: memoryview) -> None:
        """Do nothing: the CPU reaches all of its memory."""

    def stream(self, name: str) -> CpuStream:
        """Return the copy stream of that name."""
        with self._lock:
            self._must_be_open()
            if name not in self._streams:
                self._streams[name] = CpuStream(
                    name,
                    seconds_per_byte=self._seconds_per_byte,
                    latency_s=self._latency_s,
                    faults=self._faults,
                )
            return self._streams[name]

    def host_use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: the order is not checked here."""

    def stats(self) -> DeviceStats:
        """Return counters."""
        with self._lock:
            streams = [*self._streams.values()]
            allocated = sum(m.numel() for m in self._memory)
        return DeviceStats(
            name=self.name,
            allocated_bytes=allocated,
            copies=self._caller.copies + sum(s.copies for s in streams),
            copied_bytes=self._caller.traffic().bytes + sum(s.copied_bytes for s in streams),
            failed_copies=self._caller.failed + sum(s.failed for s in streams),
            streams=len(streams),
        )

    def check(self) -> None:
        """Raise AssertionError when a stream's worker has died."""
        with self._lock:
            dead = {s.name: s.died for s in self._streams.values() if s.died is not None}
        assert not dead, f"streams whose worker died: {dead}"

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the streams and release the memory."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            streams = [*self._streams.values()]
        self._caller.close()
        for stream in streams:
            stream.end()
        late = [s.name for s in streams if not s.join(max(0.0, deadline - time.monotonic()))]
        with self._lock:
            self._memory.clear()
        if late:
            raise DeviceError(f"streams {late} did not finish within {timeout_s} s")

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the device is closed")
