"""One layer of one sequence, between entering and leaving the gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tierkv.data_plane.extents import Extent, component_views, gather, row_views
from tierkv.errors import (
    InvalidInputError,
    SequenceEndedError,
    StoreClosedError,
    TierKVError,
)
from tierkv.identity.spec import GroupKind

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.data_plane.gate import LayerGate
    from tierkv.identity.spec import LayerGroup

_MOST_VIEWS = 64  # kept from step to step: an extent changes when a page begins


class LayerView:
    """The state of one layer of one sequence, between entering and leaving the gate.

    Shapes: H heads, T tokens, D dim; one tensor a component of the layer's group.  Every
    place in device memory that it names is dead once the gate is left.

    Attributes:
        group: the layer group.
        memory: the device pool as a flat tensor of the group's dtype.
    """

    __slots__ = (
        "_extent_views",
        "_gate",
        "_layer",
        "_open",
        "_page_table",
        "_table",
        "group",
        "memory",
    )

    def __init__(self, gate: LayerGate, layer: int) -> None:
        self._gate = gate
        self._layer = layer
        self._table = gate.table(layer)
        self.group = self._table.group
        self.memory = gate.pool.typed(self.group.dtype)
        self._open = False
        self._extent_views: dict[Extent, tuple[Tensor, ...]] = {}
        self._page_table: tuple[list[Extent], Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens of this layer written so far."""
        return self._gate.written[self._layer]

    @property
    def component_offsets(self) -> tuple[int, ...]:
        """Elements from a page's first component to each of its components."""
        size = self.memory.element_size()
        return tuple(offset // size for offset in self.group.component_offsets)

    @property
    def first_page(self) -> int:
        """Number of the first page in :meth:`extents` and :meth:`page_table`."""
        return self.attended_from() // self.group.page_tokens

    def attended_from(self, queries: int = 0) -> int:
        """Return the first token that the last ``queries`` tokens attend to.

        0 queries stand for tokens that are yet to be appended.
        """
        return self.group.first_needed(self.length - queries)

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
        count = check_states(self.group, states, self.memory)
        start = self._gate.make_room(self._layer, count)
        size = self.group.page_tokens
        pages = range(start // size, -(-(start + count) // size))
        held = [page for page in pages if self._table.holds(page)]
        # A sliding layer keeps only the pages that something will resume from.
        assert len(held) == len(pages) or self.group.kind is GroupKind.SLIDING, "pages are missing"
        for page in held:
            (place,) = self._gate.extents(self._layer, page * size, page * size + 1)
            low, high = max(start, page * size), min(start + count, (page + 1) * size)
            targets = row_views(self.memory, self.group, place, low - page * size, high - low)
            for target, state in zip(targets, states, strict=True):
                self._gate.touch(self._layer, writes=(target,))
                part = state if len(pages) == 1 else state[:, low - start : high - start]
                target.copy_(part.transpose(0, 1))
        self._gate.wrote(self._layer, start, start + count)

    def read(self) -> tuple[Tensor, ...]:
        """Return copies ``[H, T, D]`` of what the layer attends to.

        Full and latent groups: all tokens written so far.  Sliding groups: the last
        ``min(length, window - 1)`` tokens, so read before appending.
        """
        self._must_be_open()
        out = tuple(
            torch.empty(
                (c.heads, self.readable, c.dim), dtype=self.memory.dtype, device=self.memory.device
            )
            for c in self.group.components
        )
        self.read_into(out)
        return out

    @property
    def readable(self) -> int:
        """Tokens that :meth:`read` returns now."""
        return self.length - self.group.first_needed(self.length)

    def read_into(self, out: Sequence[Tensor]) -> None:
        """Copy what :meth:`read` returns into tensors of the same shapes."""
        stop = self.length
        gather(self.memory, self.group, self.extents(), stop - self.readable, stop, out)

    def extents(self, queries: int = 0) -> list[Extent]:
        """Return where the pages lie that the layer attends to now, in order.

        Full and latent groups: all tokens written so far.  Sliding groups: the pages that
        hold the last ``window - 1`` of them.

        Args:
            queries: how many tokens, just appended, are going to attend: the window of the
                first of them is then held too.  They may be at most those of the last append.
        """
        self._must_be_open()
        stop = self.length
        start = self.attended_from(queries)
        found = self._gate.extents(self._layer, start, stop) if stop > start else []
        if self._gate.checks_order:
            self._gate.touch(self._layer, reads=[v for extent in found for v in self.views(extent)])
        return found

    def views(self, extent: Extent) -> tuple[Tensor, ...]:
        """Return an extent's components in place, ``[pages, rows, H, D]``."""
        found = self._extent_views.get(extent)
        if found is None:
            if len(self._extent_views) >= _MOST_VIEWS:
                self._extent_views.clear()
            found = component_views(self.memory, self.group, extent)
            self._extent_views[extent] = found
        return found

    def page_table(self, queries: int = 0) -> Tensor:
        """Return, for each page from :attr:`first_page` on, where its first component begins.

        Args:
            queries: as for :meth:`extents`; the first page is then that of the token
                :meth:`attended_from` (queries).

        Returns:
            int64 on the device, ``[pages]``: elements from the start of :attr:`memory`.
        """
        extents = self.extents(queries)
        if self._page_table is None or self._page_table[0] != extents:
            size = self.memory.element_size()
            offsets = [
                (extent.offset + page * extent.stride) // size
                for extent in extents
                for page in range(extent.pages)
            ]
            on_gpu = self.memory.is_cuda  # then a copy that the host need not wait for
            table = torch.tensor(offsets, dtype=torch.int64, pin_memory=on_gpu)
            self._page_table = (extents, table.to(self.memory.device, non_blocking=True))
        return self._page_table[1]

    def __enter__(self) -> LayerView:
        """Wait for the layer's transfers."""
        self._gate.enter(self._layer)
        self._open = True
        return self

    def __exit__(
        self, _: object = None, error: BaseException | None = None, __: object = None
    ) -> None:
        """Record the last use.

        Raises:
            SequenceEndedError: the sequence was ended meanwhile, as by closing the store.
        """
        self._open = False
        if not self._gate.closed:
            self._gate.leave(self._layer)
        elif error is None or (isinstance(error, Exception) and not isinstance(error, TierKVError)):
            raise SequenceEndedError(
                f"layer {self._layer}: the sequence was ended while it was in use; what was read "
                "may be of others"
            ) from error

    def _must_be_open(self) -> None:
        if not self._open:
            raise StoreClosedError(
                f"layer {self._layer}: used outside `with gate.layer({self._layer})`"
            )


def check_states(group: LayerGroup, states: Sequence[Tensor], memory: Tensor) -> int:
    """Return the token count of new states after checking them against the group.

    Raises:
        InvalidInputError: wrong number, shape, dtype or device.
    """
    if len(states) != len(group.components):
        raise InvalidInputError(
            f"layer group {group.name!r}: expected {len(group.components)} tensors "
            f"({', '.join(c.name for c in group.components)}), got {len(states)}"
        )
    count = int(states[0].shape[1]) if states[0].dim() == 3 else 0
    for component, state in zip(group.components, states, strict=True):
        expected = (component.heads, count, component.dim)
        if state.dim() != 3 or tuple(state.shape) != expected or not count:
            raise InvalidInputError(
                f"layer group {group.name!r}, {component.name}: expected shape [heads="
                f"{component.heads}, tokens >= 1, dim={component.dim}], got {tuple(state.shape)}"
            )
        if state.dtype != memory.dtype or state.device != memory.device:
            raise InvalidInputError(
                f"layer group {group.name!r}, {component.name}: the pool holds {memory.dtype} on "
                f"{memory.device}, got {state.dtype} on {state.device}"
            )
    return count
