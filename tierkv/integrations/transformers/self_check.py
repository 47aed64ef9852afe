"""A quick check that a model resumes rightly from state that left it and came back.

Some families continue silently wrong from a correct cache (their multi-token continuation
starts from zero, or they depend on the sequence's total length).  A few short forwards
over random ids find them before any real token is generated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from tierkv.errors import TierKVError, UnsupportedError
from tierkv.identity.keys import Namespace, as_tokens
from tierkv.identity.spec import CacheSpec
from tierkv.identity.weights import tensor_versions
from tierkv.integrations.transformers.attention import uses_pages
from tierkv.integrations.transformers.batch import Row
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.feed import Feed
from tierkv.integrations.transformers.guard import ForwardGuard
from tierkv.integrations.transformers.identity import attention_name, inner_model
from tierkv.integrations.transformers.keeping import Endings
from tierkv.integrations.transformers.versions import cache_keyword
from tierkv.store import Store

if TYPE_CHECKING:
    from torch import Tensor

PREFIX, TOTAL, STEPS = 16, 24, 2
_PAGE_TOKENS = 8
# Relative to the largest logit.  Good families stay below 2e-6 in float32, bad ones start
# at 7e-3; rounding in 8 bits of mantissa moves logits by up to 2e-2 between harmless splits.
_FLOAT32_LIMIT = 1e-4
_HALF_LIMIT = 5e-2

# A memo only: it spares a check whose answer is known.
_passed: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What the check measured, as a fraction of the largest logit.

    Attributes:
        split_error: a prefix and its continuation against one forward.
        limit: what was allowed for it, and for ``attention_error``.
        resumed_error: the continuation from a store against the one from memory; must be 0.
        attention_error: attention over pages against the stock cache's; 0 unless the model
            uses that.
    """

    split_error: float
    limit: float
    resumed_error: float
    attention_error: float = 0.0


def check_model(model: Any, spec: CacheSpec) -> SelfCheck:
    """Resume a short sequence through a store in memory, and compare.

    The model's training flags are restored; no random state is touched.

    Raises:
        UnsupportedError: the model would continue wrongly; the message has the error measured.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    chooser = torch.Generator().manual_seed(20_240_607)
    ids = torch.randint(vocabulary, (1, TOTAL + STEPS), generator=chooser).to(model.device)
    with torch.no_grad(), _evaluating(model):
        whole = _forward(model, ids[:, :TOTAL], None)
        kept = _continue(model, ids, DynamicCache(config=model.config), PREFIX)
        try:
            memory, resumed = _resumed(model, spec, ids)
        except TierKVError as error:
            raise UnsupportedError(
                f"{model.config.model_type}: resuming a short sequence failed: {error}"
            ) from error
    check = SelfCheck(
        split_error=_error(whole[:, PREFIX:], kept[:, : TOTAL - PREFIX]),
        limit=_FLOAT32_LIMIT if model.dtype == torch.float32 else _HALF_LIMIT,
        resumed_error=_error(kept if memory is None else memory, resumed),
        attention_error=0.0 if memory is None else _error(kept, memory),
    )
    name = f"{model.config.model_type} ({type(model).__name__}, {model.dtype})"
    if not check.split_error <= check.limit:
        raise UnsupportedError(
            f"{name}: feeding {PREFIX} tokens and then {TOTAL - PREFIX} gives other logits than "
            f"feeding {TOTAL} at once: off by {check.split_error:.2g} of the largest logit, "
            f"allowed {check.limit:.2g}. This model does not continue rightly from a cache, so "
            "no state of it can be reused"
        )
    if check.resumed_error:
        raise UnsupportedError(
            f"{name}: a sequence resumed from the store gives other logits than one that stayed "
            f"in memory: off by {check.resumed_error:.2g} of the largest logit. Its cache holds "
            "state that the spec does not describe; use it without tierkv"
        )
    if not check.attention_error <= check.limit:
        raise UnsupportedError(
            f"{name}: attn_implementation='tierkv' gives other logits than a stock cache: off by "
            f"{check.attention_error:.2g} of the largest logit, allowed {check.limit:.2g}. Its "
            "attention does more than tierkv's; call model.set_attn_implementation('sdpa')"
        )
    _passed[model] = _condition(model)
    return check


def checked_before(model: Any) -> bool:
    """Return whether the model passed in this process and no weight was changed since."""
    return model in _passed and _passed[model] == _condition(model)


def _condition(model: Any) -> object:
    """Return what a check holds for; unequal to anything where torch cannot tell changes."""
    versions = tensor_versions(model.state_dict())
    return object() if versions is None else (versions, attention_name(model))


def _resumed(model: Any, spec: CacheSpec, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the continuation's logits after the prefix went through a store.

    Before them those of a sequence that was kept in its pages, where attention reads these:
    the stock cache's are then not the same to the bit.
    """
    groups = tuple(replace(group, page_tokens=_PAGE_TOKENS) for group in spec.groups)
    small = replace(spec, groups=groups)
    pages = 4 * small.pages_for(TOTAL + STEPS)
    guard = ForwardGuard(inner_model(model))
    store = Store.open(
        None,
        small,
        Namespace.build(small, weights="self-check"),
        device=pages * small.slot_bytes,
        host=None,
        disk=None,
        torch_device=str(model.device),
    )
    with store, guard:
        tokens, memory = as_tokens(ids), None
        if uses_pages(model.config):
            with _begin(store, small, tokens, guard) as cache:
                memory = _continue(model, ids, cache, PREFIX)
                cache.abandon()
        with _begin(store, small, tokens[:PREFIX], guard) as cache:
            _forward(model, ids[:, :PREFIX], cache)
        with _begin(store, small, tokens, guard) as cache:
            assert cache.found.total == PREFIX, "the prefix just committed was not found"
            return memory, _continue(model, ids, cache, 0)


def _begin(store: Store, spec: CacheSpec, tokens: Any, guard: ForwardGuard) -> TierKVCache:
    sequence = store.begin(tokens)
    row = Row(sequence, Feed(tokens, sequence.length))
    return TierKVCache([row], spec, guard=guard, endings=Endings())


def _continue(model: Any, ids: Tensor, cache: Any, prefix: int) -> Tensor:
    """Return the logits from ``PREFIX`` on: several tokens in one forward, then steps."""
    if prefix:
        _forward(model, ids[:, :prefix], cache)
    parts = [_forward(model, ids[:, PREFIX:TOTAL], cache)]
    parts += [_forward(model, ids[:, at : at + 1], cache) for at in range(TOTAL, TOTAL + STEPS)]
    return torch.cat(parts, dim=1)


def _forward(model: Any, ids: Tensor, cache: Any) -> Tensor:
    given = {} if cache is None else {cache_keyword(model): cache}
    logits: Tensor = model(input_ids=ids, use_cache=cache is not None, **given).logits
    return logits


def _error(expected: Tensor, got: Tensor) -> float:
    """Return the largest difference as a fraction of the largest expected logit; exact 0."""
    if torch.equal(expected, got):
        return 0.0
    scale = float(expected.abs().max()) or 1.0
    return float((expected.float() - got.float()).abs().max()) / scale


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode and restore every module's flag."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
