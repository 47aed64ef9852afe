"""The layer gate: the one way to a layer's bytes.

Entering ``gate.layer(i)`` orders the compute stream after that layer's transfers; leaving
records the last use, so that the slots can be reused.  A view is dead once left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tierkv.data_plane.arrivals import order_after
from tierkv.data_plane.extents import Extent
from tierkv.data_plane.layer_view import LayerView
from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError, SequenceEndedError

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.pool import DevicePool
    from tierkv.data_plane.ring import LayerRing
    from tierkv.devices.base import Device, Event


class LayerGate:
    """Gives a sequence's layers out, one at a time, each behind its transfers.

    Args:
        device: whose compute stream the model runs on.
        pool: where the pages lie.
        tables: the page table of each layer group.
        layer_to_group: the group of each model layer.
        length: tokens that every layer holds.
        rings: by layer group, the buffers of spilled pages; filled by whoever spills.
        clock: seconds, to measure waiting by.
        reserve: called before an append with the first new token and their number.
        timeout_s: bound of every wait.

    Attributes:
        closed: whether the sequence has ended.
        waited_s: how long entries had to wait for pages on their way, on the calling thread.
        streaming_s: how long they had to wait for spilled pages.
    """

    def __init__(
        self,
        device: Device,
        pool: DevicePool,
        tables: Sequence[GroupTable],
        layer_to_group: Mapping[int, int],
        length: int,
        *,
        reserve: Callable[[int, int], None],
        timeout_s: float,
        rings: Mapping[int, LayerRing] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.waited_s = self.streaming_s = 0.0
        self._clock = clock
        self.written = dict.fromkeys(layer_to_group, length)
        self.checks_order = device.checks_order
        self._device = device
        self._tables = tables
        self._layer_to_group = layer_to_group
        self._reserve = reserve
        self._timeout_s = timeout_s
        self._rings = rings if rings is not None else {}
        self._arriving: dict[int, list[Event]] = {}
        self._last_use: Event | None = None
        self._written_from: dict[int, int] = {}
        self._views: dict[int, LayerView] = {}
        self.closed = False

    def layer(self, layer: int) -> LayerView:
        """Return the context in which a model layer's state may be used.

        Raises:
            InvalidInputError: the spec has no such layer.
            SequenceEndedError: the sequence has ended.
        """
        if self.closed:
            raise SequenceEndedError("the sequence has ended; begin a new one")
        view = self._views.get(layer)
        if view is None:
            if layer not in self._layer_to_group:
                raise InvalidInputError(
                    f"layer {layer}: the spec holds layers {sorted(self._layer_to_group)}"
                )
            view = self._views[layer] = LayerView(self, layer)
        return view

    def fork(
        self,
        tables: Sequence[GroupTable],
        *,
        reserve: Callable[[int, int], None],
        rings: Mapping[int, LayerRing],
    ) -> LayerGate:
        """Return a gate to the same state in other page tables, when nothing is on its way."""
        assert not self._arriving, "a gate is forked while pages are on their way"
        other = LayerGate(
            self._device,
            self.pool,
            tables,
            self._layer_to_group,
            self.settled_length(),
            reserve=reserve,
            timeout_s=self._timeout_s,
            rings=rings,
            clock=self._clock,
        )
        other._last_use = self._last_use
        return other

    def settled_length(self) -> int:
        """Return the tokens that every layer holds.

        Raises:
            InvalidInputError: the layers hold different numbers of tokens.
        """
        low, high = min(self.written.values()), max(self.written.values())
        if low != high:
            raise InvalidInputError(
                f"the layers hold {low} to {high} tokens: a forward ended in the middle; feed the "
                "other layers the same tokens, or abandon the sequence"
            )
        return low

    def all_hold(self, length: int) -> bool:
        """Return whether every layer holds so many tokens: nobody is in the midst of a step."""
        return all(held == length for held in self.written.values())

    def crop(self, length: int) -> None:
        """Take back the tokens from ``length`` on."""
        self.written = dict.fromkeys(self.written, length)
        for ring in self._rings.values():
            ring.crop(length)

    def jump(self, length: int) -> None:
        """Go on behind ``length`` tokens, whose pages are there."""
        self.written = dict.fromkeys(self.written, length)

    def expect(self, layer: int, event: Event) -> None:
        """Make the next entry into ``layer`` wait for a transfer."""
        self._arriving.setdefault(layer, []).append(event)

    def forget_arrivals(self) -> None:
        """Wait no more for transfers that failed: nobody reads their pages."""
        self._arriving.clear()

    def table(self, layer: int) -> GroupTable:
        """Return the page table of a model layer's group."""
        return self._tables[self._layer_to_group[layer]]

    def extents(self, layer: int, start: int, stop: int) -> list[Extent]:
        """Return where the pages touching tokens ``[start, stop)`` of a layer lie."""
        group = self._layer_to_group[layer]
        table, size = self._tables[group], self._tables[group].group.page_tokens
        found: list[Extent] = []
        first, last = start // size, -(-stop // size)
        if first < table.spilled:
            found += self._rings[group].extents(layer, first, min(last, table.spilled))
        if last > table.spilled:
            offset, _ = table.group.layer_range(layer)
            stride = self.pool.slot_bytes
            found += [
                Extent(run.slot * stride + offset, stride, run.pages, run.start)
                for run in table.runs(start, stop)
            ]
        return found

    def make_room(self, layer: int, count: int) -> int:
        """Make sure that ``count`` more tokens of a layer fit; return the first one's index."""
        start, others = self.written[layer], self.written.values()
        if start != min(others) or max(others) not in (start, start + count):
            raise InvalidInputError(
                f"layer {layer} holds {start} tokens and would get {count} more, but other layers "
                f"hold {min(others)} to {max(others)}: each step appends the same tokens to every "
                "layer once; after a forward that ended in the middle, abandon the sequence"
            )
        self._reserve(start, count)
        self._enter_ring(layer)  # pages may have spilled to make the room
        return start

    def wrote(self, layer: int, start: int, stop: int) -> None:
        """Record that a layer now holds ``stop`` tokens, those from ``start`` on new."""
        self.written[layer] = stop
        self._written_from.setdefault(layer, start)

    def arrived(self, layer: int) -> bool:
        """Return whether entering ``layer`` would not have to wait."""
        return all(event.done() for event in self._arriving.get(layer, ()))

    def enter(self, layer: int) -> None:
        """Order the compute stream after the transfers of ``layer``."""
        if self.closed:
            raise SequenceEndedError("the sequence has ended; begin a new one")
        self._await(layer)
        self._enter_ring(layer)

    def await_all(self) -> None:
        """Order the compute stream after every transfer on its way, and write-backs too.

        Raises:
            DeviceError: one failed or is late.
        """
        for layer in list(self._arriving):
            self._await(layer)
        for ring in self._rings.values():
            if not all(event.wait(self._timeout_s) for event in ring.stored()):
                raise DeviceError("spilled pages were not written back in time")

    def leave(self, layer: int) -> None:
        """Record that the compute stream has used the sequence's slots up to here."""
        self._last_use = self._device.compute.record()
        ring = self._ring(layer)
        if ring is not None:
            stop = self.written[layer]
            written = range(self._written_from.get(layer, stop), stop)
            ahead = self.written[ring.following(layer)]
            ring.leave(layer, self._last_use, written=written, ahead=ahead)
        self._written_from.pop(layer, None)

    def touch(
        self, layer: int, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Tell a device that checks the order what the compute stream does to a layer."""
        if self.checks_order:
            self._device.compute.use(f"attention of layer {layer}", reads=reads, writes=writes)

    def events(self) -> list[Event]:
        """Return the events after which neither arrivals nor computation touch the slots."""
        events = [e for waiting in self._arriving.values() for e in waiting]
        return events if self._last_use is None else [*events, self._last_use]

    def close(self) -> None:
        """Refuse every later use."""
        self.closed = True

    def _await(self, layer: int) -> None:
        arriving = self._arriving.get(layer)
        if not arriving:
            return
        started = self._clock()
        try:
            for event in arriving:
                order_after(self._device.compute, event, self._timeout_s)
        finally:
            self.waited_s += self._clock() - started
        self._arriving.pop(layer, None)  # only now: after a failure the next entry waits again

    def _ring(self, layer: int) -> LayerRing | None:
        group = self._layer_to_group[layer]
        return self._rings.get(group) if self._tables[group].spilled else None

    def _enter_ring(self, layer: int) -> None:
        ring = self._ring(layer)
        if ring is not None:
            started = self._clock()
            ring.enter(layer, self.written[layer])
            self.streaming_s += self._clock() - started


def drain(events: Sequence[Event], timeout_s: float) -> bool:
    """Wait for events; False when one failed or is late."""
    good = True
    for event in events:
        try:
            good &= event.wait(timeout_s if good else 0.0)
        except DeviceError:
            good = False
    return good
