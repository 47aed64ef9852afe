"""The CPU as a device: plain memory, one worker thread a copy stream.

The caller's model computes on the calling thread, so the compute stream is that thread:
what it enqueued is done, and waiting blocks it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tierkv.devices.base import CopyOp, DeviceError, DeviceStats, Event, Stream
from tierkv.errors import CapacityError, StoreClosedError
from tierkv.units import format_bytes


class CpuEvent:
    """Completion of everything a worker was given before it."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Mark the point as reached, with the first failure before it."""
        self.error = error
        self._done.set()

    def done(self) -> bool:
        """Return whether the point was reached."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the point is reached; see :class:`tierkv.devices.base.Event`."""
        if not self._done.wait(timeout_s):
            return False
        if self.error is not None:
            raise DeviceError(f"a copy on the CPU device failed: {self.error!r}") from self.error
        return True


class CpuStream:
    """A worker thread that copies in order.

    Daemonic, so that a program that ends without closing its store does not hang; the
    device joins it in ``close``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.copies = 0
        self.copied_bytes = 0
        self.failed = 0
        self._queue: queue.SimpleQueue[Sequence[CopyOp] | CpuEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{name}", daemon=True)
        self._thread.start()

    def copy(self, ops: Sequence[CopyOp]) -> None:
        """Enqueue a batch of copies."""
        self._queue.put(ops)

    def record(self) -> CpuEvent:
        """Return an event for the end of everything enqueued so far."""
        event = CpuEvent()
        self._queue.put(event)
        return event

    def wait(self, event: Event, timeout_s: float) -> None:
        """Order later copies after ``event`` by waiting for it here and now."""
        _wait(event, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False when the time is up."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        while (item := self._queue.get()) is not None:
            if isinstance(item, CpuEvent):
                item.finish(error)
                error = None
                continue
            try:
                self._copy_now(item)
            except BaseException as caught:  # the thread's top frame: the event reports it
                self.failed += 1
                error = error or caught

    def _copy_now(self, ops: Sequence[CopyOp]) -> None:
        for op in ops:
            # numpy copies on this thread alone; torch would wake its thread pool.
            np.copyto(op.destination.numpy(), op.source.numpy())
            self.copied_bytes += op.destination.numel()
        self.copies += len(ops)


class _CallerStream:
    """The thread that calls: whatever it ran is done."""

    def copy(self, ops: Sequence[CopyOp]) -> None:
        for op in ops:
            np.copyto(op.destination.numpy(), op.source.numpy())

    def record(self) -> CpuEvent:
        event = CpuEvent()
        event.finish(None)
        return event

    def wait(self, event: Event, timeout_s: float) -> None:
        _wait(event, timeout_s)


class CpuDevice:
    """Implements :class:`tierkv.devices.base.Device` in ordinary memory."""

    name = "cpu"
    torch_device = "cpu"

    def __init__(self) -> None:
        self.compute: Stream = _CallerStream()
        self._streams: dict[str, CpuStream] = {}
        self._memory: list[Tensor] = []
        self._closed = False

    def allocate(self, rows: int, row_bytes: int) -> Tensor:
        """Return zeroed uint8 memory of shape ``[rows, row_bytes]``."""
        try:
            memory = torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))
        except MemoryError as error:
            raise CapacityError(
                f"device pool: {rows} pages of {format_bytes(row_bytes)} "
                f"({format_bytes(rows * row_bytes)}) cannot be allocated; give a smaller budget"
            ) from error
        self._memory.append(memory)
        return memory

    def stream(self, name: str) -> CpuStream:
        """Return the copy stream of that name."""
        if self._closed:
            raise StoreClosedError("the device is closed")
        if name not in self._streams:
            self._streams[name] = CpuStream(name)
        return self._streams[name]

    def stats(self) -> DeviceStats:
        """Return counters."""
        streams = self._streams.values()
        return DeviceStats(
            name=self.name,
            allocated_bytes=sum(m.numel() for m in self._memory),
            copies=sum(s.copies for s in streams),
            copied_bytes=sum(s.copied_bytes for s in streams),
            failed_copies=sum(s.failed for s in streams),
            streams=len(self._streams),
        )

    def check(self) -> None:
        """Raise AssertionError when a stream's thread has died."""
        if not self._closed:
            dead = [s.name for s in self._streams.values() if not s._thread.is_alive()]
            assert not dead, f"streams without a thread: {dead}"

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the streams and release the memory."""
        self._closed = True
        late = [s.name for s in self._streams.values() if not s.close(timeout_s)]
        self._memory.clear()
        if late:
            raise DeviceError(f"streams {late} did not finish within {timeout_s} s")


def _wait(event: Event, timeout_s: float) -> None:
    if not event.wait(timeout_s):
        raise DeviceError(f"a copy did not finish within {timeout_s} s")
