"""Which lengths of tail pages hang below a page.

To find the longest tail that continues a sequence it is enough to know the *lengths* of
the tails below its last full page: the key of each length is then computed and looked
up.  So every parent has a list with one representative for each (group, length), and the
tails of equal length form a ring with their representative.  However many conversations
share a parent, a walk is no longer than a page has tokens.  All links are lazily mapped
int32 columns holding ``row + 1``, 0 for none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class TailLists:
    """Lists of tail rows by parent row and length."""

    def __init__(self, max_rows: int, group: memoryview, length: memoryview) -> None:
        """Create empty lists; ``group`` and ``length`` are the index's columns."""
        self._group = group
        self._length = length
        self._heads = np.zeros(max_rows + 1, np.int32)
        self._head = self._heads.data  # parent -> first representative
        # Representatives of one parent: a list.  Tails of one length: a list as well,
        # whose first member is the representative (the one without ``_elder``).
        self._next = np.zeros(max_rows + 1, np.int32).data
        self._previous = np.zeros(max_rows + 1, np.int32).data
        self._younger = np.zeros(max_rows + 1, np.int32).data
        self._elder = np.zeros(max_rows + 1, np.int32).data

    def has_any(self, parents: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which parent rows have tails (row -1 has none)."""
        result: NDArray[np.bool_] = self._heads.take(parents) != 0
        return result

    def representatives(self, parent: int) -> Iterator[int]:
        """Yield one tail row for each (group, length) below a parent."""
        entry = self._head[parent]
        while entry:
            yield entry - 1
            entry = self._next[entry - 1]

    def rows(self, parent: int) -> Iterator[int]:
        """Yield all tail rows below a parent."""
        for first in self.representatives(parent):
            entry = first + 1
            while entry:
                yield entry - 1
                entry = self._younger[entry - 1]

    def add(self, parent: int, row: int) -> None:
        """Enter a tail row below its parent."""
        kind = (self._group[row], self._length[row])
        for first in self.representatives(parent):
            if (self._group[first], self._length[first]) == kind:
                self._link(self._younger, self._elder, first + 1, row + 1, self._younger[first])
                return
        head = self._head[parent]
        self._link(self._next, self._previous, 0, row + 1, head)
        self._head[parent] = row + 1

    def remove(self, parent: int, row: int) -> None:
        """Take a tail row out."""
        elder, younger = self._elder[row], self._younger[row]
        self._unlink(self._younger, self._elder, row)
        if elder:
            return
        before, after = self._previous[row], self._next[row]
        self._unlink(self._next, self._previous, row)
        if younger:  # the next of this length stands in
            self._link(self._next, self._previous, before, younger, after)
            after = younger
        if not before:
            self._head[parent] = after

    @staticmethod
    def _link(forward: memoryview, back: memoryview, left: int, entry: int, right: int) -> None:
        """Put an entry between two neighbours (0 = none)."""
        forward[entry - 1], back[entry - 1] = right, left
        if left:
            forward[left - 1] = entry
        if right:
            back[right - 1] = entry

    @staticmethod
    def _unlink(forward: memoryview, back: memoryview, row: int) -> None:
        """Join the neighbours of a row."""
        left, right = back[row], forward[row]
        if left:
            forward[left - 1] = right
        if right:
            back[right - 1] = left
        forward[row] = back[row] = 0
