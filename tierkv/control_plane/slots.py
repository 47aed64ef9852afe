"""Allocates the slots of a tier, in extents (runs of adjacent slots) where it can.

Free extents are known by both their ends, so that freed slots join their neighbours at
once, and by their exact size, so that the best fit is one bisection away.  The number of
different sizes is at most the square root of twice the capacity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class SlotStats:
    """State of an allocator.

    Attributes:
        capacity: slots in all.
        free: slots that can be allocated.
        extents: runs of adjacent free slots.
        largest_extent: slots in the largest one.
        fragmentation: share of the free slots outside the largest extent.
    """

    capacity: int
    free: int
    extents: int
    largest_extent: int
    fragmentation: float


class SlotAllocator:
    """Hands out slot numbers in [0, capacity).  Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        """Create an allocator with every slot free.

        Raises:
            InvalidInputError: a negative capacity.
        """
        if capacity < 0:
            raise InvalidInputError(f"slots: capacity must not be negative, got {capacity}")
        self.capacity = capacity
        self._is_free = np.ones(capacity, np.bool_)
        self._free_count = capacity
        # Length of the free extent that starts, or ends, at a slot; 0 = none does.
        self._length_at = np.zeros(capacity + 1, np.int32).data
        self._length_to = np.zeros(capacity + 1, np.int32).data  # by end, exclusive
        self._by_length: dict[int, dict[int, None]] = {}  # length -> starts
        self._lengths: list[int] = []  # keys of the above, ascending
        if capacity:
            self._add(0, capacity)

    @property
    def free_count(self) -> int:
        """Slots that can be allocated."""
        return self._free_count

    def alloc(self, count: int, *, near: int | None = None) -> NDArray[np.int32] | None:
        """Return ``count`` slots, or None (and nothing changed) when fewer are free.

        They form one extent if any is large enough: the one right after slot ``near`` if
        it is, else the smallest such one.  Otherwise they come from as few extents as
        possible, the largest first.
        """
        assert count >= 0, "alloc: a negative number of slots"
        if count > self._free_count:
            return None
        if near is not None and 0 < count <= self._length_at[min(near + 1, self.capacity)]:
            return self._cut(near + 1, count)
        parts: list[NDArray[np.int32]] = []
        rest = count
        while rest:
            fit = bisect_left(self._lengths, rest)
            length = self._lengths[min(fit, len(self._lengths) - 1)]
            start = next(reversed(self._by_length[length]))
            parts.append(self._cut(start, min(length, rest)))
            rest -= parts[-1].size
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def free(self, slots: Sequence[int] | NDArray[np.integer]) -> None:
        """Give slots back, in any order."""
        where = np.sort(np.asarray(slots, np.int64))
        if not where.size:
            return
        assert 0 <= where[0] <= where[-1] < self.capacity, "free: no such slot"
        gaps = np.diff(where)
        assert gaps.all(), "free: a slot is named twice"
        assert not self._is_free[where].any(), "free: a slot is free already"
        self._is_free[where] = True
        self._free_count += where.size
        starts = np.concatenate([[0], (gaps > 1).nonzero()[0] + 1])
        lengths = np.diff(np.append(starts, where.size))
        for start, length in zip(where[starts].tolist(), lengths.tolist(), strict=True):
            self._join(start, length)

    def _cut(self, start: int, count: int) -> NDArray[np.int32]:
        """Take the first slots of the free extent at ``start``."""
        length = self._length_at[start]
        self._drop(start, length)
        if count < length:
            self._add(start + count, length - count)
        self._is_free[start : start + count] = False
        self._free_count -= count
        return np.arange(start, start + count, dtype=np.int32)

    def _join(self, start: int, length: int) -> None:
        """Add a free extent, merged with those beside it."""
        before, after = self._length_to[start], self._length_at[start + length]
        if before:
            self._drop(start - before, before)
        if after:
            self._drop(start + length, after)
        self._add(start - before, before + length + after)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = self._length_to[start + length] = length
        starts = self._by_length.get(length)
        if starts is None:
            insort(self._lengths, length)
            starts = self._by_length[length] = {}
        starts[start] = None

    def _drop(self, start: int, length: int) -> None:
        self._length_at[start] = self._length_to[start + length] = 0
        starts = self._by_length[length]
        del starts[start]
        if not starts:
            del self._by_length[length]
            self._lengths.remove(length)

    def stats(self) -> SlotStats:
        """Return the state."""
        largest = self._lengths[-1] if self._lengths else 0
        return SlotStats(
            capacity=self.capacity,
            free=self._free_count,
            extents=sum(map(len, self._by_length.values())),
            largest_extent=largest,
            fragmentation=1 - largest / self._free_count if self._free_count else 0.0,
        )

    def check(self) -> None:
        """Assert that the extents are exactly the runs of free slots; O(capacity)."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self._is_free, [False]])))
        runs = {int(a): int(b - a) for a, b in edges.reshape(-1, 2)}
        known = {start: n for n, starts in self._by_length.items() for start in starts}
        assert known == runs, "slots: the free extents are not the runs of free slots"
        assert sum(runs.values()) == self._free_count, "slots: the count of free slots is wrong"
        assert self._lengths == sorted(self._by_length), "slots: the list of lengths is wrong"
        at = np.flatnonzero(np.asarray(self._length_at))
        assert {int(s): self._length_at[s] for s in at} == runs, "slots: a start is wrong"
        to = np.flatnonzero(np.asarray(self._length_to))
        ends = {start + length: length for start, length in runs.items()}
        assert {int(s): self._length_to[s] for s in to} == ends, "slots: an end is wrong"
