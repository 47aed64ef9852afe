"""The cache object that ``model.generate(past_key_values=...)`` is given."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from transformers.cache_utils import Cache

from tierkv.data_plane.arrivals import LoadTime
from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.integrations.transformers.batch import Batch, Row
from tierkv.integrations.transformers.keeping import keep_outputs, keep_rows
from tierkv.integrations.transformers.layers import build_layers
from tierkv.integrations.transformers.refusals import COPY, RESET, WINDOW_GONE
from tierkv.stats import Found

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.identity.spec import CacheSpec
    from tierkv.integrations.transformers.keeping import Endings
    from tierkv.sequence import Sequence
    from tierkv.stats import CommitReport


class TierKVCache(Cache):  # type: ignore[misc]
    """The state of one sequence, or of the rows of a batch, in pages of a store.

    Made by :meth:`TierKV.cache`.  Give it to ``model.generate(ids, past_key_values=cache)``
    or to plain forwards of the attached model, then :meth:`commit`, or use it as a context
    manager: leaving commits, leaving by an exception abandons.  ``len()`` is the number of
    layers, as in every Transformers cache; tokens are ``get_seq_length()``.  One thread at
    a time.

    Attributes:
        found: tokens found in each tier when the cache was begun, all rows together.
        batch: the rows, and the forward under way.
        guard: the hooks that record what the model is fed for this cache.
    """

    def __init__(
        self, rows: list[Row], spec: CacheSpec, *, guard: object, endings: Endings
    ) -> None:
        self.guard = guard
        self.batch = Batch(rows)
        self.found = _total([row.sequence.found for row in rows])
        self._endings = endings
        groups = {layer: group for group in spec.groups for layer in group.layers}
        super().__init__(layers=build_layers(self.batch, groups))
        self.batch.watch(self.layers)

    @property
    def sequence(self) -> Sequence:
        """The store's sequence behind a cache of one row.

        Raises:
            InvalidInputError: the cache has several rows; see ``batch.rows``.
        """
        if len(self.batch.rows) != 1:
            raise InvalidInputError(f"the cache has {len(self.batch.rows)} sequences, not one")
        return self.batch.rows[0].sequence

    @property
    def load_time(self) -> LoadTime:
        """What loading took, of all rows: what was waited for, and what computing hid."""
        times = [row.sequence.load_time for row in self.batch.rows]
        return LoadTime(sum(t.exposed_s for t in times), sum(t.hidden_s for t in times))

    @property
    def front(self) -> int:
        """Tokens to feed before :meth:`join`, while the pages behind them load; mostly 0."""
        return self.sequence.front if len(self.batch.rows) == 1 else 0

    def join(self) -> None:
        """Go on behind the pages that loaded while the front was fed."""
        self.batch.join()

    def commit(self, outputs: Tensor | None = None) -> CommitReport:
        """Make all pages visible to later sequences and release the cache.

        Full pages, and the last partial page of each group as a tail page, keyed by the ids
        that the model was really fed.  The last token that ``generate`` sampled is not among
        them, since it was never fed; padding after a row's end is left out.

        Args:
            outputs: ids that ``generate`` returned, ``[n, length]``.  Of the rows only what
                one of them begins with is kept: beams that lost are not.

        Raises:
            InvalidInputError: the cache is spent, or a forward ended inside the model; then
                nothing is committed and the cache can only be abandoned.
        """
        self.batch.settle()
        try:
            if outputs is None:
                return keep_rows(self.batch.rows, self._endings)
            return keep_outputs(self.batch.rows, outputs, self._endings)
        finally:
            self.batch.abandon()

    def abandon(self) -> None:
        """Release the cache without committing anything; harmless when spent."""
        self.batch.abandon()

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
        elif not self.batch.spent:
            self.commit()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns that a layer has seen: tokens, and padding before them."""
        return int(self.layers[layer_idx].get_seq_length())

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return what older releases ask for instead of ``get_max_length``."""
        layers = self.layers if layer_idx is None else [self.layers[layer_idx]]
        return max(int(layer.get_max_length()) for layer in layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row ``i`` continue what row ``beam_idx[i]`` holds; pages are shared."""
        self.batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times; pages are shared until they are written.

        What was fed so far can be taken back to, so that the rows that win can be kept
        without what others added.
        """
        if repeats < 1:
            raise InvalidInputError(f"repeats must be at least 1, got {repeats}")
        rows = range(len(self.batch.rows))
        self.batch.keep_from(self.batch.settle())
        self.batch.select([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named, in their order."""
        self.batch.select(indices.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back.

        Args:
            tokens_to_remove: how many, as a negative number; older releases pass the new
                length instead, as a positive one.

        Raises:
            UnsupportedError: the window of a sliding layer that would be needed is gone.
        """
        held = self.batch.settle()
        wanted = held + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        try:
            self.batch.crop(max(0, min(wanted, held)))
        except InvalidInputError as error:
            raise UnsupportedError(WINDOW_GONE) from error

    def activate_past_recording(self) -> None:
        """Prepare for tokens fed from now on to be taken back."""
        self.batch.record_past(True)

    def reset(self) -> NoReturn:
        """Refuse: pages may serve other sequences."""
        raise UnsupportedError(RESET)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse to copy pages."""
        raise UnsupportedError(COPY)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to copy or pickle pages."""
        raise UnsupportedError(COPY)


def _total(found: list[Found]) -> Found:
    return Found(
        device=sum(f.device for f in found),
        host=sum(f.host for f in found),
        disk=sum(f.disk for f in found),
        remote=sum(f.remote for f in found),
    )
