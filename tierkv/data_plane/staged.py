"""Disk pages that are read behind the layer gate, part by part, while the model computes.

They count as found before they are verified, so only callers that can start over ask for
them.  Every part is checked before it is copied to the device; the pages stay private to
the sequence until all of them have proved good.  No thread watches the reads: whoever asks
for a layer takes in what has arrived and enqueues its copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.table import PRIVATE
from tierkv.data_plane.arrivals import Moves, arrived, copy_layers
from tierkv.data_plane.claims import Claims
from tierkv.devices.base import DeviceError
from tierkv.storage.types import ReadStatus
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.reads import Read, ReadPart, Reads
    from tierkv.devices.base import Event, Stream


@dataclass(frozen=True, slots=True)
class _Step:
    """One part of one read, to be copied when it has arrived."""

    read: Read
    part: ReadPart
    group: int

    @property
    def lane(self) -> tuple[int, int]:
        """Steps of one lane are taken in order."""
        return id(self.read), self.group


class StagedEvent:
    """The arrival of one layer; waiting for it does what is left to be done.

    Implements :class:`tierkv.devices.base.Event`.
    """

    __slots__ = ("_arrival", "_layer")

    def __init__(self, arrival: StagedArrival, layer: int) -> None:
        self._arrival = arrival
        self._layer = layer

    def done(self) -> bool:
        """Return whether the layer has arrived, or will not; never blocks."""
        return self._arrival.layer_done(self._layer)

    def wait(self, timeout_s: float) -> bool:
        """Take in the layer's reads, enqueue its copies, and wait for them.

        Of a load that was cancelled, wait for what is being copied.

        Raises:
            DeviceError: a page proved bad or came too late, or a copy failed.
        """
        clock = self._arrival.clock
        deadline = clock() + timeout_s
        events = self._arrival.left_over()
        if events is None:
            events = self._arrival.enqueue(self._layer, deadline)
        if events is None:
            return False
        return all(event.wait(max(0.0, deadline - clock())) for event in events)

    def enqueued(self, timeout_s: float) -> Sequence[Event]:
        """Return events after the layer's copies, once its parts have been read."""
        arrival = self._arrival
        events = arrival.enqueue(self._layer, arrival.clock() + timeout_s)
        if events is None:
            raise DeviceError(f"layer {self._layer} was not read from disk within {timeout_s} s")
        return events


class StagedArrival:
    """Pages on their way from disk through host slots into the pool.

    Thread-safe; one sequence owns it.

    Attributes:
        events: by model layer, as of every arrival.
    """

    def __init__(
        self, core: Core, reads: Reads, stream: Stream, users_of: Sequence[Read], rows: list[int]
    ) -> None:
        """Guard the slots of reads that this is a user of.  Call with the lock held."""
        self.clock = core.clock
        self.events: Mapping[int, StagedEvent] = {}
        self._core = core
        self._reads = reads
        self._stream = stream
        self._using = list(users_of)
        self._sources = Claims(core)
        self._sources.add(dict.fromkeys(rows, Tier.HOST))  # before they are there
        self._rows = rows
        self._targets: dict[int, int] = {}
        self._homes: dict[int, tuple[GroupTable, int]] = {}
        self._pending: list[_Step] = []
        self._copies: dict[int, list[Event]] = {}
        self._error: DeviceError | None = None
        self._cancelled = self._abandoned = False
        for read in self._using:
            read.guard(self.quiet)

    def begin(self, targets: Mapping[int, int]) -> None:
        """Say into which device slots the pages go.  Call with the lock held."""
        core = self._core
        self._targets = {row: targets[row] for row in self._rows}
        groups = set(core.index.group(self._rows).tolist())
        layers = [layer for layer, g in core.spec.layer_to_group.items() if g in groups]
        self.events = {layer: StagedEvent(self, layer) for layer in sorted(layers)}
        group_of = core.spec.layer_to_group
        steps = [
            _Step(read, part, group_of[part.layers[0]])
            for read in self._using
            for part in read.parts
        ]
        self._pending = sorted(steps, key=lambda step: step.part.layers[0])
        core.fences.order(self._stream, self._targets.values(), core.timeout_s)
        self._advance()

    def place(self, row: int, table: GroupTable, page: int) -> None:
        """Say which page of a sequence a row is, so that it is shared once it is verified."""
        self._homes[row] = (table, page)

    def done(self) -> bool:
        """Return whether all layers have arrived or failed."""
        return all(event.done() for event in self.events.values())

    def layer_done(self, layer: int) -> bool:
        """Return whether a layer has arrived, or will not and nothing is being copied."""
        with self._core.lock:
            self._advance()
            if self._is_over():
                return self.quiet()
            return self._step_of(layer) is None and self._copied(layer)

    def enqueue(self, layer: int, deadline: float) -> Sequence[Event] | None:
        """Enqueue the copies of a layer, waiting for its reads; None when time is up.

        Raises:
            DeviceError: a page of the prefix proved bad or late.
        """
        while True:
            with self._core.lock:
                self._advance()
                if self._error is not None:
                    raise DeviceError(*self._error.args)
                if self._cancelled:
                    raise DeviceError("the load was cancelled")
                step = self._step_of(layer)
                if step is None:
                    return list(self._copies.get(layer, ()))
            if not self._reads.wait_part(step.read, step.part, deadline):
                return None

    def left_over(self) -> Sequence[Event] | None:
        """Return events after what is still copied of a load that ``cancel`` ended, else None."""
        with self._core.lock:
            copies = [event for events in self._copies.values() for event in events]
            return copies if self._abandoned else None

    def cancel(self) -> None:
        """Copy nothing more, and give up reads that nobody else waits for.

        Nobody will ask for a layer any more: events now stand for what is being copied.
        """
        with self._core.lock:
            self._abandoned = True
            self._leave()

    def settle(self) -> None:
        """Share the pages if all is well, and let go of everything else."""
        with self._core.lock:
            self._advance()
            if not self._is_over() and not self._pending:
                events = [event for copies in self._copies.values() for event in copies]
                if arrived(events):
                    self._share()
            self._leave()
            self._sources.release()

    def quiet(self) -> bool:
        """Return whether nothing of this copies from host slots, now or later."""
        return (self._is_over() or not self._pending) and all(map(self._copied, self._copies))

    def _leave(self) -> None:
        """Stop using the reads; what was not copied yet will not be."""
        self._cancelled = self._cancelled or bool(self._pending)
        self._pending.clear()
        using, self._using = self._using, []
        self._reads.leave(using)

    def _is_over(self) -> bool:
        return self._cancelled or self._error is not None

    def _copied(self, layer: int) -> bool:
        return all(event.done() for event in self._copies.get(layer, ()))

    def _step_of(self, layer: int) -> _Step | None:
        """Return what a layer waits for first: pages may have come whole with an earlier part."""
        wanted = {step.lane for step in self._pending if layer in step.part.layers}
        return next((step for step in self._pending if step.lane in wanted), None)

    def _advance(self) -> None:
        """Take in what has arrived, in the order of the layers.  With the lock held."""
        waiting: list[_Step] = []
        held_up = set[tuple[int, int]]()
        for step in () if self._is_over() else self._pending:
            here = step.read.over or step.part.settled()
            if self._error is None and here and step.lane not in held_up:
                self._take(step)
            else:
                waiting.append(step)
                held_up.add(step.lane)
        if not self._cancelled:
            self._pending = waiting
        for read in self._using:
            self._reads.take_in(read)

    def _take(self, step: _Step) -> None:
        """Copy a part's layers to the device, or find out that it cannot be."""
        core, read = self._core, step.read
        self._reads.judge(read, step.part)
        mine = [row for row in self._rows if row in set(read.rows)]
        bad = {read.outcome[row] for row in mine if row in read.outcome} - {ReadStatus.HIT}
        if bad or not mine or not read.parts:
            why = ", ".join(sorted(bad)) or "no room"
            self._error = DeviceError(
                f"pages of the prefix could not be read from disk ({why}); begin again"
            )
            return
        groups = core.index.group(mine).tolist()
        moves = Moves.join(
            (group, Tier.HOST, self._source(read, row), self._targets[row])
            for group, row in zip(groups, mine, strict=True)
        )
        try:
            events = copy_layers(core, self._stream, moves, step.part.layers)
        except DeviceError as error:
            self._error = error
            return
        for layer, event in events.items():
            self._copies.setdefault(layer, []).append(event)

    def _source(self, read: Read, row: int) -> int:
        """Return the host slot of a page, which may not be resident yet."""
        return self._core.slot(row, Tier.HOST) if read.over else read.slots[row]

    def _share(self) -> None:
        """Make the pages device-resident, now that they are verified and arrived."""
        core = self._core
        for row, (table, page) in self._homes.items():
            slot = self._targets[row]
            own = (
                table.holds(page)
                and (table.slots[page], table.rows[page]) == (slot, PRIVATE)
                and core.planner.exclusive(Tier.DEVICE, slot)
            )
            if own and not core.is_in(row, Tier.DEVICE):
                core.planner.install(Tier.DEVICE, [row], [slot])
                core.index.pin(np.asarray([row], np.int32), Tier.DEVICE)
                table.set(page, slot, row)
                core.counters.promoted_pages += 1
