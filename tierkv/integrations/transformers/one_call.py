"""Find, generate, keep: the usual three steps in one call."""

from __future__ import annotations

from typing import Any

from tierkv.errors import InvalidInputError, NamespaceMismatchError
from tierkv.integrations.transformers.attach import TierKV
from tierkv.integrations.transformers.identity import inner_model
from tierkv.integrations.transformers.self_check import checked_before
from tierkv.store import Store


def generate(
    model: Any,
    input_ids: Any,
    store: Store | TierKV,
    **generate_kwargs: Any,
) -> Any:
    """Generate with what a store holds, keep the new state there, and return the output.

    The usual three steps in one call: find and load the longest prefix, generate, commit.  If
    a page that was found is lost on its way, generation starts over with a shorter prefix.

    Args:
        model: a causal language model of Transformers, in evaluation mode.
        input_ids: ids of one sequence, ``[n]`` or ``[1, n]``, or rows of ids.
        store: an open store of this model, or an attached :class:`TierKV`, which spares
            proving at each call that the two belong together.  :func:`tierkv.open_store`
            opens one.
        generate_kwargs: passed on to ``model.generate``.

    Raises:
        NamespaceMismatchError: the store is of another model.
        Everything that :meth:`TierKV.cache` raises.
    """
    if isinstance(store, TierKV):
        if inner_model(store.model) is not inner_model(model):
            raise NamespaceMismatchError("generate: the TierKV given is attached to another model")
        return store.generate(input_ids, **generate_kwargs)
    if not isinstance(store, Store):
        raise InvalidInputError(
            f"generate: expected a store or a TierKV, got {type(store).__name__}; open one with "
            "tierkv.open_store(model, path)"
        )
    with TierKV.attach(model, store=store, self_check=not checked_before(model)) as kv:
        return kv.generate(input_ids, **generate_kwargs)
