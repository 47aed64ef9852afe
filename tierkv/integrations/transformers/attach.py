"""Attaching a store to a model."""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import torch

from tierkv.errors import InvalidInputError, NamespaceMismatchError, SpecError, StoreClosedError
from tierkv.identity.weights import tensor_versions
from tierkv.integrations.transformers.batch import Batch, Row
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.feed import Feed
from tierkv.integrations.transformers.generating import feed_rows, run_generation
from tierkv.integrations.transformers.guard import ForwardGuard
from tierkv.integrations.transformers.identity import (
    adapter_state,
    attention_name,
    check_same,
    inner_model,
    mismatch,
    model_namespace,
)
from tierkv.integrations.transformers.keeping import Endings
from tierkv.integrations.transformers.opening import model_spec, open_store
from tierkv.integrations.transformers.prompts import Prompts
from tierkv.integrations.transformers.refusals import ATTENTION_CHANGED
from tierkv.integrations.transformers.self_check import check_model
from tierkv.integrations.transformers.sharing import check_copies, share_pool
from tierkv.integrations.transformers.timing import ForwardClock, compute_cost
from tierkv.store import Store

if TYPE_CHECKING:
    from tierkv.data_plane.announcing import Announcement
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
        if store.costs.compute is None:
            store.costs.compute = compute_cost(model, store.spec)
        clock = ForwardClock(store, on_gpu=inner_model(model).device.type == "cuda")
        self._guard = ForwardGuard(inner_model(model), clock)
        # Rows of caches that were dropped without commit; released at the next call,
        # since a finaliser may run at any moment, in any thread.
        self._dropped: deque[Batch] = deque()
        self._versions: object | None = None
        self._adapters = adapter_state(model)
        self._attention = attention_name(model)

    @property
    def generation_config(self) -> Any:
        """The model's defaults for ``generate``."""
        return getattr(inner_model(self.model), "generation_config", None)

    @classmethod
    def attach(
        cls,
        model: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        store: Store | None = None,
        device: int | str = "256MiB",
        host: int | str | None = "1GiB",
        disk: int | str | None = "8GiB",
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
                all of them is computed.  Of a store given, what it was opened with counts.
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
        _check_is_model(model)
        if store is not None:
            spec = store.spec
            identity = {"weights_id": weights_id, "adapter": adapter, "salt": salt}
            _check_store(model, store, page_tokens, identity)
        else:
            spec = model_spec(model, page_tokens)
        if self_check:
            check_model(model, spec)
        owns_store = store is None
        if store is None:
            store = open_store(
                model,
                path,
                device=device,
                host=host,
                disk=disk,
                weights_id=weights_id,
                adapter=adapter,
                salt=salt,
                page_tokens=page_tokens,
                **store_options,
            )
        kv = cls(model, store, owns_store=owns_store)
        if weights_id is None:
            kv._versions = tensor_versions(model.state_dict())
        return kv

    def cache(
        self,
        input_ids: Any,
        max_new_tokens: int = 0,
        *,
        attention_mask: Any = None,
        copies: int = 1,
        endings: Endings | None = None,
    ) -> TierKVCache:
        """Begin sequences: find and bring in what the store holds of their prefixes.

        Rows of a batch end in the same column, so what one row lacks of the column that the
        best one reaches is computed here, row by row and without padding.

        Args:
            input_ids: ids of one sequence, ``[n]``, or of several rows; of each row at least
                the last id is left to compute.
            max_new_tokens: tokens that will be generated, so that room can be refused early.
            attention_mask: zeros before each row's first token (left padding), ones after.
            copies: rows that each sequence becomes (``num_beams`` or
                ``num_return_sequences``); the prompt is then computed once, all but its last
                token, and the copies share its pages.
            endings: end and pad tokens, to leave out what rows that ended early are fed;
                those of the model's generation config by default.

        Raises:
            InvalidInputError: no ids, more tokens than the model has positions for, or the
                weights changed since attaching.
            UnsupportedError: padding elsewhere than before the first token.
            SequenceTooLongError, PoolExhaustedError: not enough room in the device pool.
        """
        self._check_open()
        endings = endings or Endings.of(self.generation_config)
        prompts = Prompts.of(input_ids, attention_mask, pad_id=endings.pad_id)
        return self.begin(prompts, max_new_tokens, copies=copies, endings=endings)

    def begin(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        copies: int = 1,
        endings: Endings,
        restartable: bool = False,
        can_split: bool = False,
    ) -> TierKVCache:
        """Begin prompts; see :meth:`cache`.

        Args:
            prompts: the rows.
            max_new_tokens: tokens that will be generated.
            copies: rows that each prompt becomes.
            endings: end and pad tokens.
            restartable, can_split: of one prompt, as for :meth:`tierkv.Store.begin`.
        """
        self._check_open()
        self._release_dropped()
        self._check_same_model()
        if copies < 1:
            raise InvalidInputError(f"copies must be at least 1, got {copies}")
        prompts.check_length(self.model.config, max_new_tokens)
        singles: list[TierKVCache] = []
        alone = len(prompts.rows) == 1 and copies == 1
        for ids in prompts.rows:
            check_copies(self.store, len(ids), max_new_tokens, copies)
        limits = share_pool(self.store, [len(ids) + max_new_tokens for ids in prompts.rows])
        try:
            for ids, limit in zip(prompts.rows, limits, strict=True):
                sequence = self.store.begin(
                    ids,
                    max_new_tokens=max_new_tokens,
                    device_pages=limit,
                    restartable=restartable and alone,
                    can_split=can_split and alone,
                )
                row = Row(sequence, Feed(ids, sequence.length))
                singles.append(self._wrap([row], endings))
            if alone:
                return singles[0]
            self._align(singles, prompts, to_end=copies > 1)
            joined = self._join(singles, prompts, endings)
            if copies > 1:
                self._repeat(joined, copies, prompts.columns + max_new_tokens)
            return joined
        except BaseException:
            for single in singles:
                single.abandon()
            raise

    def announce(self, input_ids: Any) -> Announcement:
        """Start reading from disk what the store holds of one prompt; returns at once.

        Args:
            input_ids: ids of one sequence that will be given to :meth:`generate` or
                :meth:`cache` soon.
        """
        self._check_open()
        (ids,) = Prompts.of(input_ids, None, pad_id=None).rows
        return self.store.announce(ids)

    @torch.no_grad()
    def generate(self, input_ids: Any, **generate_kwargs: Any) -> Any:
        """Generate with what the store holds, commit, and return the output of ``generate``.

        Beam search, several returned sequences, assisted generation, batches with left
        padding and sampling included.  Of beams, only what was returned is kept.

        Args:
            input_ids: ids of one sequence, ``[n]`` or ``[1, n]``, or rows of ids, as a tensor
                or lists; or what a tokenizer returns, with its mask.
            generate_kwargs: passed on to ``model.generate``; ``attention_mask`` must be given
                for rows that are padded.

        Raises:
            Everything that :meth:`cache` raises.
        """
        return run_generation(self, input_ids, generate_kwargs)

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
        if self._attention != attention_name(self.model):
            raise InvalidInputError(
                ATTENTION_CHANGED.format(attention_name(self.model), self._attention)
            )

    def _wrap(self, rows: list[Row], endings: Endings) -> TierKVCache:
        cache = TierKVCache(rows, self.store.spec, guard=self._guard, endings=endings)
        weakref.finalize(cache, _drop, cache.batch, self._dropped).atexit = False
        return cache

    def _align(self, singles: list[TierKVCache], prompts: Prompts, *, to_end: bool) -> None:
        """Compute, row by row, what is missing up to a column that all rows reach."""
        reached = [
            padding + single.get_seq_length()
            for single, padding in zip(singles, prompts.paddings, strict=True)
        ]
        column = prompts.columns - 1 if to_end else max(reached)
        for number, single in enumerate(singles):
            ids = prompts.rows[number][single.get_seq_length() : column - prompts.paddings[number]]
            if len(ids):
                feed_rows(self.model, single, torch.from_numpy(ids.astype("int64"))[None])

    def _join(self, singles: list[TierKVCache], prompts: Prompts, endings: Endings) -> TierKVCache:
        """Return one cache of all rows; the single ones give theirs up."""
        rows = []
        for single, padding in zip(singles, prompts.paddings, strict=True):
            single.batch.settle()
            (row,) = single.batch.rows
            rows.append(Row(row.sequence, row.feed, padding))
        cache = self._wrap(rows, endings)
        for single in singles:
            single.batch.spent = True
        cache.batch.keep_from(cache.batch.columns)
        return cache

    @staticmethod
    def _repeat(cache: TierKVCache, copies: int, columns: int) -> None:
        """Repeat every row, with room for ``columns`` columns in all."""
        try:
            cache.batch_repeat_interleave(copies)
            cache.batch.reserve(columns - cache.batch.columns)
        except BaseException:
            cache.abandon()
            raise

    def _release_dropped(self) -> None:
        with suppress(IndexError):  # none left, or another thread was quicker
            while True:
                self._dropped.popleft().abandon()


def _drop(batch: Batch, dropped: deque[Batch]) -> None:
    if not batch.spent:
        dropped.append(batch)


def _check_is_model(model: Any) -> None:
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise InvalidInputError(
            f"attach: expected a model of Transformers, got {type(model).__name__}; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )


def _check_store(
    model: Any,
    store: Store,
    page_tokens: int | dict[str, int] | None,
    identity: dict[str, Any],
) -> None:
    """Refuse a store that is of another model, or of another identity where one is given."""
    if page_tokens is None:
        page_tokens = {group.name: group.page_tokens for group in store.spec.groups}
    try:
        spec = model_spec(model, page_tokens)
    except SpecError as error:
        raise NamespaceMismatchError(f"the store is not of this model: {error}") from error
    if not any(identity.values()):
        check_same(model, spec, store.namespace)
        return
    asked = model_namespace(model, spec, **identity)
    if asked.digest != store.namespace.digest:
        held, mine = (json.loads(n.description) for n in (store.namespace, asked))
        raise NamespaceMismatchError(mismatch(held, mine))
