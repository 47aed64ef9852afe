"""Checks that every access is ordered after the accesses that it depends on.

Vector clocks as in Lamport's happens-before and the race detectors built on it (FastTrack,
Flanagan and Freund, PLDI 2009): each stream, and the host as a whole, is a timeline that
counts its steps; a clock says up to which step of every other timeline it is ordered.  An
access conflicts with an earlier one to the same bytes, one of the two a write, unless the
clock covers it.  Never a false alarm: ranges are exact, and all host threads count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tierkv.devices.sim_memory import Cell, Memory, MemoryMap, Operation
from tierkv.devices.splitting import byte_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.devices.base import CopyOp

HOST = 0  # the timeline of the host
Clock = dict[int, int]


class OrderError(AssertionError):
    """Two operations touch the same bytes in no order, or an event is misused.

    No DeviceError: it is a fault of the program, and must not be taken for a failed copy.
    """


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a tensor lie; holds addresses only, not the tensor."""

    memory: Memory | None
    ranges: list[tuple[int, int]]

    def name(self) -> str:
        if self.memory is None:
            return "nothing"
        text = self.memory.describe(self.ranges[0][0], self.ranges[-1][1])
        return text if len(self.ranges) == 1 else f"{len(self.ranges)} runs in {text}"


@dataclass(frozen=True, slots=True)
class Moment:
    """What a recorded event stands for.

    Attributes:
        timeline: of the stream.
        number: the stream's steps up to here.
        clock: what is done when the moment has come.
        last: the stream's last operation before it.
    """

    timeline: int
    number: int
    clock: Clock
    last: Operation | None


class OrderChecker:
    """Timelines, their clocks, and the history of every byte.  Not thread-safe.

    Attributes:
        memory: what lies at which address.
        violation: the first one found, so that none is lost in a thread.
    """

    def __init__(self, memory: MemoryMap) -> None:
        self.memory = memory
        self.violation: OrderError | None = None
        self._names: list[str] = []
        self._clocks: list[Clock] = []
        self._last: list[Operation | None] = []
        self._copying: list[bool] = []
        self.add_timeline("host", copying=False)

    def add_timeline(self, name: str, *, copying: bool) -> int:
        """Return the number of a new timeline.

        Args:
            name: of the stream.
            copying: somebody must wait for its work in the end.
        """
        self._names.append(name)
        self._clocks.append({})
        self._last.append(None)
        self._copying.append(copying)
        return len(self._names) - 1

    def copy(self, timeline: int, ops: Sequence[CopyOp]) -> None:
        """Enter a batch of copies, which have no order among themselves.

        Raises:
            OrderError: an access is not ordered after one that it conflicts with.
        """
        number = self._step(timeline)
        clock = {**self._clocks[timeline], timeline: number - 1}
        for op in ops:
            source, target = self._place(op.source), self._place(op.destination)
            name = partial(self._name_copy, timeline, number, source, target)
            made = self._last[timeline] = Operation(timeline, number, name)
            self._read(made, source, clock)
            self._write(made, target, clock)

    def use(
        self, timeline: int, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Enter a kernel, or something that the host does.

        Raises:
            OrderError: as for ``copy``.
        """
        number = self._step(timeline)
        where = "by the host" if timeline == HOST else f"on stream {self._names[timeline]!r}"
        made = Operation(timeline, number, lambda: f"{what!r} {where} (step {number})")
        self._last[timeline] = made
        clock = self._clocks[timeline]
        for tensor in reads:
            self._read(made, self._place(tensor), clock)
        for tensor in writes:
            self._write(made, self._place(tensor), clock)

    def moment(self, timeline: int, again: Moment | None = None) -> Moment:
        """Return the moment at which everything entered so far is done.

        Args:
            timeline: of the stream.
            again: what the event stood for before.

        Raises:
            OrderError: nobody has waited for that.
        """
        self._join_host(timeline)
        if again is not None and not self._is_awaited(again.timeline, again.number):
            self._fail(
                f"an event is recorded anew {self._after(timeline, self._last[timeline])}, but "
                f"nobody has waited for its earlier point {self._after(again.timeline, again.last)}"
            )
        clock = self._clocks[timeline]
        return Moment(timeline, clock.get(timeline, 0), clock.copy(), self._last[timeline])

    def join(self, timeline: int, moment: Moment) -> None:
        """Order everything that a timeline does from now on after a moment."""
        clock = self._clocks[timeline]
        for other, number in moment.clock.items():
            if clock.get(other, 0) < number:
                clock[other] = number
        self._join_host(timeline)

    def check_waited(self, besides: Collection[int] = ()) -> None:
        """Raise OrderError when nobody waited for the last work of a copy stream.

        Args:
            besides: timelines whose work is not over, so that waiting for it was in vain.
        """
        for timeline, last in enumerate(self._last):
            if last is None or not self._copying[timeline] or timeline in besides:
                continue
            if not self._is_awaited(timeline, last.number):
                self._fail(
                    f"never waited for: {last.what()}; nobody is ordered after it, so its "
                    "outcome is unknown and its bytes cannot be used or replaced"
                )

    def raise_violation(self) -> None:
        """Raise the first violation again."""
        if self.violation is not None:
            raise OrderError(*self.violation.args)

    def settled(self, operation: Operation) -> bool:
        """Return whether everything that may still come is ordered after an operation.

        What the host knows is known to all: whatever is enqueued, the host enqueues.
        """
        return operation.number <= self._clocks[HOST].get(operation.timeline, 0)

    def _step(self, timeline: int) -> int:
        self._join_host(timeline)
        clock = self._clocks[timeline]
        number = clock[timeline] = clock.get(timeline, 0) + 1
        return number

    def _join_host(self, timeline: int) -> None:
        if timeline != HOST:
            clock = self._clocks[timeline]
            for other, number in self._clocks[HOST].items():
                if clock.get(other, 0) < number:
                    clock[other] = number

    def _is_awaited(self, timeline: int, number: int) -> bool:
        return any(
            clock.get(timeline, 0) >= number
            for other, clock in enumerate(self._clocks)
            if other != timeline
        )

    def _place(self, tensor: Tensor) -> _Place:
        ranges = byte_ranges(tensor)
        memory = self.memory.find(tensor, self.settled) if ranges else None
        return _Place(memory, ranges)

    def _read(self, made: Operation, place: _Place, clock: Clock) -> None:
        def change(cell: Cell) -> Cell:
            # A later write that is ordered after this read is so after those before it.
            reads = [r for r in cell.reads if clock.get(r.timeline, 0) < r.number and r is not made]
            return Cell(cell.write, (*reads, made))

        self._access(made, place, clock, writes=False, change=change)

    def _write(self, made: Operation, place: _Place, clock: Clock) -> None:
        written = Cell(made, ())
        self._access(made, place, clock, writes=True, change=lambda _: written)

    def _access(
        self,
        made: Operation,
        place: _Place,
        clock: Clock,
        *,
        writes: bool,
        change: Callable[[Cell], Cell],
    ) -> None:
        memory = place.memory
        if memory is None:
            return
        for start, stop in place.ranges:
            first, last = memory.span(start, stop)
            for low, high, cell in memory.cells(first, last):
                earlier = cell.write
                if earlier is not None and clock.get(earlier.timeline, 0) < earlier.number:
                    self._conflict(made, writes, earlier, True, memory.describe(low, high))
                if writes:
                    for read in cell.reads:
                        if clock.get(read.timeline, 0) < read.number:
                            self._conflict(made, True, read, False, memory.describe(low, high))
            memory.replace(first, last, change)
        memory.tidy(self.settled)

    def _conflict(
        self, made: Operation, writes: bool, earlier: Operation, wrote: bool, where: str
    ) -> None:
        order = "nothing orders the one after the other"
        if (made.timeline, made.number) == (earlier.timeline, earlier.number):
            order = "both belong to one batch, whose copies have no order"
        self._fail(
            f"{made.what()} {'writes' if writes else 'reads'} {where}, which {earlier.what()} "
            f"{'writes' if wrote else 'reads'}, and {order}"
        )

    def _fail(self, message: str) -> None:
        error = OrderError(message)
        self.violation = self.violation or error
        raise error

    def _after(self, timeline: int, last: Operation | None) -> str:
        if last is None:
            return f"at the beginning of stream {self._names[timeline]!r}"
        return f"after {last.what()}"

    def _name_copy(self, timeline: int, number: int, source: _Place, target: _Place) -> str:
        return (
            f"copy on stream {self._names[timeline]!r} (step {number}: {source.name()} -> "
            f"{target.name()})"
        )
