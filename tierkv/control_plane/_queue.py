"""An eviction queue: which of the evictable rows is the most urgent to evict.

A tournament tree over all rows: level 0 holds the urgency of each row (0 = not queued),
each level above the maximum of every 16 entries below.  Raising, lowering, adding and
removing a row touches one entry a level and stops where the maximum does not change, so
there are no stale entries to skip, nothing to compact and no pause that grows with the
number of pages.  Memory is mapped lazily: 8.5 bytes for each row in use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BITS = 4
_FAN = 1 << _BITS
# From this many rows on, numpy beats a loop.
_MANY = 24


class EvictionQueue:
    """Rows by urgency, the highest first; equal urgencies by the lowest row."""

    def __init__(self, max_rows: int) -> None:
        self._levels: list[NDArray[np.int64]] = []
        size = max_rows + 1  # index -1 must be an entry that is never queued
        while True:
            padded = -(-size // _FAN) * _FAN
            self._levels.append(np.zeros(padded, np.int64))
            size = padded // _FAN
            if size == 1:
                break
        self._views = [level.data for level in self._levels]
        self.count = 0

    def urgency(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the urgency of rows, 0 where a row is not queued."""
        return self._levels[0].take(rows)

    def top(self) -> tuple[int, int]:
        """Return the most urgent row and its urgency; the urgency is 0 when empty."""
        row, best = 0, max(self._views[-1])
        for view in reversed(self._views):
            start = row << _BITS
            row = start + view[start : start + _FAN].tolist().index(best)
        return row, best

    def set(self, row: int, urgency: int) -> None:
        """Queue a row, change its urgency, or remove it (urgency 0)."""
        below = self._views[0]
        old = below[row]
        if old == urgency:
            return
        self.count += (urgency != 0) - (old != 0)
        below[row] = urgency
        for above in self._views[1:]:
            row >>= _BITS
            best = above[row]
            if urgency > best:
                new = urgency
            elif old == best:
                start = row << _BITS
                new = max(below[start : start + _FAN])
                if new == best:
                    return
            else:
                return
            above[row] = new
            old, urgency, below = best, new, above

    def set_many(self, rows: NDArray[np.integer], urgencies: NDArray[np.int64]) -> None:
        """Set the urgency of several distinct rows."""
        if rows.size < _MANY:
            for row, urgency in zip(rows.tolist(), urgencies.tolist(), strict=True):
                self.set(row, urgency)
            return
        below = self._levels[0]
        self.count += int(np.count_nonzero(urgencies))
        self.count -= int(np.count_nonzero(below.take(rows)))
        below[rows] = urgencies
        nodes = np.unique(rows >> _BITS)
        for above in self._levels[1:]:
            best = below.reshape(-1, _FAN)[nodes].max(axis=1)
            changed = best != above[nodes]
            nodes = nodes[changed]
            if not nodes.size:
                return
            above[nodes] = best[changed]
            below, nodes = above, np.unique(nodes >> _BITS)

    def queued(self) -> NDArray[np.intp]:
        """Return all queued rows, ascending."""
        return np.flatnonzero(self._levels[0])

    def check(self) -> None:
        """Assert that every level holds the maxima of the one below, and the count."""
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            best = below.reshape(-1, _FAN).max(axis=1)
            assert (above[: best.size] == best).all(), "eviction queue: a maximum is wrong"
            assert not above[best.size :].any(), "eviction queue: the padding is not empty"
        queued = self.queued().size
        assert queued == self.count, f"eviction queue: {queued} rows queued, counted {self.count}"
