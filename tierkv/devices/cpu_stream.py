"""A worker thread that stands for a copy stream, and the events that it reaches."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tierkv.devices.base import CopyOp, DeviceError, Event, Traffic
from tierkv.devices.faults import Faults
from tierkv.errors import InvalidInputError, StoreClosedError


class _Point:
    """One place in a stream's queue; an event recorded anew stands for another one."""

    __slots__ = ("_reached", "error")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self._reached.set()

    def done(self) -> bool:
        return self._reached.is_set()

    def wait(self, timeout_s: float) -> bool:
        if not self._reached.wait(timeout_s):
            return False
        if self.error is not None:
            raise DeviceError(f"a copy on the CPU device failed: {self.error!r}") from self.error
        return True


class CpuEvent:
    """Completion of everything a worker was given before it."""

    __slots__ = ("point",)

    def __init__(self) -> None:
        self.point = _Point()

    @classmethod
    def again(cls, event: Event | None) -> CpuEvent:
        """Return a new event, or the given one standing for a new point."""
        if event is None:
            return cls()
        if not isinstance(event, cls):
            raise InvalidInputError(f"an event of another device cannot be recorded here: {event}")
        event.point = _Point()
        return event

    def finish(self, error: BaseException | None) -> None:
        """Mark the point as reached, with the first failure before it."""
        self.point.finish(error)

    def done(self) -> bool:
        """Return whether the point was reached."""
        return self.point.done()

    def wait(self, timeout_s: float) -> bool:
        """Block until the point is reached; see :class:`tierkv.devices.base.Event`."""
        return self.point.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class _Batch:
    ops: Sequence[CopyOp]
    enqueued_s: float


@dataclass(frozen=True, slots=True)
class _Wait:
    point: _Point | Event
    timeout_s: float


class CpuStream:
    """A worker thread that copies in order.

    Daemonic, so that a program that ends without closing its store does not hang; the
    device joins it in ``close``.

    Args:
        name: of the stream.
        seconds_per_byte: what a byte takes at least.
        latency_s: what a batch takes besides.
        faults: what shall go wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        seconds_per_byte: float = 0.0,
        latency_s: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        self.name = name
        self.copies = 0
        self.copied_bytes = 0
        self.failed = 0
        self.died: BaseException | None = None
        self._seconds_per_byte = seconds_per_byte
        self._latency_s = latency_s
        self._faults = faults or Faults()
        self._traffic = Traffic(0, 0, 0.0)
        self._free_at = 0.0
        self._ending = threading.Event()
        self._lock = threading.Lock()  # nothing is queued behind the end of the worker
        self._queue: queue.SimpleQueue[_Batch | _Point | _Wait | None] = queue.SimpleQueue()
        # Of the part of the queue since the last event:
        self._error: BaseException | None = None
        self._skipping = False
        self._late: list[_Point | Event] = []  # what should have been over before
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{name}", daemon=True)
        self._thread.start()

    def copy(self, ops: Sequence[CopyOp]) -> None:
        """Enqueue a batch of copies."""
        self._put(_Batch(ops, time.perf_counter()))

    def record(self, event: Event | None = None) -> CpuEvent:
        """Return an event for the end of everything enqueued so far."""
        event = CpuEvent.again(event)
        self._put(event.point)
        return event

    def wait(self, event: Event, timeout_s: float) -> None:
        """Let the worker wait for ``event`` before it goes on."""
        point = event.point if isinstance(event, CpuEvent) else event
        if not (isinstance(point, _Point) and point.done() and point.error is None):
            self._put(_Wait(point, timeout_s))

    def use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: the order is not checked here."""

    def traffic(self) -> Traffic:
        """Return what the finished copies took."""
        return self._traffic

    def end(self) -> None:
        """Let the thread finish what is queued, at full speed, and end."""
        with self._lock:
            if not self._ending.is_set():
                self._ending.set()
                self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False when the time is up."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: _Batch | _Point | _Wait) -> None:
        with self._lock:
            if self.died is not None:
                if isinstance(item, _Point):
                    item.finish(self.died)
                return
            if self._ending.is_set():
                raise StoreClosedError("the device is closed")
            self._queue.put(item)

    def _run(self) -> None:
        item: _Batch | _Point | _Wait | None = None
        try:
            while (item := self._queue.get()) is not None:
                self._do(item)
        except BaseException as caught:  # the thread's top frame: check() and the events tell
            self.failed += 1
            self._die(caught)
            if isinstance(item, _Point):
                item.finish(caught)

    def _do(self, item: _Batch | _Point | _Wait) -> None:
        if isinstance(item, _Batch):
            if not self._skips():
                self._copy_batch(item)
        elif isinstance(item, _Wait):
            self._await(item)
        else:
            self._skips()
            item.finish(self._error)
            self._error, self._skipping = None, False

    def _skips(self) -> bool:
        """Return whether something that copies are ordered after failed, or is not over yet."""
        self._late = [point for point in self._late if not point.done()]
        if self._late and not self._skipping:
            self._fail_wait(DeviceError("work that this is ordered after is late"))
        return self._skipping

    def _copy_batch(self, batch: _Batch) -> None:
        start, before = max(batch.enqueued_s, self._free_at), self.copied_bytes
        began = time.perf_counter()
        try:
            self._faults.hold(self._faults.copying(self.name))
            self._copy_now(batch.ops)
        except Exception as caught:  # whatever a copy raises is for the next event to report
            self.failed += 1
            self._error = self._error or caught
            return
        size = self.copied_bytes - before
        if self._seconds_per_byte or self._latency_s:
            # Counted from when the batch could begin, so that oversleeping does not add up.
            self._free_at = start + self._latency_s + size * self._seconds_per_byte
            self._ending.wait(max(0.0, self._free_at - time.perf_counter()))
        self._traffic = traffic_after(self._traffic, size, time.perf_counter() - began)

    def _copy_now(self, ops: Sequence[CopyOp]) -> None:
        for op in ops:
            self.copied_bytes += copy_exactly(op)
        self.copies += len(ops)

    def _await(self, wait: _Wait) -> None:
        try:
            if not wait.point.wait(0.0):
                if not wait.point.wait(wait.timeout_s):
                    self._late.append(wait.point)
                    self._fail_wait(
                        DeviceError(f"work that copies wait for took over {wait.timeout_s} s")
                    )
                self._free_at = max(self._free_at, time.perf_counter())
        except DeviceError as error:
            self._fail_wait(error)

    def _fail_wait(self, error: BaseException) -> None:
        self._error, self._skipping = self._error or error, True

    def _die(self, error: BaseException) -> None:
        """Let every event that is queued, or will be, tell why the worker is gone."""
        with self._lock:
            self.died = error
            while True:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    return
                if isinstance(item, _Point):
                    item.finish(error)


def copy_exactly(op: CopyOp) -> int:
    """Carry out a copy on this thread; return its bytes.

    By numpy: torch would wake its thread pool.

    Raises:
        ValueError: the shapes differ (numpy would repeat the source).
    """
    destination, source = op.destination.numpy(), op.source.numpy()
    if destination.shape != source.shape:
        raise ValueError(f"a copy from shape {source.shape} to shape {destination.shape}")
    np.copyto(destination, source)
    return int(destination.nbytes)


def traffic_after(traffic: Traffic, size: int, seconds: float) -> Traffic:
    """Return traffic with one more batch."""
    return Traffic(traffic.batches + 1, traffic.bytes + size, traffic.seconds + seconds)
