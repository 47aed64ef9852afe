"""The cache object that ``model.generate(past_key_values=...)`` is given."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from transformers.cache_utils import Cache

from tierkv.errors import UnsupportedError
from tierkv.integrations.transformers.feed import Feed
from tierkv.integrations.transformers.layers import build_layers
from tierkv.integrations.transformers.refusals import ASSISTED, COPY, RESET
from tierkv.integrations.transformers.step import StepRecord

if TYPE_CHECKING:
    from tierkv.identity.keys import TokenArray
    from tierkv.identity.spec import CacheSpec
    from tierkv.sequence import Sequence
    from tierkv.stats import CommitReport, Found


class TierKVCache(Cache):  # type: ignore[misc]
    """The state of one sequence, in pages of a store.

    Made by :meth:`TierKV.cache`.  Give it to ``model.generate(ids, past_key_values=cache)``
    or to plain forwards of the attached model, then :meth:`commit`, or use it as a context
    manager: leaving commits, leaving by an exception abandons.  ``len()`` is the number of
    layers, as in every Transformers cache; tokens are ``get_seq_length()``.  One thread at
    a time.
    """

    def __init__(
        self, sequence: Sequence, spec: CacheSpec, ids: TokenArray, *, guard: object = None
    ) -> None:
        self.guard = guard  # the hooks that record what the model is fed for this cache
        self.steps = StepRecord(Feed(ids, sequence.length))
        self._sequence = sequence
        groups = {layer: group for group in spec.groups for layer in group.layers}
        super().__init__(layers=build_layers(sequence, self.steps, groups))
        self.steps.watch(self.layers)

    @property
    def found(self) -> Found:
        """Tokens found in each tier when the cache was begun."""
        return self._sequence.found

    @property
    def sequence(self) -> Sequence:
        """The store's sequence behind the cache."""
        return self._sequence

    def commit(self) -> CommitReport:
        """Make all pages visible to later sequences and release the cache.

        Full pages, and the last partial page of each group as a tail page, keyed by the ids
        that the model was really fed.  The last token that ``generate`` sampled is not among
        them, since it was never fed.

        Raises:
            InvalidInputError: the cache is spent, or a forward ended inside the model; then
                nothing is committed and the cache can only be abandoned.
        """
        length = self.steps.settle()
        self.steps.spent = True
        return self._sequence.finish(self.steps.feed.ids(length))

    def abandon(self) -> None:
        """Release the cache without committing anything; harmless when spent."""
        if not self.steps.spent:
            self.steps.spent = True
            self._sequence.abandon()

    def __enter__(self) -> Self:
        """Return the cache."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or abandon when an exception is on its way."""
        if kind is not None:
            self.abandon()
        elif not self.steps.spent:
            self.commit()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that a layer has seen."""
        return int(self.layers[layer_idx].get_seq_length())

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return what older releases ask for instead of ``get_max_length``."""
        return int(self.get_max_length(layer_idx))

    def activate_past_recording(self) -> NoReturn:
        """Refuse assisted generation, before its first token."""
        raise UnsupportedError(ASSISTED)

    def reset(self) -> NoReturn:
        """Refuse: pages may serve other sequences."""
        raise UnsupportedError(RESET)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse to copy pages."""
        raise UnsupportedError(COPY)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to copy or pickle pages."""
        raise UnsupportedError(COPY)
