"""A ring of device buffers through which spilled pages pass, one layer after the other.

A sequence longer than the device pool keeps the first pages of a layer group in host memory.
At every step each layer's ranges of those pages are copied into the next buffer of the ring
while the layers before compute; ranges that a step wrote are copied back behind it.  The
buffers lie in pool slots, so attention finds these pages in the same memory as all others.

With ``R`` buffers, the layer at position ``i`` of the group uses buffer ``i % R``, and leaving
it starts the load of the layer that uses the buffer next; the first entry fills them all.  The
orders kept, by events: a load goes behind the last kernel that used the buffer, behind the
write-back out of it and behind the write-back of the layer to load; a kernel goes behind the
load and behind the write-back; a write-back goes behind the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierkv.control_plane.spilling import pages_per_ring_slot, ring_depth, ring_slots
from tierkv.data_plane.extents import Extent
from tierkv.devices.base import CopyOp
from tierkv.errors import PoolExhaustedError
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Event


class _Buffer:
    """What one buffer of the ring holds: the first ``pages`` spilled pages of ``layer``."""

    __slots__ = ("layer", "loaded", "pages", "stored")

    def __init__(self) -> None:
        self.layer: int | None = None
        self.pages = 0
        self.loaded: list[Event] = []  # those that nobody has waited for
        self.stored: Event | None = None


class LayerRing:
    """The ring of one sequence and group.  One thread at a time; its slots are held for it.

    Attributes:
        slots: the pool slots that the buffers lie in.
    """

    def __init__(self, core: Core, table: GroupTable) -> None:
        group = table.group
        self.slots: list[int] = []
        self._core = core
        self._table = table
        self._layers = group.layers
        self._layer_bytes = group.layer_bytes
        self._depth = ring_depth(len(group.layers))
        self._per_slot = pages_per_ring_slot(group)
        self._buffers = [_Buffer() for _ in range(self._depth)]
        self._load = core.device.stream("load")
        self._save = core.device.stream("save")
        self._last_load: Event | None = None
        self._stored: dict[int, Event] = {}  # by layer, after its last write-back

    def slots_short(self) -> int:
        """Return how many more pool slots the spilled pages need."""
        return max(0, ring_slots(self._table.group, self._table.spilled) - len(self.slots))

    def enter(self, layer: int, tokens: int) -> None:
        """Order the compute stream after the load of a layer's spilled pages.

        Args:
            layer: the model layer; loaded now unless it was loaded ahead.
            tokens: tokens of it that are held.

        Raises:
            PoolExhaustedError: the ring did not get the slots that it needs.
        """
        if self.slots_short():
            raise PoolExhaustedError(
                f"device pool: the buffers of {self._table.spilled} spilled pages need "
                f"{self.slots_short()} more pages of the pool; abandon this sequence or others"
            )
        buffer = self._buffer(layer)
        with self._core.lock:  # an event tells of the failures since the one before
            self._fill(buffer, layer, tokens)
            self._fill_ahead(layer, tokens)
        for event in (*buffer.loaded, buffer.stored):
            if event is not None:
                self._core.device.compute.wait(event, self._core.timeout_s)
        buffer.loaded.clear()  # only now: after a failure the next entry waits again

    def leave(self, layer: int, used: Event, *, written: range, ahead: int) -> None:
        """Write back what a layer's step wrote and load what its buffer is for next.

        Args:
            layer: the layer just used.
            used: an event of the compute stream after that use.
            written: the tokens written.
            ahead: tokens that the layer to load next holds.
        """
        with self._core.lock:  # an event tells of the failures since the one before
            self._write_back(layer, used, written)
            self._load_following(layer, used, ahead)

    def _write_back(self, layer: int, used: Event, written: range) -> None:
        buffer, timeout_s = self._buffer(layer), self._core.timeout_s
        if written:
            first = written.start // self._table.group.page_tokens
            last = min(self._table.spilled, self._table.group.pages_for(written.stop))
            if first < last:
                self._save.wait(used, timeout_s)
                self._save.copy(self._copies(layer, first, last, up=False))
                self._stored[layer] = buffer.stored = self._save.record()
                buffer.pages = max(buffer.pages, last)

    def _load_following(self, layer: int, used: Event, ahead: int) -> None:
        following = self.following(layer)
        if following == layer:
            return
        self._load.wait(used, self._core.timeout_s)
        buffer = self._buffer(layer)
        self._turn(buffer, following)
        self._fill(buffer, following, ahead)

    def following(self, layer: int) -> int:
        """Return the layer for which a layer's buffer is used next."""
        at = self._layers.index(layer) + self._depth
        return self._layers[at if at < len(self._layers) else at % self._depth]

    def extents(self, layer: int, first: int, last: int) -> list[Extent]:
        """Return where the spilled pages ``[first, last)`` of a layer lie now."""
        size = self._table.group.page_tokens
        return [
            Extent(self._place(layer, a), self._depth * self._layer_bytes, b - a, a * size)
            for a, b in self._by_slot(first, last)
        ]

    def crop(self, tokens: int) -> None:
        """Take back the tokens from ``tokens`` on."""
        for buffer in self._buffers:
            buffer.pages = min(buffer.pages, self._table.group.pages_for(tokens))

    def events(self) -> list[Event]:
        """Return events after all copies under way."""
        last = [] if self._last_load is None else [self._last_load]
        return [*last, *self._stored.values()]

    def stored(self) -> list[Event]:
        """Return events after the last write-backs to host memory."""
        return list(self._stored.values())

    def _buffer(self, layer: int) -> _Buffer:
        return self._buffers[self._layers.index(layer) % self._depth]

    def _fill(self, buffer: _Buffer, layer: int, tokens: int) -> None:
        """Load what a buffer lacks of the pages that hold the first ``tokens`` tokens."""
        if buffer.layer != layer:
            if buffer.layer is not None:
                self._order_behind_compute()
            self._turn(buffer, layer)
        places = len(self.slots) * self._per_slot
        wanted = min(self._table.spilled, self._table.group.pages_for(tokens), places)
        if buffer.pages >= wanted:
            return
        for event in (buffer.stored, self._stored.get(layer)):
            if event is not None:
                self._load.wait(event, self._core.timeout_s)
        self._load.copy(self._copies(layer, buffer.pages, wanted, up=True))
        self._last_load = self._load.record()
        buffer.loaded.append(self._last_load)
        self._core.counters.count_streamed((wanted - buffer.pages) * self._layer_bytes)
        buffer.pages = wanted

    def _turn(self, buffer: _Buffer, layer: int) -> None:
        """Let a buffer hold nothing of another layer from now on."""
        if buffer.loaded:  # ahead and in vain: whether it failed matters no more, its end does
            buffer.loaded = [self._load.record()]
        buffer.layer, buffer.pages = layer, 0

    def _fill_ahead(self, layer: int, tokens: int) -> None:
        """Load the layers that come next into buffers that hold nothing yet."""
        at = self._layers.index(layer)
        for following in self._layers[at + 1 : at + self._depth]:
            buffer = self._buffer(following)
            if buffer.layer is None:
                self._fill(buffer, following, tokens)

    def _order_behind_compute(self) -> None:
        """For a layer entered out of turn: its buffer's last user may still run."""
        self._load.wait(self._core.device.compute.record(), self._core.timeout_s)

    def _copies(self, layer: int, first: int, last: int, *, up: bool) -> list[CopyOp]:
        """Return the copies of a layer's spilled pages between host memory and its buffer."""
        _, offset, size = self._core.layer_place(layer)
        host = self._core.memory(Tier.HOST)
        ops = []
        for a, b in self._by_slot(first, last):
            slots = self._table.slots[a:b]
            for start, stop in _adjacent(slots):
                above = self._buffer_rows(layer, a + start, a + stop)
                below = host[slots[start] : slots[start] + stop - start, offset : offset + size]
                ops.append(CopyOp(above, below) if up else CopyOp(below, above))
        return ops

    def _buffer_rows(self, layer: int, first: int, last: int) -> Tensor:
        """Return ``[pages, layer bytes]`` of a buffer; the pages share one ring slot."""
        flat = self._core.pool.flat
        stride = self._depth * self._layer_bytes
        return flat.as_strided(
            (last - first, self._layer_bytes), (stride, 1), self._place(layer, first)
        )

    def _place(self, layer: int, page: int) -> int:
        """Return the byte offset in the pool of a spilled page's range of a layer."""
        slot, at = divmod(page, self._per_slot)
        number = self._layers.index(layer) % self._depth
        base = self.slots[slot] * self._core.pool.slot_bytes
        return base + (at * self._depth + number) * self._layer_bytes

    def _by_slot(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of ``[first, last)`` that lie in one ring slot each."""
        while first < last:
            stop = min(last, (first // self._per_slot + 1) * self._per_slot)
            yield first, stop
            first = stop


def _adjacent(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs [start, stop) of positions whose slots are adjacent."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield start, at
            start = at
