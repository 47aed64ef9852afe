"""Which pages of a tier may be evicted, and in which order.

Joins the index's columns with each tier's policy and queue: a row is queued exactly while
it is evictable, under an urgency made of its eviction class and its policy's priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._columns import Columns
from tierkv.control_plane._queue import EvictionQueue
from tierkv.control_plane.policies import PRIORITY_BITS, EvictionClass, Policy
from tierkv.tiers import Tier

# Marks of a row: bit 1 << tier while it is queued there, and whether its class is DEAD.
_QUEUED = np.uint8(sum(1 << tier for tier in Tier))
_DEAD = 0x80

_FEW = 8  # up to here plain integers are quicker than arrays

# Urgency = _LAST - (class, priority): positive, and the lowest class is the most urgent.
_LAST = 3 << PRIORITY_BITS


class Ranking:
    """The eviction queues of all tiers that have a policy."""

    def __init__(self, columns: Columns, policies: Mapping[Tier, Policy], max_rows: int) -> None:
        self._columns = columns
        self._policies = dict(sorted(policies.items()))
        self.queues = {tier: EvictionQueue(max_rows) for tier in self._policies}
        self._generations = {tier: p.generation for tier, p in self._policies.items()}
        for policy in self._policies.values():
            policy.bind(max_rows)

    def created(self, rows: NDArray[np.integer]) -> None:
        """Tell the policies of rows that hold new pages."""
        stamps, uses = self._columns.stamp.take(rows), np.ones(rows.size, np.int64)
        for policy in self._policies.values():
            policy.created(rows, stamps, uses)
        self._follow_generations()

    def restored(self, rows: NDArray[np.integer]) -> None:
        """Tell the policies of pages whose use counts and stamps have been restored."""
        columns = self._columns
        stamps, uses = columns.stamp.take(rows), columns.hits.take(rows).astype(np.int64) + 1
        for policy in self._policies.values():
            policy.created(rows, stamps, uses)
        self._follow_generations()
        self._requeue(rows, columns.marks.take(rows))

    def touched(self, rows: NDArray[np.integer], stamps: NDArray[np.int64]) -> None:
        """Tell the policies of pages that were used; reorder and revive where need be."""
        for policy in self._policies.values():
            policy.touched(rows, stamps)
        self._follow_generations()
        marks = self._columns.marks.take(rows)
        marked = marks.nonzero()[0]  # of a path, mostly the leaf only
        if marked.size:
            rows, marks = rows[marked], marks[marked]
            dead = rows[(marks & _DEAD) != 0]
            if dead.size:
                self.set_class(dead, EvictionClass.NORMAL)
            self._requeue(rows, marks)

    def set_class(self, rows: NDArray[np.integer], eviction_class: EvictionClass) -> None:
        """Set the class of rows, and reorder those that are queued."""
        columns = self._columns
        columns.klass[rows] = eviction_class
        marks = columns.marks.take(rows) & _QUEUED
        self._requeue(rows, marks)
        if eviction_class is EvictionClass.DEAD:
            marks |= _DEAD
        columns.marks[rows] = marks

    def choose(self, tier: Tier, count: int) -> list[int]:
        """Take up to ``count`` rows out of a tier's queue, the most urgent first.

        A row whose resident children have all been chosen is a candidate as well.
        """
        queue, columns, bit = self.queues[tier], self._columns, 1 << tier
        kids, chosen = columns.kids[tier], list[int]()
        bare: list[tuple[int, int]] = []  # (-urgency, row): parents that lost all children
        gone: dict[int, int] = {}  # parent -> children chosen
        while len(chosen) < count:
            row, urgency = queue.top()
            if bare and -bare[0][0] > urgency:
                row = heapq.heappop(bare)[1]
            elif not urgency:
                break
            queue.set(row, 0)
            columns.marks[row] &= ~bit & 0xFF
            chosen.append(row)
            parent = int(columns.parent[row])
            if parent < 0:
                continue
            gone[parent] = gone.get(parent, 0) + 1
            held = columns.residency[parent] & bit and not columns.tier_pins[tier][parent]
            if held and kids[parent] == gone[parent]:
                above = self._urgencies(np.array([parent]), tier)
                heapq.heappush(bare, (-int(above[0]), parent))
        self._policies[tier].evicted(np.array(chosen, np.intp))
        return chosen

    def _requeue(self, rows: NDArray[np.integer], marks: NDArray[np.uint8]) -> None:
        """Reorder those rows that are queued, after their class or priority changed."""
        if rows.size == 1:  # the leaf of a path: without array arithmetic
            mark = int(marks[0])
            for tier in self.queues:
                if mark >> tier & 1:
                    self._enqueue(rows, tier)
            return
        for tier in self.queues:
            queued = rows[(marks & (1 << tier)).nonzero()[0]]
            if queued.size:
                self._enqueue(queued, tier)

    def dequeue(self, rows: NDArray[np.integer], tier: Tier) -> None:
        """Take rows out of a tier's queue; rows may repeat."""
        queue, columns, bit = self.queues.get(tier), self._columns, 1 << tier
        queued = rows[(columns.marks.take(rows) & bit).nonzero()[0]]
        if queue is None or not queued.size:
            return
        if queued.size > 1:
            queued = np.unique(queued)
        columns.marks[queued] ^= bit
        queue.set_many(queued, np.zeros(queued.size, np.int64))

    def refresh(self, rows: NDArray[np.integer], tier: Tier) -> None:
        """Queue those rows that have become evictable; rows may repeat."""
        if tier not in self.queues:
            return
        evictable = rows[self.evictable(rows, tier)]
        if not evictable.size:
            return
        if evictable.size > 1:
            evictable = np.unique(evictable)
        self._columns.marks[evictable] |= 1 << tier
        self._enqueue(evictable, tier)

    def evictable(self, rows: NDArray[np.integer], tier: Tier) -> NDArray[np.bool_]:
        """Return which rows are resident and unpinned in a tier, with no child there."""
        columns = self._columns
        held: NDArray[np.bool_] = (columns.residency.take(rows) & (1 << tier)) != 0
        held &= columns.tier_pins[tier].take(rows) == 0
        held &= columns.kids[tier].take(rows) == 0
        return held

    def _enqueue(self, rows: NDArray[np.integer], tier: Tier) -> None:
        """Enter rows into a tier's queue, or reorder them there."""
        queue, columns = self.queues[tier], self._columns
        if rows.size > _FEW:
            queue.set_many(rows, self._urgencies(rows, tier))
            return
        priorities = self._policies[tier].priority(rows, columns.stamp.take(rows)).tolist()
        classes = columns.klass.take(rows).tolist()
        for row, klass, priority in zip(rows.tolist(), classes, priorities, strict=True):
            queue.set(row, _LAST - (klass << PRIORITY_BITS) - priority)

    def _urgencies(self, rows: NDArray[np.integer], tier: Tier) -> NDArray[np.int64]:
        """Return the urgencies that rows have when queued."""
        columns = self._columns
        order = columns.klass.take(rows).astype(np.int64) << PRIORITY_BITS
        order += self._policies[tier].priority(rows, columns.stamp.take(rows))
        return _LAST - order

    def _follow_generations(self) -> None:
        """Queue everything anew where a policy has renumbered its priorities."""
        for tier, policy in self._policies.items():
            if self._generations[tier] != policy.generation:
                self._generations[tier] = policy.generation
                self._enqueue(self.queues[tier].queued(), tier)

    def check(self, used: NDArray[np.integer]) -> None:
        """Assert that exactly the evictable rows are queued, under their urgencies."""
        for tier, queue in self.queues.items():
            queue.check()
            expected = used[self.evictable(used, tier)]
            assert np.array_equal(queue.queued(), expected), (
                f"{tier.label}: the queued rows are not the evictable ones"
            )
            marked = used[(self._columns.marks[used] & (1 << tier)) != 0]
            assert np.array_equal(marked, expected), f"{tier.label}: a mark is wrong"
            urgencies = self._urgencies(expected, tier)
            assert np.array_equal(queue.urgency(expected), urgencies), (
                f"{tier.label}: a row is queued under an old urgency"
            )
            assert np.unique(urgencies).size == urgencies.size, (
                f"{tier.label}: two rows have the same priority"
            )
