"""Attaching a store to a model."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import torch

from tierkv.errors import InvalidInputError, NamespaceMismatchError, SpecError, StoreClosedError
from tierkv.identity.keys import as_tokens
from tierkv.identity.spec import CacheSpec
from tierkv.identity.weights import tensor_versions
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.guard import ForwardGuard
from tierkv.integrations.transformers.identity import (
    adapter_state,
    inner_model,
    model_namespace,
)
from tierkv.integrations.transformers.self_check import check_model
from tierkv.integrations.transformers.versions import cache_keyword
from tierkv.store import Store

if TYPE_CHECKING:
    from tierkv.sequence import Sequence
    from tierkv.stats import StoreStats


class TierKV:
    """A model whose sequences keep their state in a store.

    Make it with :meth:`attach`; close it, or use it as a context manager.  It owns the store
    that it opened, not one that it was given.  The model gets a hook, which closing removes.
    Several threads may share the store; one cache belongs to one thread at a time.

    Attributes:
        model: the attached model.
        store: the store behind it.
    """

    def __init__(self, model: Any, store: Store, *, owns_store: bool = False) -> None:
        self.model = model
        self.store = store
        self._owns_store = owns_store
        self._closed = False
        self._guard = ForwardGuard(inner_model(model))
        # Sequences of caches that were dropped without commit; released at the next call,
        # since a finaliser may run at any moment, in any thread.
        self._dropped: deque[Sequence] = deque()
        self._versions: object | None = None
        self._adapters = adapter_state(model)

    @classmethod
    def attach(
        cls,
        model: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        store: Store | None = None,
        device: int | str = "256MiB",
        host: int | str | None = "1GiB",
        disk: int | str | None = "4GiB",
        weights_id: str | None = None,
        adapter: str = "",
        salt: str = "",
        page_tokens: int | dict[str, int] | None = None,
        self_check: bool = True,
        **store_options: Any,
    ) -> TierKV:
        """Attach a store to a model.

        Args:
            model: a causal language model of Transformers, in evaluation mode.
            path: directory of the store, created when missing; None for memory only.
            store: a store to share instead of opening one; it must be of this model.
            device: budget of the device page pool.
            host: budget of host memory, or None.
            disk: budget of the directory, or None.
            weights_id: an id of the weights that you vouch for; without one, a digest over
                all of them is computed.
            adapter: id or digest of the adapter that is active on the model.
            salt: separates tenants that must not share pages.
            page_tokens: tokens a page of the first layer group, or a map from group name.
            self_check: resume a short sequence first and refuse a model that resumes wrongly.
            store_options: passed on to :meth:`tierkv.Store.open`.

        Raises:
            SpecError: an architecture that is not known.
            UnsupportedError: a model that would resume wrongly, or an unknown adapter.
            NamespaceMismatchError: ``store`` belongs to another model, dtype or page size.
            StoreError: the directory cannot be used.
        """
        if getattr(model.config, "is_encoder_decoder", False):
            raise SpecError(f"{model.config.model_type}: encoder-decoder models are not supported")
        spec = CacheSpec.from_config(model.config, dtype=_dtype(model), page_tokens=page_tokens)
        namespace = model_namespace(model, spec, weights_id=weights_id, adapter=adapter, salt=salt)
        if store is not None and store.namespace.digest != namespace.digest:
            raise NamespaceMismatchError(
                "the store given is of another model, dtype, page size, adapter or salt than "
                f"this one: {store.namespace.description} is not {namespace.description}"
            )
        if self_check:
            check_model(model, spec)
        owns_store = store is None
        if store is None:
            store = Store.open(
                path,
                spec,
                namespace,
                device=device,
                host=host,
                disk=None if path is None else disk,
                torch_device=str(model.device),
                **store_options,
            )
        kv = cls(model, store, owns_store=owns_store)
        if weights_id is None:
            kv._versions = tensor_versions(model.state_dict())
        return kv

    def cache(self, input_ids: Any, max_new_tokens: int = 0) -> TierKVCache:
        """Begin a sequence: find and bring in what the store holds of its prefix.

        Args:
            input_ids: ids of one sequence, ``[n]`` or ``[1, n]``; at least the last one is
                left to compute.
            max_new_tokens: tokens that will be generated, so that room can be refused early.

        Raises:
            InvalidInputError: no ids, several rows, or the weights changed since attaching.
            SequenceTooLongError: more pages than the device pool has.
        """
        self._check_open()
        self._release_dropped()
        self._check_same_model()
        ids = as_tokens(input_ids)
        sequence = self.store.begin(ids, max_new_tokens=max_new_tokens)
        cache = TierKVCache(sequence, self.store.spec, ids, guard=self._guard)
        weakref.finalize(cache, _drop, cache.steps, sequence, self._dropped).atexit = False
        return cache

    @torch.no_grad()
    def generate(self, input_ids: Any, **generate_kwargs: Any) -> Any:
        """Generate with what the store holds, commit, and return the output of ``generate``.

        Args:
            input_ids: ids of one sequence, ``[n]`` or ``[1, n]``, as a tensor or a list.
            generate_kwargs: passed on to ``model.generate``.
        """
        ids = as_tokens(input_ids)
        row = torch.tensor(ids.astype("int64"), device=self.model.device).unsqueeze(0)
        generate_kwargs.setdefault("attention_mask", torch.ones_like(row))
        room = _new_tokens(self.model, generate_kwargs, len(ids))
        with self.cache(ids, max_new_tokens=room) as cache:
            generate_kwargs[cache_keyword(self.model)] = cache
            return self.model.generate(row, **generate_kwargs)

    def stats(self) -> StoreStats:
        """Return the store's statistics."""
        return self.store.stats()

    def check(self) -> None:
        """Check the store's invariants."""
        self.store.check()

    def close(self) -> None:
        """Take the hooks off the model and close the store if it was opened here."""
        if self._closed:
            return
        self._closed = True
        self._guard.remove()
        self._release_dropped()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this TierKV is closed; attach to the model again")

    def _check_same_model(self) -> None:
        """Refuse a model that is no longer the one whose identity the store was opened with."""
        versions = self._versions
        if versions is not None and versions != tensor_versions(self.model.state_dict()):
            raise InvalidInputError(
                "the model's weights were changed or moved since TierKV was attached, so its "
                "state is not that of the stored pages: close and attach again"
            )
        if self._adapters != adapter_state(self.model):
            raise InvalidInputError(
                "the model's active adapters changed since TierKV was attached: "
                "close, and attach with adapter= naming the one that is active"
            )

    def _release_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft().abandon()


def _drop(steps: Any, sequence: Sequence, dropped: deque[Sequence]) -> None:
    if not steps.spent:
        dropped.append(sequence)


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _new_tokens(model: Any, kwargs: dict[str, Any], prompt: int) -> int:
    """Return how many tokens ``generate`` may add, as far as its arguments tell."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    count = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    if count is not None:
        return int(count)
    total = kwargs.get("max_length") or getattr(config, "max_length", None) or 0
    return max(0, int(total) - prompt)
