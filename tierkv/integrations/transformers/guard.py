"""Looks at every call of the attached model, before it computes anything.

A forward pre-hook sees what the model is fed and records the ids; a wrapper around
``prepare_inputs_for_generation`` sees the whole sequence that ``generate`` was given, of
which the forward gets only the part that is not cached.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.identity.keys import TokenArray, as_tokens
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.refusals import (
    BATCH,
    CUSTOM_MASK,
    EMBEDS,
    PADDING,
    TRAINING,
)

if TYPE_CHECKING:
    from torch import Tensor

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

    def __init__(self, model: Any) -> None:
        self._model = model
        self._signature = inspect.signature(model.forward)
        self._active = True
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._prepare = getattr(model, "prepare_inputs_for_generation", None)
        if self._prepare is not None:
            model.prepare_inputs_for_generation = self._wrapped(self._prepare)

    def remove(self) -> None:
        """Take the hooks off the model; harmless when done before."""
        self._active = False
        self._hook.remove()
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
        length = cache.steps.settle()
        ids = checked_ids(given, length, training=module.training)
        cache.steps.feed.check(ids)
        cache.sequence.reserve(len(ids))  # no room: refused before anything is computed
        cache.steps.begin(ids)

    def _wrapped(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepare_inputs_for_generation(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = self._mine(kwargs) if self._active else None
            # With a number of new tokens, input_ids is the whole sequence.
            if cache is not None and kwargs.get("next_sequence_length") is not None:
                cache.steps.settle()
                if kwargs.get("is_first_iteration") and kwargs.get("inputs_embeds") is None:
                    cache.steps.feed.check_whole(_single_row(input_ids))
            return prepare(input_ids, *args, **kwargs)

        prepare_inputs_for_generation.tierkv_guard = self  # type: ignore[attr-defined]
        return prepare_inputs_for_generation


def checked_ids(given: Mapping[str, Any], length: int, *, training: bool) -> TokenArray:
    """Return the ids of a forward that plainly continues ``length`` tokens.

    Raises:
        UnsupportedError: a batch, padding, a mask of its own, embeddings, training mode, or
            an argument that may change the state and is not part of a page's identity.
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
    ids = _single_row(given.get("input_ids"))
    _check_mask(given.get("attention_mask"), length + len(ids))
    _check_positions("position_ids", given.get("position_ids"), length, len(ids))
    _check_positions("cache_position", given.get("cache_position"), length, len(ids))
    return ids


def _is_nothing(value: Any) -> bool:
    """Whether an argument says nothing: None, or token types that are all zero."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not bool(value.any())
    return value is None


def _single_row(ids: Any) -> TokenArray:
    if ids is None:
        raise InvalidInputError("the model is fed no input_ids: pass them")
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise UnsupportedError(f"input_ids has shape {tuple(ids.shape)}: {BATCH}")
    return as_tokens(ids)


def _check_mask(mask: Any, total: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise UnsupportedError(CUSTOM_MASK)
    if mask.shape[1] != total:
        raise InvalidInputError(
            f"the attention mask is {mask.shape[1]} long, but cached and new tokens are "
            f"{total}: pass a mask of ones over the whole sequence, or none"
        )
    if not bool(mask.all()):
        raise UnsupportedError(PADDING)


def _check_positions(name: str, positions: Tensor | None, length: int, count: int) -> None:
    if positions is None:
        return
    plain = torch.arange(length, length + count, device=positions.device)
    if positions.numel() != count or not bool((positions.reshape(-1) == plain).all()):
        raise UnsupportedError(
            f"{name} is not the plain continuation {length}..{length + count - 1} of the cached "
            "tokens; positions are not part of a page's identity: leave them out"
        )
