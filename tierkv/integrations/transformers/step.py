"""The steps of a cache: which forward is under way, and whether the last one was whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.integrations.transformers.feed import Feed
from tierkv.integrations.transformers.refusals import BATCH, BROKEN, SPENT, UNRECORDED

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from torch import Tensor

    from tierkv.identity.keys import TokenArray
    from tierkv.integrations.transformers.layers import PagedLayer


class StepRecord:
    """Ties each forward of the model to the ids it was fed.

    A forward is announced by :meth:`begin` (from a hook on the model), each layer then
    checks itself against it, and :meth:`settle` takes the ids over once every layer has
    the tokens.  One thread at a time.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.spent = False
        self._pending: TokenArray | None = None
        self._layers: Items[PagedLayer] = ()

    def watch(self, layers: Items[PagedLayer]) -> None:
        """Name the layers that a forward must pass through."""
        self._layers = layers

    def begin(self, ids: TokenArray) -> None:
        """Announce a forward over ``ids``, already checked."""
        self._pending = ids

    def check_update(self, layer: int, tokens: int, states: Tensor) -> None:
        """Refuse states of a layer that belong to no announced forward.

        Raises:
            InvalidInputError: the forward was not announced, or is of another length.
            UnsupportedError: several sequences.
        """
        if self.spent:
            raise InvalidInputError(SPENT)
        if states.shape[0] != 1:
            raise UnsupportedError(BATCH)
        if self._pending is None:
            raise InvalidInputError(UNRECORDED)
        if tokens != self.feed.length or states.shape[-2] != len(self._pending):
            raise InvalidInputError(
                f"layer {layer} holds {tokens} tokens and got {states.shape[-2]}, but the model "
                f"was fed {len(self._pending)} after {self.feed.length}. {UNRECORDED}"
            )

    def settle(self) -> int:
        """Take the last forward over if all layers have it; return the tokens held.

        Raises:
            InvalidInputError: a forward ended inside the model, or the cache is spent.
        """
        if self.spent:
            raise InvalidInputError(SPENT)
        if self._pending is not None:
            held = {layer.tokens for layer in self._layers}
            if held == {self.feed.length + len(self._pending)}:
                self.feed.record(self._pending)
            elif held != {self.feed.length}:
                raise InvalidInputError(BROKEN)
            self._pending = None
        return self.feed.length
