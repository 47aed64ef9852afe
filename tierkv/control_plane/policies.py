"""Eviction policies: how much a page is worth keeping in a tier.

The index decides who *may* be evicted (resident, unpinned, no resident child) and what
outranks any policy (the eviction class); a policy only orders pages.  Both policies order
leaves: a parent is asked about when its last child in the tier has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import InvalidInputError

Rows = NDArray[np.integer]
Stamps = NDArray[np.int64]

PRIORITY_BITS = 60  # priorities lie in [0, 2**60)


class EvictionClass(IntEnum):
    """What the application knows of a page; outranks any policy.  Lower goes first."""

    DEAD = 0
    NORMAL = 1
    PROTECTED = 2


class Policy(Protocol):
    """Orders the pages of one tier; the lowest priority is evicted first.

    Priorities must be unique and stay as they are until the next call of
    :meth:`touched` or :meth:`created` for that row, except when ``generation`` changes,
    which says that all priorities were renumbered (in the same order).
    One instance serves one tier of one index.
    """

    generation: int

    def bind(self, max_pages: int) -> None:
        """Allocate what the policy keeps by row; rows lie in [0, max_pages)."""

    def created(self, rows: Rows, stamps: Stamps, uses: NDArray[np.int64]) -> None:
        """Learn that rows hold these pages now, used so often; forget what was before."""

    def touched(self, rows: Rows, stamps: Stamps) -> None:
        """Learn that pages were used, wherever they are; stamps grow with time."""

    def evicted(self, rows: Rows) -> None:
        """Learn that these pages were chosen as victims, in this order."""

    def priority(self, rows: Rows, stamps: Stamps) -> NDArray[np.int64]:
        """Return the priorities of rows, given when each was last used."""


class LRU:
    """The page used longest ago goes first.  Keeps nothing but the index's stamps."""

    generation = 0

    def bind(self, max_pages: int) -> None:
        """See :class:`Policy`."""

    def created(self, rows: Rows, stamps: Stamps, uses: NDArray[np.int64]) -> None:
        """See :class:`Policy`."""

    def touched(self, rows: Rows, stamps: Stamps) -> None:
        """See :class:`Policy`."""

    def evicted(self, rows: Rows) -> None:
        """See :class:`Policy`."""

    def priority(self, rows: Rows, stamps: Stamps) -> NDArray[np.int64]:
        """See :class:`Policy`."""
        return stamps


class AgeingFrequency:
    """Least frequently used, with dynamic ageing; ties go to the page used longest ago.

    A use sets a page's level to the current age plus its number of uses (at most
    ``max_frequency``); the age is the highest level evicted so far.  So a page that was
    popular once is overtaken by newer ones after about ``max_frequency`` turnovers.

    Level and recency share one 60-bit priority.  When either half is about to overflow,
    all pages are renumbered in their present order (a pause of well under a second at
    millions of pages, after at least 2**24 levels or 2**36 uses).
    """

    def __init__(self, *, max_frequency: int = 15, level_bits: int = 24) -> None:
        if not 1 <= max_frequency <= 255:
            raise InvalidInputError(
                f"ageing policy: max_frequency must lie in [1, 255], got {max_frequency}"
            )
        if not max_frequency.bit_length() < level_bits <= 28:
            raise InvalidInputError(
                f"ageing policy: level_bits must hold max_frequency and be at most 28, "
                f"got {level_bits}"
            )
        self.generation = 0
        self.age = 0
        self._max_frequency = max_frequency
        self._max_level = (1 << level_bits) - 1
        self._recency_bits = PRIORITY_BITS - level_bits
        self._recency_base = 0
        self.bind(0)

    def bind(self, max_pages: int) -> None:
        """See :class:`Policy`."""
        self._frequency = np.zeros(max_pages + 1, np.uint8)
        self._priority = np.zeros(max_pages + 1, np.int64)

    def created(self, rows: Rows, stamps: Stamps, uses: NDArray[np.int64]) -> None:
        """See :class:`Policy`."""
        self._rate(rows, stamps, uses)

    def touched(self, rows: Rows, stamps: Stamps) -> None:
        """See :class:`Policy`."""
        self._rate(rows, stamps, self._frequency.take(rows).astype(np.int64) + 1)

    def _rate(self, rows: Rows, stamps: Stamps, uses: NDArray[np.int64]) -> None:
        """Set the priorities of pages used now, so often in all."""
        if not rows.size:
            return
        uses = np.minimum(uses, self._max_frequency)
        self._frequency[rows] = uses
        newest = int(stamps.max()) - self._recency_base
        full = self.age + self._max_frequency > self._max_level
        if full or newest >> self._recency_bits:
            self._renumber(int(stamps.min()))
        recency = stamps - self._recency_base
        self._priority[rows] = ((self.age + uses) << self._recency_bits) | recency

    def evicted(self, rows: Rows) -> None:
        """See :class:`Policy`."""
        if rows.size:
            levels = self._priority.take(rows) >> self._recency_bits
            self.age = max(self.age, int(levels.max()))

    def priority(self, rows: Rows, stamps: Stamps) -> NDArray[np.int64]:
        """See :class:`Policy`."""
        return self._priority.take(rows)

    def _renumber(self, first_stamp: int) -> None:
        """Count levels from the present age, and recency from the order of all pages."""
        order = np.argsort(self._priority, kind="stable")
        levels = np.maximum((self._priority >> self._recency_bits) - self.age, 0)
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        self._priority = (levels << self._recency_bits) | rank
        self._recency_base = first_stamp - order.size
        self.age = 0
        self.generation += 1


_POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "ageing": AgeingFrequency}


def make_policy(name: str) -> Policy:
    """Return a new policy by name: ``"lru"`` or ``"ageing"``.

    Raises:
        InvalidInputError: an unknown name.
    """
    try:
        return _POLICIES[name]()
    except KeyError:
        raise InvalidInputError(
            f"policy: {name!r} is unknown; choose one of {sorted(_POLICIES)}"
        ) from None
