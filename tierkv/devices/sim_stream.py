"""Streams and events of the simulated device.

When something happens is known at once, in virtual time; the bytes are copied only when
somebody waits for them, so that a program that forgets to wait sees stale ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.devices.base import CopyOp, DeviceError, Event, Traffic
from tierkv.devices.cpu_stream import copy_exactly, traffic_after
from tierkv.devices.faults import InjectedFaultError, WorkerDeath
from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.devices.sim import SimDevice
    from tierkv.devices.sim_order import Moment


class SimPoint:
    """One place in a stream.

    Attributes:
        stream: whose.
        position: in the stream's queue.
        time_s: when everything before it is done.
        moment: what is done by then.
        performed: whether the copies before it have really been made.
        error: what went wrong since the event before.
    """

    __slots__ = ("error", "moment", "performed", "position", "stream", "time_s")

    def __init__(self, stream: SimStream, position: int, time_s: float, moment: Moment) -> None:
        self.stream = stream
        self.position = position
        self.time_s = time_s
        self.moment = moment
        self.performed = False
        self.error: BaseException | None = None


class SimEvent:
    """A point in a simulated stream; see :class:`tierkv.devices.base.Event`."""

    __slots__ = ("device", "point")

    def __init__(self, device: SimDevice, point: SimPoint) -> None:
        self.device = device
        self.point = point

    def done(self) -> bool:
        """Return whether the point was reached; asking takes a microsecond of virtual time."""
        return self.device.host_asks(self.point)

    def wait(self, timeout_s: float) -> bool:
        """Move the host's clock to the point; False, and by ``timeout_s``, if that is earlier."""
        return self.device.host_waits(self.point, timeout_s)


@dataclass(frozen=True, slots=True)
class _Copies:
    ops: Sequence[CopyOp]
    error: BaseException | None  # a fault that was asked for


@dataclass(frozen=True, slots=True)
class _Skip:
    error: BaseException  # what is ordered after something late or failed is not done


_Item = _Copies | _Skip | SimPoint | tuple[SimPoint]  # the last one: wait for another stream


class SimStream:
    """A stream in virtual time.  Thread-safe by the device's lock.

    Args:
        device: the device.
        name: of the stream.
        timeline: its number in the order checker.
        eager: make copies at once, as the caller's own computation does not wait either.
    """

    def __init__(self, device: SimDevice, name: str, timeline: int, *, eager: bool) -> None:
        self.name = name
        self.timeline = timeline
        self.time_s = 0.0
        self.copies = 0
        self.copied_bytes = 0
        self.failed = 0
        self.died: BaseException | None = None
        self._device = device
        self._eager = eager
        self._queue: deque[_Item] = deque()
        self._performed = 0  # items taken out of the queue so far
        self._late: list[SimPoint] = []
        self._finishing: deque[tuple[float, int, float]] = deque()
        self._traffic = Traffic(0, 0, 0.0)
        # Of the items performed since the last point:
        self._error: BaseException | None = None
        self._skipping = False
        self._dead: BaseException | None = None  # from here on nothing is performed

    def copy(self, ops: Sequence[CopyOp]) -> None:
        """Enqueue a batch of copies."""
        device = self._device
        with device.lock:
            device.must_be_open()
            if not ops or self.died is not None or self._is_held_up():
                return
            hang, error = 0.0, None
            try:
                hang = device.faults.copying(self.name)
            except (InjectedFaultError, WorkerDeath) as fault:
                error = fault
            sizes = device.sizes(ops)
            device.order.copy(self.timeline, ops)
            ready, size = max(self.time_s, device.now()), sum(sizes.values())
            self.time_s = device.carry(sizes, ready, self.name) + hang
            if error is None:
                self._finishing.append((self.time_s, size, self.time_s - ready))
            self._enqueue(_Copies(list(ops), error))
            if isinstance(error, WorkerDeath):
                self.died = error

    def record(self, event: Event | None = None) -> SimEvent:
        """Return an event for the end of everything enqueued so far."""
        device = self._device
        with device.lock:
            if event is not None and not (isinstance(event, SimEvent) and event.device is device):
                raise InvalidInputError(f"an event of another device cannot be recorded: {event}")
            earlier = event.point.moment if event is not None else None
            moment = device.order.moment(self.timeline, earlier)
            self._is_held_up()
            time_s = max(self.time_s, device.now())
            point = SimPoint(self, self._performed + len(self._queue), time_s, moment)
            self._enqueue(point)
            if event is None:
                return SimEvent(device, point)
            event.point = point
            return event

    def wait(self, event: Event, timeout_s: float) -> None:
        """Order everything enqueued from now on after ``event``."""
        if not isinstance(event, SimEvent):
            if not event.wait(timeout_s):
                raise DeviceError(f"a copy did not finish within {timeout_s} s")
            return
        device = self._device
        with device.lock:
            point, begin = event.point, max(self.time_s, device.now())
            if point.time_s > begin + timeout_s:
                self._be_late(point, begin, timeout_s)
                return
            self.time_s = max(begin, point.time_s)
            device.order.join(self.timeline, point.moment)
            if not self._eager:
                self._enqueue((point,))
                return
            perform(point)
            if point.error is not None:
                raise device_error(point.error)

    def use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Say what a kernel of the caller's, enqueued here, reads and writes."""
        with self._device.lock:
            self._device.order.use(self.timeline, what, reads, writes)

    def run(
        self,
        what: str,
        seconds: float,
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Let a kernel run for so many virtual seconds; an extra of this device.

        Args:
            what: names it in reports.
            seconds: how long it takes.
            reads: the memory that it reads.
            writes: the memory that it writes.
        """
        device = self._device
        with device.lock:
            device.order.use(self.timeline, what, reads, writes)
            begin = max(self.time_s, device.now())
            self.time_s = begin + seconds
            device.note(self.name, what, begin, self.time_s, 0)

    def traffic(self) -> Traffic:
        """Return what the copies took that are over by the host's clock."""
        with self._device.lock:
            now = self._device.now()
            while self._finishing and self._finishing[0][0] <= now:
                _, size, seconds = self._finishing.popleft()
                self._traffic = traffic_after(self._traffic, size, seconds)
            return self._traffic

    def perform_next(self, stop: int) -> SimPoint | None:
        """Perform queued items before position ``stop``; return what must be performed first.

        Call with the lock held.
        """
        while self._queue and self._performed < stop:
            item = self._queue[0]
            if isinstance(item, tuple) and not item[0].performed:
                return item[0]
            self._queue.popleft()
            self._performed += 1
            self._perform(item)
        return None

    def perform_all(self) -> None:
        """Perform everything enqueued so far.  Call with the lock held."""
        _perform_until(self, self._performed + len(self._queue))

    def abandon(self, error: BaseException) -> None:
        """Give up what is queued: its points fail.  Call with the lock held."""
        self._error = self._error or error
        for item in self._queue:
            if isinstance(item, SimPoint):
                item.error, item.performed = error, True
        self._performed += len(self._queue)
        self._queue.clear()

    def _enqueue(self, item: _Item) -> None:
        self._queue.append(item)
        if self._eager:
            self.perform_all()
            if isinstance(item, _Copies) and self._error is not None:
                error, self._error = self._error, None
                raise device_error(error)

    def _perform(self, item: _Item) -> None:
        if isinstance(item, SimPoint):
            item.error = self._error or self._dead
            item.performed = True
            self._error, self._skipping = None, False
        elif isinstance(item, _Skip):
            self._error, self._skipping = self._error or item.error, True
        elif isinstance(item, tuple):
            if item[0].error is not None:
                self._error, self._skipping = self._error or item[0].error, True
        elif not self._skipping and self._dead is None:
            try:
                if item.error is not None:
                    raise item.error
                self.copied_bytes += sum(copy_exactly(op) for op in item.ops)
                self.copies += len(item.ops)
            except (Exception, WorkerDeath) as caught:  # numpy's or a fault: the point reports it
                self.failed += 1
                self._error = self._error or caught
                if isinstance(caught, WorkerDeath):
                    self._dead = caught

    def _be_late(self, point: SimPoint, begin: float, timeout_s: float) -> None:
        error = DeviceError(f"work that this is ordered after takes over {timeout_s} s")
        self.time_s = begin + timeout_s
        if self._eager:  # only now does the caller learn of it
            self._device.advance_to(self.time_s)
            raise error
        self._late.append(point)
        self._enqueue(_Skip(error))

    def _is_held_up(self) -> bool:
        """Return whether something this is ordered after is still late; the next event says so."""
        now = max(self.time_s, self._device.now())
        self._late = [point for point in self._late if point.time_s > now]
        if self._late:
            self._enqueue(_Skip(DeviceError("work that this is ordered after is late")))
        return bool(self._late)


def perform(point: SimPoint) -> None:
    """Make the copies before a point, and those that they wait for.  With the lock held."""
    if not point.performed:
        _perform_until(point.stream, point.position + 1)


def _perform_until(stream: SimStream, stop: int) -> None:
    stack = [(stream, stop)]
    while stack:
        first = stack[-1][0].perform_next(stack[-1][1])
        if first is None:
            stack.pop()
        else:
            stack.append((first.stream, first.position + 1))


def device_error(error: BaseException) -> DeviceError:
    """Return a new error that reports a failed copy."""
    if isinstance(error, DeviceError):
        return DeviceError(*error.args)
    failed = DeviceError(f"a copy on the simulated device failed: {error!r}")
    failed.__cause__ = error
    return failed
