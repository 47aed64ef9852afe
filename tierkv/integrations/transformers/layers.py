"""The cache layers that Transformers talks to: thin shells around the layer gate.

Shapes: k and v are ``[1, heads, new tokens, dim]``; what is returned is what the stock
layers return, with the same shapes, lengths and contiguity, so that attention computes
bit for bit what it computes on a cache that never left memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from tierkv.errors import UnsupportedError
from tierkv.integrations.transformers.refusals import (
    ASSISTED,
    BATCH,
    BEAMS,
    RESET,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.identity.spec import LayerGroup
    from tierkv.integrations.transformers.step import StepRecord
    from tierkv.sequence import Sequence


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """State of one full-attention layer, kept in pages.

    Attributes:
        tokens: tokens this layer holds.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, sequence: Sequence, steps: StepRecord, layer: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.tokens = sequence.length
        self._sequence = sequence
        self._steps = steps
        self._layer = layer

    def lazy_initialization(self, *states: Tensor) -> None:
        """Do nothing: the pages are there before the first token."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens into pages and return all K and V so far."""
        self._steps.check_update(self._layer, self.tokens, key_states)
        key, value = key_states.detach()[0], value_states.detach()[0]
        with self._sequence.gate.layer(self._layer) as layer:
            layer.append(key, value)
            keys, values = layer.read()
        self.tokens += key.shape[-2]
        return keys.unsqueeze(0), values.unsqueeze(0)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (K length, K offset) for a forward of ``query_length`` tokens."""
        return self.tokens + _count(query_length), 0

    def get_seq_length(self) -> int:
        """Return the tokens seen, whether or not they are all kept."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return -1: the layer sets no limit of its own (the device pool does)."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return what older releases ask for instead of ``get_max_length``."""
        return self.get_max_length()

    def activate_past_recording(self) -> NoReturn:
        """Refuse: assisted generation takes tokens back."""
        raise UnsupportedError(ASSISTED)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back (0 takes none)."""
        if tokens_to_remove:
            raise UnsupportedError(ASSISTED)

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refuse: beam search moves state between rows."""
        raise UnsupportedError(BEAMS)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: one cache holds one sequence."""
        raise UnsupportedError(BATCH)

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refuse: one cache holds one sequence."""
        raise UnsupportedError(BATCH)

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

    def __init__(self, sequence: Sequence, steps: StepRecord, layer: int, window: int) -> None:
        super().__init__(sequence, steps, layer)
        self.sliding_window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens into pages and return the past window followed by them."""
        self._steps.check_update(self._layer, self.tokens, key_states)
        key_states, value_states = key_states.detach(), value_states.detach()
        with self._sequence.gate.layer(self._layer) as layer:
            past_keys, past_values = layer.read()  # before append: it may push tokens out
            layer.append(key_states[0], value_states[0])
        self.tokens += key_states.shape[-2]
        keys = torch.cat([past_keys.unsqueeze(0), key_states], dim=-2)
        values = torch.cat([past_values.unsqueeze(0), value_states], dim=-2)
        return keys, values

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (K length, K offset): at most ``window - 1`` past tokens."""
        past = min(self.tokens, self.sliding_window - 1)
        return past + _count(query_length), self.tokens - past

    def get_max_length(self) -> int:
        """Return the window, as the stock layer does."""
        return self.sliding_window


def _count(query_length: int | Tensor) -> int:
    """Return the number of new tokens (older releases pass their positions)."""
    if isinstance(query_length, torch.Tensor):
        return query_length.shape[0] if query_length.ndim else int(query_length)
    return query_length


def build_layers(
    sequence: Sequence, steps: StepRecord, groups: dict[int, LayerGroup]
) -> list[PagedLayer]:
    """Return one layer for each model layer of ``groups`` (layer index to group)."""
    return [
        PagedLayer(sequence, steps, layer)
        if (window := groups[layer].window) is None
        else SlidingPagedLayer(sequence, steps, layer, window)
        for layer in sorted(groups)
    ]
