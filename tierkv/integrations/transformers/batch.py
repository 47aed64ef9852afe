"""The rows of a cache: which forward is under way, and whether the last one was whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.integrations.transformers.attention_open_layer import OpenLayer
from tierkv.integrations.transformers.refusals import (
    BROKEN,
    NOT_ATTENDED,
    OTHER_BATCH,
    SPENT,
    UNRECORDED,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from torch import Tensor

    from tierkv.identity.keys import TokenArray
    from tierkv.integrations.transformers.feed import Feed
    from tierkv.integrations.transformers.layers import PagedLayer
    from tierkv.sequence import Sequence


class Row:
    """One sequence of a batch.

    Attributes:
        sequence: its pages, which hold its real tokens only.
        feed: the ids it was fed.
        padding: columns of the batch before its first token.
    """

    __slots__ = ("feed", "padding", "sequence")

    def __init__(self, sequence: Sequence, feed: Feed, padding: int = 0) -> None:
        self.sequence = sequence
        self.feed = feed
        self.padding = padding

    def fork(self) -> Row:
        """Return a row with the same state that goes on apart."""
        return Row(self.sequence.fork(), self.feed.fork(), self.padding)


class Batch:
    """Rows that end in the same column, and ties each forward to the ids it was fed.

    A forward is announced by :meth:`begin` (from a hook on the model), each layer then
    checks itself against it, and :meth:`settle` takes the ids over once every layer has
    the tokens.  One thread at a time.

    Attributes:
        rows: one sequence each.
        spent: the rows were committed or abandoned.
        recording: tokens can be taken back, windows of sliding layers included.
        in_place: the forward under way attends to pages where they lie, if its layers can.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.spent = False
        self.recording = False
        self.in_place = False
        self._pending: list[TokenArray] | None = None
        self._opened: OpenLayer | None = None
        self._layers: Items[PagedLayer] = ()

    @property
    def columns(self) -> int:
        """Columns that the last whole forward ended at, padding included."""
        return self.rows[0].padding + self.rows[0].feed.length

    def watch(self, layers: Items[PagedLayer]) -> None:
        """Name the layers that a forward must pass through."""
        self._layers = layers

    def begin(self, ids: list[TokenArray], *, in_place: bool = False) -> None:
        """Announce a forward over ``ids``, one array a row, already checked."""
        self._pending = ids
        self.in_place = in_place

    def open_layer(self, layer: int, states: Items[Tensor]) -> OpenLayer:
        """Write the states of new tokens into pages, which stay open until attention read them.

        Args:
            layer: the model layer.
            states: ``[rows, heads, tokens, dim]``, one a component.
        """
        opened = OpenLayer(layer, [row.sequence.gate.layer(layer) for row in self.rows])
        opened.append(states)
        self._opened = opened
        return opened

    def check_update(self, layer: int, columns: int, states: Tensor) -> None:
        """Refuse states of a layer that belong to no announced forward.

        Raises:
            InvalidInputError: the forward was not announced, or is of another length.
            UnsupportedError: another number of sequences, or a layer before whose attention
                did not read the pages that were opened for it.
        """
        if self.spent:
            raise InvalidInputError(SPENT)
        self._check_attended()
        if states.shape[0] != len(self.rows):
            raise UnsupportedError(OTHER_BATCH.format(states.shape[0], len(self.rows)))
        if self._pending is None:
            raise InvalidInputError(UNRECORDED)
        if columns != self.columns or states.shape[-2] != len(self._pending[0]):
            raise InvalidInputError(
                f"layer {layer} holds {columns} tokens and got {states.shape[-2]}, but the model "
                f"was fed {len(self._pending[0])} after {self.columns}. {UNRECORDED}"
            )

    def settle(self) -> int:
        """Take the last forward over if all layers have it; return the columns held.

        Raises:
            InvalidInputError: a forward ended inside the model, or the cache is spent.
            UnsupportedError: attention did not read the pages that were opened for it.
        """
        if self.spent:
            raise InvalidInputError(SPENT)
        self._check_attended()
        if self._pending is not None:
            held, before = {layer.columns for layer in self._layers}, self.columns
            if held == {before + len(self._pending[0])}:
                for row, ids in zip(self.rows, self._pending, strict=True):
                    row.feed.record(ids)
            elif held != {before}:
                raise InvalidInputError(BROKEN)
            self._pending = None
        return self.columns

    def join(self) -> None:
        """Go on behind what was loaded while the front was computed; of one row.

        Raises:
            InvalidInputError: the front was not fed, or not to its end.
        """
        self.settle()
        (row,) = self.rows
        row.feed.jump(row.sequence.join())
        for layer in self._layers:
            layer.columns = self.columns

    def select(self, indices: list[int]) -> None:
        """Make row ``i`` the row ``indices[i]`` of now; rows named twice fork, others end.

        Raises:
            InvalidInputError: no rows, or rows that are not there.
        """
        self.settle()
        if not indices or min(indices) < 0 or max(indices) >= len(self.rows):
            raise InvalidInputError(f"rows {indices} of a cache of {len(self.rows)} rows")
        forks: list[Row] = []
        uses, chosen = Counter(indices), list[Row]()
        try:
            for index in indices:
                uses[index] -= 1
                row = self.rows[index]
                if uses[index]:
                    row = row.fork()
                    forks.append(row)
                chosen.append(row)
        except BaseException:
            for row in forks:
                row.sequence.abandon()
            raise
        for index, row in enumerate(self.rows):
            if index not in uses:
                row.sequence.abandon()
        self.rows = chosen

    def crop(self, columns: int) -> None:
        """Take back the columns from ``columns`` on.

        Raises:
            UnsupportedError: a window that is no longer there would be needed.
        """
        now = self.settle()
        if columns < now:
            for row in self.rows:
                length = max(0, columns - row.padding)
                row.sequence.crop(length)
                row.feed.crop(length)
            for layer in self._layers:
                layer.columns = columns
        self._keep_windows()

    def record_past(self, recording: bool) -> None:
        """Keep, or no longer keep, what taking tokens back from now on will need."""
        if self.spent or recording == self.recording:
            return
        self.settle()
        self.recording = recording
        self._keep_windows()
        if not recording:
            for row in self.rows:
                row.sequence.keep_from(None)

    def keep_from(self, columns: int) -> None:
        """Keep what taking back every token from ``columns`` on will need."""
        for row in self.rows:
            row.sequence.keep_from(max(0, columns - row.padding))

    def reserve(self, columns: int) -> None:
        """Make room for so many tokens more in every row."""
        for row in self.rows:
            row.sequence.reserve(columns)

    def abandon(self) -> None:
        """Release every row without committing; harmless when spent."""
        if not self.spent:
            self.spent = True
            if self._opened is not None:
                self._opened.close()
            _abandon(self.rows)

    def _check_attended(self) -> None:
        """Refuse to go on from an attention that saw one token instead of all."""
        if self._opened is not None and not self._opened.closed:
            raise UnsupportedError(NOT_ATTENDED.format(self._opened.layer))

    def _keep_windows(self) -> None:
        """While recording, what may be taken back is what comes from here on."""
        if self.recording:
            self.keep_from(self.columns)


def _abandon(rows: Iterable[Row]) -> None:
    for row in rows:
        row.sequence.abandon()
