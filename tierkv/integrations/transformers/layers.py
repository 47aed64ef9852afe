"""The cache layers that Transformers talks to: thin shells around the layer gate.

Shapes: k and v are ``[rows, heads, new tokens, dim]``; what is returned is what the stock
layers return, with the same shapes, lengths and contiguity, so that attention computes
bit for bit what it computes on a cache that never left memory.  Columns before a row's
first token are zeros: masks keep them out of every result.  Only where attention reads pages
itself (``attention.py``) nothing is gathered: the new K and V go back with the open pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from tierkv.errors import UnsupportedError
from tierkv.integrations.transformers.attention import can_attend_in_place
from tierkv.integrations.transformers.refusals import RESET, WHOLE_CACHE

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.identity.spec import LayerGroup
    from tierkv.integrations.transformers.batch import Batch


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """State of one full-attention layer, kept in pages.

    Attributes:
        columns: columns this layer holds, padding included.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, batch: Batch, layer: int, group: LayerGroup) -> None:
        super().__init__()
        self._group = group
        self.is_initialized = True
        self.columns = batch.columns
        self._batch = batch
        self._layer = layer

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self._batch.rows)

    @property
    def record_past(self) -> bool:
        """Whether taking tokens back is prepared for."""
        return self._batch.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self._batch.record_past(recording)

    def lazy_initialization(self, *states: Tensor) -> None:
        """Do nothing: the pages are there before the first token."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens into pages and return all K and V so far."""
        self._batch.check_update(self._layer, self.columns, key_states)
        total = self.columns + key_states.shape[-2]
        states = (key_states.detach(), value_states.detach())
        if self._batch.in_place and can_attend_in_place(self._group, states):
            return self._open(*states)
        keys, values = (_empty(state, total) for state in states)
        for number, row in enumerate(self._batch.rows):
            with row.sequence.gate.layer(self._layer) as layer:
                layer.append(*(state[number] for state in states))
                out = (keys[number], values[number])
                layer.read_into(_behind(out, total - layer.readable, total))
        self.columns = total
        return keys, values

    def _open(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens into pages; return only them, with the pages left open."""
        self._batch.open_layer(self._layer, (keys, values)).attach(keys)
        self.columns += keys.shape[-2]
        return keys, values

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (K length, K offset) for a forward of ``query_length`` tokens."""
        return self.columns + _count(query_length), 0

    def get_seq_length(self) -> int:
        """Return the columns seen, whether or not they are all kept."""
        return self.columns

    def get_max_length(self) -> int:
        """Return -1: the layer sets no limit of its own (the device pool does)."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return what older releases ask for instead of ``get_max_length``."""
        return self.get_max_length()

    def activate_past_recording(self) -> None:
        """Prepare for tokens to be taken back, in every layer."""
        self._batch.record_past(True)

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse: all layers of a cache change together."""
        raise UnsupportedError(WHOLE_CACHE)

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refuse: all layers of a cache change together."""
        raise UnsupportedError(WHOLE_CACHE)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: all layers of a cache change together."""
        raise UnsupportedError(WHOLE_CACHE)

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refuse: all layers of a cache change together."""
        raise UnsupportedError(WHOLE_CACHE)

    def reset(self) -> NoReturn:
        """Refuse: the pages are shared, zeroing them would destroy other sequences."""
        raise UnsupportedError(RESET)

    def offload(self) -> None:
        """Do nothing: tierkv moves pages itself."""

    def prefetch(self) -> None:
        """Do nothing: tierkv moves pages itself."""


class SlidingPagedLayer(PagedLayer):
    """State of one sliding-window layer: the last ``window - 1`` tokens are returned."""

    is_sliding = True

    def __init__(self, batch: Batch, layer: int, group: LayerGroup, window: int) -> None:
        super().__init__(batch, layer, group)
        self.sliding_window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens into pages and return the past window followed by them."""
        self._batch.check_update(self._layer, self.columns, key_states)
        past, count = min(self.columns, self.sliding_window - 1), key_states.shape[-2]
        states = (key_states.detach(), value_states.detach())
        if self._batch.in_place and can_attend_in_place(self._group, states):
            return self._open(*states)
        keys, values = (_empty(state, past + count) for state in states)
        for number, row in enumerate(self._batch.rows):
            with row.sequence.gate.layer(self._layer) as layer:
                out = (keys[number], values[number])
                # Read before append, which may push tokens out of the window.
                layer.read_into(_behind(out, past - layer.readable, past))
                layer.append(*(state[number] for state in states))
        keys[:, :, past:], values[:, :, past:] = states
        self.columns += count
        return keys, values

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (K length, K offset): at most ``window - 1`` past columns."""
        past = min(self.columns, self.sliding_window - 1)
        return past + _count(query_length), self.columns - past

    def get_max_length(self) -> int:
        """Return the window, as the stock layer does."""
        return self.sliding_window


def _count(query_length: int | Tensor) -> int:
    """Return the number of new tokens (older releases pass their positions)."""
    if isinstance(query_length, torch.Tensor):
        return query_length.shape[0] if query_length.ndim else int(query_length)
    return query_length


def _empty(state: Tensor, total: int) -> Tensor:
    """Return a tensor like ``state`` for ``total`` columns."""
    rows, heads, _, dim = state.shape
    return state.new_empty((rows, heads, total, dim))


def _behind(out: tuple[Tensor, ...], padding: int, stop: int) -> list[Tensor]:
    """Zero the padding columns of one row; return its columns from there to ``stop``."""
    for part in out:
        part[:, :padding].zero_()
    return [part[:, padding:stop] for part in out]


def build_layers(batch: Batch, groups: dict[int, LayerGroup]) -> list[PagedLayer]:
    """Return one layer for each model layer of ``groups`` (layer index to group)."""
    return [
        PagedLayer(batch, layer, groups[layer])
        if (window := groups[layer].window) is None
        else SlidingPagedLayer(batch, layer, groups[layer], window)
        for layer in sorted(groups)
    ]
