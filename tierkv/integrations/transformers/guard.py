"""Looks at every call of the attached model, before it computes anything.

A forward pre-hook sees what the model is fed and records the ids; a wrapper around
``prepare_inputs_for_generation`` sees the whole sequence that ``generate`` was given, of
which the forward gets only the part that is not cached.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.identity.keys import TokenArray, as_tokens
from tierkv.integrations.transformers.attention import uses_pages
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.refusals import (
    CUSTOM_MASK,
    EMBEDS,
    NO_WEIGHTS,
    OTHER_BATCH,
    OTHER_KEYWORD,
    PADDING,
    POSITIONS,
    TRAINING,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.integrations.transformers.batch import Batch
    from tierkv.integrations.transformers.timing import ForwardClock

CACHE_NAMES = ("cache", "past_key_values")
_CHECKED = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"}
# None of these changes the state that the layers keep.
_HARMLESS = {
    "labels",
    "logits_to_keep",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "use_cache",
}


class ForwardGuard:
    """The hooks of one attached model; removed by :meth:`remove`."""

    def __init__(self, model: Any, clock: ForwardClock | None = None) -> None:
        self._model = model
        self._clock = clock
        self._signature = inspect.signature(model.forward)
        self._active = True
        self._hooks = [model.register_forward_pre_hook(self._before_forward, with_kwargs=True)]
        if clock is not None:
            self._hooks.append(model.register_forward_hook(self._after_forward))
        self._prepare = getattr(model, "prepare_inputs_for_generation", None)
        if self._prepare is not None:
            model.prepare_inputs_for_generation = self._wrapped(self._prepare)

    def remove(self) -> None:
        """Take the hooks off the model; harmless when done before."""
        self._active = False
        for hook in self._hooks:
            hook.remove()
        current = self._model.__dict__.get("prepare_inputs_for_generation")
        if getattr(current, "tierkv_guard", None) is self:
            del self._model.prepare_inputs_for_generation

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hooks."""
        self.remove()

    def _mine(self, kwargs: Mapping[str, Any]) -> TierKVCache | None:
        for name in CACHE_NAMES:
            cache = kwargs.get(name)
            if isinstance(cache, TierKVCache) and cache.guard is self:
                return cache
        return None

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        cache = self._mine(given)
        if cache is None:
            return
        if "cache" in given and "cache" not in self._signature.parameters:
            raise InvalidInputError(OTHER_KEYWORD)  # this release would ignore it
        batch = cache.batch
        batch.settle()
        ids = checked_ids(given, batch, training=module.training)
        for row, fed in zip(batch.rows, ids, strict=True):
            row.feed.check(fed)
        batch.reserve(len(ids[0]))  # no room: refused before anything is computed
        batch.begin(ids, in_place=self._attends_in_place(given, len(ids[0])))
        if self._clock is not None and len(ids) == 1:
            self._clock.start(len(ids[0]), batch.columns, batch.rows[0].sequence)

    def _after_forward(self, *_: Any) -> None:
        if self._clock is not None:
            self._clock.stop()

    def _attends_in_place(self, given: Mapping[str, Any], new_tokens: int) -> bool:
        """Return whether attention reads the pages itself: one new token, no gradients."""
        if not uses_pages(self._model.config):
            return False
        if given.get("output_attentions"):
            raise UnsupportedError(NO_WEIGHTS)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters())
        return new_tokens == 1 and not trained

    def _wrapped(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        says_first = _says_first(self._model)

        @functools.wraps(prepare)
        def prepare_inputs_for_generation(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = self._mine(kwargs) if self._active else None
            if cache is not None and kwargs.get("inputs_embeds") is None:
                columns = cache.batch.settle()
                first = kwargs.get("is_first_iteration", not says_first)
                if first and _is_whole(input_ids, kwargs):
                    check_whole(input_ids, cache.batch)
                    if says_first:  # assisted generation forgets that a prefix is cached
                        kwargs["next_sequence_length"] = input_ids.shape[1] - columns
            return prepare(input_ids, *args, **kwargs)

        prepare_inputs_for_generation.tierkv_guard = self  # type: ignore[attr-defined]
        return prepare_inputs_for_generation


def checked_ids(given: Mapping[str, Any], batch: Batch, *, training: bool) -> list[TokenArray]:
    """Return the ids of a forward that plainly continues every row of a batch.

    Raises:
        UnsupportedError: another number of rows, padding or a mask of its own, embeddings,
            training mode, or an argument that may change the state and is not part of a
            page's identity.
        InvalidInputError: positions or a mask that do not fit.
    """
    if given.get("inputs_embeds") is not None:
        raise UnsupportedError(EMBEDS)
    if training:
        raise UnsupportedError(TRAINING)
    unknown = sorted(
        name
        for name, value in given.items()
        if name not in _CHECKED | _HARMLESS | set(CACHE_NAMES) and not _is_nothing(value)
    )
    if unknown:
        raise UnsupportedError(
            f"arguments {unknown} of the model may change the state that it keeps, and are not "
            "part of a page's identity: leave them out, or use a stock cache"
        )
    ids = _rows_of(given.get("input_ids"), len(batch.rows))
    count, columns = len(ids[0]), batch.columns
    _check_mask(given.get("attention_mask"), batch, columns + count)
    lengths = [row.feed.length for row in batch.rows]
    positions = given.get("position_ids")
    if positions is None and len(set(lengths)) > 1:
        raise UnsupportedError(POSITIONS.format("position_ids (not given)", 0, lengths[0]))
    _check_positions("position_ids", positions, lengths, count)
    _check_positions("cache_position", given.get("cache_position"), [columns], count)
    return ids


def _says_first(model: Any) -> bool:
    """Whether this release names the first call of a generation; models may override the call."""
    name = "prepare_inputs_for_generation"
    calls = [vars(kind)[name] for kind in type(model).__mro__ if name in vars(kind)]
    return any("is_first_iteration" in inspect.signature(call).parameters for call in calls)


def check_whole(input_ids: Tensor, batch: Batch) -> None:
    """Refuse whole sequences that do not continue what the rows hold.

    Raises:
        InvalidInputError: one differs, or is not longer than what is held.
        UnsupportedError: another number of rows.
    """
    for row, ids in zip(batch.rows, _rows_of(input_ids, len(batch.rows)), strict=True):
        row.feed.check_whole(ids[row.padding :])


def _is_whole(input_ids: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether ids handed to ``prepare_inputs_for_generation`` are the whole sequences."""
    if kwargs.get("next_sequence_length") is not None:
        return True
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        return isinstance(mask, torch.Tensor) and mask.shape[-1] == input_ids.shape[-1]
    # A mask of ones may have been dropped: then positions tell, from 0 for the whole.
    if positions is None or positions.shape[-1] != input_ids.shape[-1]:
        return False
    return int(positions.min()) == 0


def _is_nothing(value: Any) -> bool:
    """Whether an argument says nothing: None, or token types that are all zero."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not bool(value.any())
    return value is None


def _rows_of(ids: Any, rows: int) -> list[TokenArray]:
    if ids is None:
        raise InvalidInputError("the model is fed no input_ids: pass them")
    several = ids if ids.ndim == 2 else ids[None]
    if several.shape[0] != rows:
        raise UnsupportedError(OTHER_BATCH.format(several.shape[0], rows))
    return [as_tokens(row) for row in several.cpu()]


def _check_mask(mask: Any, batch: Batch, total: int) -> None:
    paddings = [row.padding for row in batch.rows]
    if mask is None:
        if any(paddings):
            raise UnsupportedError(PADDING)
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise UnsupportedError(CUSTOM_MASK)
    if mask.shape[1] != total:
        raise InvalidInputError(
            f"the attention mask is {mask.shape[1]} long, but cached and new tokens are "
            f"{total}: pass a mask over the whole sequence, or none"
        )
    starts = torch.tensor(paddings, device=mask.device).unsqueeze(1)
    real = torch.arange(total, device=mask.device) >= starts
    if mask.shape[0] != len(paddings) or not torch.equal(mask.bool(), real):
        raise UnsupportedError(PADDING)


def _check_positions(
    name: str, positions: Tensor | None, lengths: Sequence[int], count: int
) -> None:
    """Check positions, one row for all or one for each of ``lengths``."""
    if positions is None:
        return
    given = positions.reshape(-1, positions.shape[-1])
    plain = torch.arange(count, device=positions.device)
    for number, length in enumerate(lengths):
        row = given[min(number, len(given) - 1)]
        if row.numel() != count or not torch.equal(row, plain + length):
            raise UnsupportedError(POSITIONS.format(name, number, length))
