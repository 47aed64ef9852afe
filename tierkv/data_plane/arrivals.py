"""Pages on their way into the device pool, and what the wait for them cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierkv.devices.base import CopyOp, DeviceError
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.claims import Claims
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Event, Stream, Traffic


class Arrival(Protocol):
    """Pages on their way into the pool, layer by layer.

    Attributes:
        events: by model layer, done when the layer has arrived, or when it is sure that it
            will not and nothing is copied any more.
    """

    @property
    def events(self) -> Mapping[int, Event]:
        """See the class."""
        ...

    def done(self) -> bool:
        """Return whether all layers have arrived or failed."""
        ...

    def cancel(self) -> None:
        """Begin nothing more; what has begun still comes to its end."""
        ...

    def settle(self) -> None:
        """Take it off the books.  Call with the lock held, when ``done``; idempotent."""
        ...


class HostArrival:
    """Pages that are copied from memory: all copies are enqueued when it is made.

    Args:
        core: the store's parts.
        rows: committed pages that became device-resident with this arrival.
        sources: the pinned copies read from, released when all is over.
        events: by model layer, done when the layer has arrived.
        arriving: where ``rows`` are entered until it is settled.

    Attributes:
        rows: as given.
    """

    def __init__(
        self,
        core: Core,
        rows: Sequence[int],
        sources: Claims,
        events: Mapping[int, Event],
        arriving: dict[int, HostArrival],
    ) -> None:
        self.events = events
        self._core = core
        self.rows = rows
        self._sources = sources
        self._arriving = arriving
        arriving.update(dict.fromkeys(rows, self))

    def done(self) -> bool:
        """Return whether all layers have arrived or failed."""
        return all(event.done() for event in self.events.values())

    def cancel(self) -> None:
        """Do nothing: what is enqueued runs to its end."""

    def settle(self) -> None:
        """Drop the pages whose copy failed or is late; release the sources."""
        failed = not arrived(self.events.values())
        for row in self.rows:
            if self._arriving.get(row) is self:
                del self._arriving[row]
                if failed:
                    self._core.planner.evict(Tier.DEVICE, [row])
        self._sources.release()

    def release_sources(self) -> None:
        """Let the copies read from make room, once all is over."""
        if self.done():
            self._sources.release()


def arrived(events: Iterable[Event]) -> bool:
    """Return whether all that these events stand for is over and none of it failed."""
    try:
        return all(event.wait(0.0) for event in events)
    except DeviceError:
        return False


def await_events(events: Iterable[Event], deadline: float, clock: Callable[[], float]) -> None:
    """Wait on the host until events are done, at most until ``deadline``, failed or not."""
    for event in events:
        with suppress(DeviceError):
            event.wait(max(0.0, deadline - clock()))


class Enqueues(Protocol):
    """An event whose copies are not all enqueued: waiting for it enqueues them."""

    def enqueued(self, timeout_s: float) -> Sequence[Event]:
        """Return events after all its copies, once they are enqueued.

        Raises:
            DeviceError: they will not be, or not within the time.
        """
        ...


def order_after(stream: Stream, event: Event, timeout_s: float) -> None:
    """Order a stream after an event, without waiting for more than it must be waited for.

    Raises:
        DeviceError: the work before the event failed or, where that is noticed, is late.
    """
    enqueued = getattr(event, "enqueued", None)
    for each in [event] if enqueued is None else enqueued(timeout_s):
        stream.wait(each, timeout_s)


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages of one group whose slots are adjacent on both sides: one strided copy a layer."""

    group: int
    tier: Tier
    source: int
    target: int
    pages: int

    @classmethod
    def join(cls, pages: Iterable[tuple[int, Tier, int, int]]) -> list[Moves]:
        """Return the moves of pages, joined where slots are adjacent.

        Args:
            pages: group, tier, slot there and device slot of each page.
        """
        moves: list[Moves] = []
        for group, tier, source, target in pages:
            last = moves[-1] if moves else None
            if (
                last is not None
                and (last.group, last.tier) == (group, tier)
                and last.source + last.pages == source
                and last.target + last.pages == target
            ):
                moves[-1] = cls(group, tier, last.source, last.target, last.pages + 1)
            else:
                moves.append(cls(group, tier, source, target, 1))
        return moves


def copy_layers(
    core: Core, stream: Stream, moves: Sequence[Moves], layers: Iterable[int]
) -> dict[int, Event]:
    """Enqueue copies layer by layer, one event a layer.  Call with the lock held.

    Copies and their event belong together: an event tells of failures since the one before.
    """
    events: dict[int, Event] = {}
    for layer in sorted(layers):
        group, offset, size = core.layer_place(layer)
        ops = [
            CopyOp(
                core.pool.memory[m.target : m.target + m.pages, offset : offset + size],
                core.memory(m.tier)[m.source : m.source + m.pages, offset : offset + size],
            )
            for m in moves
            if m.group == group
        ]
        if ops:
            stream.copy(ops)
            events[layer] = stream.record()
    return events


@dataclass(frozen=True, slots=True)
class LoadTime:
    """What loading a prefix took.

    Attributes:
        exposed_s: seconds that somebody waited for pages.
        hidden_s: seconds of reads and copies that nobody waited for.
    """

    exposed_s: float = 0.0
    hidden_s: float = 0.0


class LoadMeter:
    """Measures the load of one sequence: reads and copies while it lasts, and waits for them.

    What other sequences load meanwhile counts as well.
    """

    def __init__(self, core: Core, *traffic: Callable[[], Traffic]) -> None:
        self._clock = core.clock
        self._traffic = traffic
        self._before = self._seconds()
        self._busy_s: float | None = None
        self._waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a ``with`` block as waited for."""
        started = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - started

    def stop(self) -> None:
        """Everything has arrived."""
        if self._busy_s is None:
            self._busy_s = self._seconds() - self._before

    def result(self, waited_s: float = 0.0) -> LoadTime:
        """Return the times so far, with what was waited elsewhere added."""
        busy = self._seconds() - self._before if self._busy_s is None else self._busy_s
        exposed = self._waited_s + waited_s
        return LoadTime(exposed, max(0.0, busy - exposed))

    def _seconds(self) -> float:
        return sum(traffic().seconds for traffic in self._traffic)
