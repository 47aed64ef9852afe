"""The layer gate: the one way to a layer's bytes.

Entering ``gate.layer(i)`` orders the compute stream after that layer's transfers; leaving
records the last use, so that the slots can be reused.  A view is dead once left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tierkv.errors import InvalidInputError, SequenceEndedError, StoreClosedError
from tierkv.identity.spec import GroupKind

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.pool import DevicePool
    from tierkv.devices.base import Device, Event
    from tierkv.identity.spec import LayerGroup


class LayerView:
    """The state of one layer of one sequence, between entering and leaving the gate.

    Shapes: H heads, T tokens, D dim; one tensor a component of the layer's group.
    """

    __slots__ = ("_components", "_gate", "_layer", "_open", "_table")

    def __init__(self, gate: LayerGate, layer: int) -> None:
        self._gate = gate
        self._layer = layer
        self._table = gate.table(layer)
        self._components = gate.pool.components(layer)
        self._open = False

    @property
    def length(self) -> int:
        """Tokens of this layer written so far."""
        return self._gate.written[self._layer]

    def append(self, *states: Tensor) -> None:
        """Write the states of new tokens into the pages.

        Args:
            states: one tensor a component, ``[H, T, D]``, in the group's order, dtype and
                device.

        Raises:
            InvalidInputError: wrong number, shape, dtype or device.
            SequenceTooLongError, PoolExhaustedError: no room for the tokens.
        """
        self._must_be_open()
        group = self._table.group
        count = check_states(group, states, self._components)
        start = self._gate.make_room(self._layer, count)
        size = group.page_tokens
        for page in range(start // size, -(-(start + count) // size)):
            if not self._table.holds(page):
                # A sliding layer keeps only the pages that something will resume from.
                assert group.kind is GroupKind.SLIDING, f"page {page} was not obtained"
                continue
            low, high = max(start, page * size), min(start + count, (page + 1) * size)
            rows = slice(low - page * size, high - page * size)
            slot = self._table.slots[page]
            for view, state in zip(self._components, states, strict=True):
                view[slot, rows] = state[:, low - start : high - start].transpose(0, 1)
        self._gate.written[self._layer] = start + count

    def read(self) -> tuple[Tensor, ...]:
        """Return copies ``[H, T, D]`` of what the layer attends to.

        Full and latent groups: all tokens written so far.  Sliding groups: the last
        ``min(length, window - 1)`` tokens, so read before appending.
        """
        self._must_be_open()
        group, count = self._table.group, self.readable
        out = tuple(
            torch.empty((c.heads, count, c.dim), dtype=view.dtype, device=view.device)
            for view, c in zip(self._components, group.components, strict=True)
        )
        self.read_into(out)
        return out

    @property
    def readable(self) -> int:
        """Tokens that :meth:`read` returns now."""
        return self.length - self._table.group.first_needed(self.length)

    def read_into(self, out: Sequence[Tensor]) -> None:
        """Copy what :meth:`read` returns into tensors of the same shapes."""
        self._must_be_open()
        stop = self.length
        start = self._table.group.first_needed(stop)
        for view, tensor in zip(self._components, out, strict=True):
            _gather(view, self._table, start, stop, tensor)

    def __enter__(self) -> LayerView:
        """Wait for the layer's transfers."""
        self._gate.enter(self._layer)
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        """Record the last use."""
        self._open = False
        self._gate.leave()

    def _must_be_open(self) -> None:
        if not self._open:
            raise StoreClosedError(
                f"layer {self._layer}: used outside `with gate.layer({self._layer})`"
            )


class LayerGate:
    """Gives a sequence's layers out, one at a time, each behind its transfers."""

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
    ) -> None:
        self.pool = pool
        self.written = dict.fromkeys(layer_to_group, length)
        self._device = device
        self._tables = tables
        self._layer_to_group = layer_to_group
        self._reserve = reserve
        self._timeout_s = timeout_s
        self._arriving: dict[int, list[Event]] = {}
        self._last_use: Event | None = None
        self._views: dict[int, LayerView] = {}
        self._closed = False

    def layer(self, layer: int) -> LayerView:
        """Return the context in which a model layer's state may be used.

        Raises:
            InvalidInputError: the spec has no such layer.
            SequenceEndedError: the sequence has ended.
        """
        if self._closed:
            raise SequenceEndedError("the sequence has ended; begin a new one")
        view = self._views.get(layer)
        if view is None:
            if layer not in self._layer_to_group:
                raise InvalidInputError(
                    f"layer {layer}: the spec holds layers {sorted(self._layer_to_group)}"
                )
            view = self._views[layer] = LayerView(self, layer)
        return view

    def fork(self, tables: Sequence[GroupTable], reserve: Callable[[int, int], None]) -> LayerGate:
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
                f"the layers hold {low} to {high} tokens: a forward ended in the middle, so the "
                "sequence can only be abandoned"
            )
        return low

    def crop(self, length: int) -> None:
        """Take back the tokens from ``length`` on."""
        self.written = dict.fromkeys(self.written, length)

    def expect(self, layer: int, event: Event) -> None:
        """Make the next entry into ``layer`` wait for a transfer."""
        self._arriving.setdefault(layer, []).append(event)

    def table(self, layer: int) -> GroupTable:
        """Return the page table of a model layer's group."""
        return self._tables[self._layer_to_group[layer]]

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
        return start

    def arrived(self, layer: int) -> bool:
        """Return whether entering ``layer`` would not have to wait."""
        return all(event.done() for event in self._arriving.get(layer, ()))

    def enter(self, layer: int) -> None:
        """Order the compute stream after the transfers of ``layer``."""
        if self._closed:
            raise SequenceEndedError("the sequence has ended; begin a new one")
        for event in self._arriving.get(layer, ()):
            self._device.compute.wait(event, self._timeout_s)
        self._arriving.pop(layer, None)  # only now: after a failure the next entry waits again

    def enter_all(self) -> None:
        """Order the compute stream after every transfer on its way."""
        for layer in list(self._arriving):
            self.enter(layer)

    def leave(self) -> None:
        """Record that the compute stream has used the sequence's slots up to here."""
        self._last_use = self._device.compute.record()

    def drain(self) -> bool:
        """Wait until no transfer or computation touches the slots; False when late."""
        events = [e for waiting in self._arriving.values() for e in waiting]
        if self._last_use is not None:
            events.append(self._last_use)
        self._arriving.clear()
        late = [event for event in events if not event.wait(self._timeout_s)]
        return not late

    def close(self) -> None:
        """Refuse every later use."""
        self._closed = True


def check_states(group: LayerGroup, states: Sequence[Tensor], views: Sequence[Tensor]) -> int:
    """Return the token count of new states after checking them against the group."""
    if len(states) != len(group.components):
        raise InvalidInputError(
            f"layer group {group.name!r}: expected {len(group.components)} tensors "
            f"({', '.join(c.name for c in group.components)}), got {len(states)}"
        )
    count = int(states[0].shape[1]) if states[0].dim() == 3 else 0
    for component, state, view in zip(group.components, states, views, strict=True):
        expected = (component.heads, count, component.dim)
        if state.dim() != 3 or tuple(state.shape) != expected or not count:
            raise InvalidInputError(
                f"layer group {group.name!r}, {component.name}: expected shape [heads="
                f"{component.heads}, tokens >= 1, dim={component.dim}], got {tuple(state.shape)}"
            )
        if state.dtype != view.dtype or state.device != view.device:
            raise InvalidInputError(
                f"layer group {group.name!r}, {component.name}: the pool holds {view.dtype} on "
                f"{view.device}, got {state.dtype} on {state.device}"
            )
    return count


def _gather(view: Tensor, table: GroupTable, start: int, stop: int, out: Tensor) -> None:
    """Copy tokens [start, stop) out of the pages into ``out``, ``[H, T, D]``."""
    size = table.group.page_tokens
    for run in table.runs(start, stop) if stop > start else ():
        low, high = max(start, run.start), min(stop, run.start + run.pages * size)
        # Whole pages of an extent go in one strided copy, ragged ends apart.
        head = min(high, -(-low // size) * size)
        tail = max(head, high // size * size)
        for a, b in ((low, head), (head, tail), (tail, high)):
            if b > a:
                _copy_span(view, run.slot, run.start, size, a, b, out[:, a - start : b - start])


def _copy_span(
    view: Tensor, slot: int, base: int, size: int, low: int, high: int, out: Tensor
) -> None:
    """Copy tokens [low, high): either whole pages, or a part of one page."""
    page, offset = divmod(low - base, size)
    pages, rest = divmod(high - low, size)
    if rest or offset:
        rows = view[slot + page, offset : offset + high - low]
        out.copy_(rows.transpose(0, 1))
        return
    source = view[slot + page : slot + page + pages]  # [pages, rows, heads, dim]
    out.view(out.shape[0], pages, size, out.shape[2]).copy_(source.permute(2, 0, 1, 3))
