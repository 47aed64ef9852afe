"""The prefix index's memory: one numpy column for each property, one entry a row.

Every column is allocated once, for as many rows as there can ever be, and mapped lazily:
a column (or the part of one) that is never written costs no memory.  Each has one entry
more than there are rows: index -1, "no row", reads and absorbs harmless values there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._table import KEY_WORDS
from tierkv.tiers import Tier

Rows: TypeAlias = NDArray[np.int32]
RowsLike: TypeAlias = NDArray[np.integer] | Sequence[int]

PAGE_TAIL = 1  # flag: the partial last page of a turn
UNKNOWN_GROUP = 255  # of a ghost of which only the key is known

# Marks in the flags column that are the index's own.
BRANCH = 0x80  # counted among the parent's branches
LISTED = 0x40  # entered in the parent's tail lists
PRIVATE_FLAGS = BRANCH | LISTED
PUBLIC_FLAGS = 0xFF ^ PRIVATE_FLAGS

SLOT_TIERS = (Tier.DEVICE, Tier.HOST)  # the disk tier keeps its own slots


class Columns:
    """The columns; see the comments for units and meaning of zero."""

    __slots__ = (
        "branches",
        "children",
        "end_token",
        "flags",
        "group",
        "hits",
        "keys",
        "kids",
        "klass",
        "marks",
        "num_tokens",
        "parent",
        "pins",
        "residency",
        "slots",
        "stamp",
        "tier_pins",
        "used_s",
    )

    def __init__(self, max_rows: int) -> None:
        size = max_rows + 1
        self.keys = np.zeros((size, KEY_WORDS), np.uint64)
        self.parent = np.zeros(size, np.int32)  # row, -1 for none
        self.group = np.zeros(size, np.uint8)  # UNKNOWN_GROUP: known as a parent only
        self.flags = np.zeros(size, np.uint8)  # public flags and the index's own marks
        self.residency = np.zeros(size, np.uint8)  # bit 1 << tier
        self.klass = np.zeros(size, np.uint8)  # EvictionClass
        self.marks = np.zeros(size, np.uint8)  # what a touch must look at; see Ranking
        self.end_token = np.zeros(size, np.uint32)
        self.num_tokens = np.zeros(size, np.uint32)
        self.pins = np.zeros(size, np.int32)  # in all tiers together
        self.tier_pins = {tier: np.zeros(size, np.int32) for tier in Tier}
        self.children = np.zeros(size, np.int32)  # all child rows, ghosts included
        self.branches = np.zeros(size, np.int32)  # child rows of the same group
        # Children resident in each tier.
        self.kids = {tier: np.zeros(size, np.int32) for tier in Tier}
        self.slots = {tier: np.zeros(size, np.int32) for tier in SLOT_TIERS}  # slot + 1
        self.hits = np.zeros(size, np.uint32)
        self.stamp = np.zeros(size, np.int64)  # order of last use, unique
        self.used_s = np.zeros(size, np.uint32)  # caller's clock at last use, seconds


class RowAllocator:
    """Hands out row numbers; freed ones first, so that memory stays compact."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._freed = np.zeros(max_rows, np.int32)
        self._num_freed = 0
        self._high = 0  # rows from here on have never been used

    @property
    def free_count(self) -> int:
        """Rows that can still be taken."""
        return self.max_rows - self._high + self._num_freed

    @property
    def high(self) -> int:
        """Rows below this one have been used at some time."""
        return self._high

    def take(self, count: int) -> Rows:
        """Return ``count`` free rows."""
        assert count <= self.free_count, "no free rows"
        reused = min(count, self._num_freed)
        low = self._num_freed - reused
        rows = self._freed[low : self._num_freed][::-1]
        self._num_freed = low
        fresh = count - reused
        if fresh:
            new = np.arange(self._high, self._high + fresh, dtype=np.int32)
            self._high += fresh
            return np.concatenate([rows, new]) if reused else new
        return rows.copy()

    def give_back(self, rows: Rows | list[int]) -> None:
        """Free rows."""
        count = len(rows)
        self._freed[self._num_freed : self._num_freed + count] = rows
        self._num_freed += count

    def check(self, used: Rows) -> None:
        """Assert that ``used`` (ascending) and the free rows are all rows, each once."""
        freed = self._freed[: self._num_freed]
        assert used.size + self.free_count == self.max_rows, (
            f"rows: {used.size} used + {self.free_count} free != {self.max_rows}"
        )
        together = np.sort(np.concatenate([used, freed]))
        assert (together == np.arange(self._high)).all(), "rows: one is both used and free, or lost"


def as_rows(rows: RowsLike) -> NDArray[np.intp]:
    """Return rows as a one-dimensional array of indices."""
    return np.asarray(rows, np.intp).reshape(-1)
