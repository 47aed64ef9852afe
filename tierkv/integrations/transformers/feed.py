"""What a cache is fed: the ids it was begun with, and those the model really got.

Pages are keyed by ids fed, never by text: decoding and encoding again may give other ids.
"""

from __future__ import annotations

import numpy as np

from tierkv.errors import InvalidInputError
from tierkv.identity.keys import TokenArray


class Feed:
    """The ids of one sequence: known ones first, then whatever the model was fed.

    Attributes:
        length: tokens fed so far, those found in the store included.
    """

    __slots__ = ("_begun", "_fed", "length")

    def __init__(self, begun: TokenArray, length: int) -> None:
        self.length = length
        self._begun = begun
        self._fed: list[TokenArray] = []

    def check(self, ids: TokenArray) -> None:
        """Refuse ids that differ from those the cache was begun with, at the same place.

        Raises:
            InvalidInputError: no ids, or a difference, with its position.
        """
        if not len(ids):
            raise InvalidInputError(
                f"the model is fed no ids: the cache holds {self.length} tokens already and "
                "the ids given are not longer; give at least one new token"
            )
        self._compare(self._begun[self.length : self.length + len(ids)], ids, self.length)

    def check_whole(self, ids: TokenArray) -> None:
        """Refuse a whole sequence that does not continue what the cache holds.

        Raises:
            InvalidInputError: it differs, or is not longer than what is held.
        """
        if len(ids) <= self.length:
            raise InvalidInputError(
                f"the cache holds {self.length} tokens and the ids given are {len(ids)}: "
                "give the whole sequence with at least one new token, or begin a new cache"
            )
        held = self.ids(self.length)
        self._compare(held, ids[: len(held)], 0)
        self.check(ids[self.length :])

    def record(self, ids: TokenArray) -> None:
        """Note ids that the model has now computed."""
        beyond = max(0, len(self._begun) - self.length)
        self.length += len(ids)
        if beyond < len(ids):
            self._fed.append(ids[beyond:])

    def jump(self, length: int) -> None:
        """Go on behind ``length`` of the ids that the cache was begun with."""
        assert self.length <= length <= len(self._begun), "no such ids"
        self.length = length

    def crop(self, length: int) -> None:
        """Forget the ids from ``length`` on; others may follow there."""
        if length < self.length:
            self._begun, self._fed = self.ids(length), []
            self.length = length

    def fork(self) -> Feed:
        """Return a feed of the same ids that goes on apart."""
        other = Feed(self._begun, self.length)
        other._fed = list(self._fed)
        return other

    def ids(self, length: int) -> TokenArray:
        """Return the first ``length`` ids of the sequence."""
        known = np.concatenate([self._begun, *self._fed])
        assert length <= len(known), "more tokens held than recorded"
        return known[:length]

    @staticmethod
    def _compare(known: TokenArray, given: TokenArray, start: int) -> None:
        count = min(len(known), len(given))
        different = np.flatnonzero(known[:count] != given[:count])
        if len(different):
            at = int(different[0])
            raise InvalidInputError(
                f"token {start + at} of the ids fed is {given[at]}, but the cache was begun "
                f"with {known[at]} there: its state belongs to another sequence; "
                "begin a cache with exactly the ids you feed"
            )
