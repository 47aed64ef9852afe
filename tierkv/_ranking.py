"""Which pages of a tier may be evicted, and in which order.

Joins the index's columns with each tier's policy and queue: a row is queued exactly while
it is evictable, under an urgency made of its eviction class and its policy's priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tierkv._columns import Columns
from tierkv._queue import EvictionQueue
from tierkv.policies import PRIORITY_BITS, Policy
from tierkv.tiers import Tier

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
        stamps = self._columns.stamp.take(rows)
        for policy in self._policies.values():
            policy.created(rows, stamps)
        self._follow_generations()

    def touched(self, rows: NDArray[np.integer], stamps: NDArray[np.int64]) -> None:
        """Tell the policies of pages that were used, and reorder those that are queued."""
        for policy in self._policies.values():
            policy.touched(rows, stamps)
        self._follow_generations()
        self.requeue(rows)

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

    def requeue(self, rows: NDArray[np.integer]) -> None:
        """Reorder those rows that are queued, after their class or priority changed."""
        for tier, queue in self.queues.items():
            queued = rows[queue.urgency(rows).nonzero()[0]]
            if queued.size:
                queue.set_many(queued, self._urgencies(queued, tier))

    def dequeue(self, rows: NDArray[np.integer], tier: Tier) -> None:
        """Take rows out of a tier's queue; rows may repeat."""
        queue = self.queues.get(tier)
        if queue is None:
            return
        queued = rows[queue.urgency(rows).nonzero()[0]]
        if queued.size > 1:
            queued = np.unique(queued)
        queue.set_many(queued, np.zeros(queued.size, np.int64))

    def refresh(self, rows: NDArray[np.integer], tier: Tier) -> None:
        """Queue those rows that have become evictable; rows may repeat."""
        queue = self.queues.get(tier)
        if queue is None or not rows.size:
            return
        evictable = rows[self.evictable(rows, tier)]
        if evictable.size > 1:
            evictable = np.unique(evictable)
        queue.set_many(evictable, self._urgencies(evictable, tier))

    def evictable(self, rows: NDArray[np.integer], tier: Tier) -> NDArray[np.bool_]:
        """Return which rows are resident and unpinned in a tier, with no child there."""
        columns = self._columns
        held: NDArray[np.bool_] = (columns.residency.take(rows) & (1 << tier)) != 0
        held &= columns.tier_pins[tier].take(rows) == 0
        held &= columns.kids[tier].take(rows) == 0
        return held

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
                queued = self.queues[tier].queued()
                self.queues[tier].set_many(queued, self._urgencies(queued, tier))

    def check(self, used: NDArray[np.integer]) -> None:
        """Assert that exactly the evictable rows are queued, under their urgencies."""
        for tier, queue in self.queues.items():
            queue.check()
            expected = used[self.evictable(used, tier)]
            assert np.array_equal(queue.queued(), expected), (
                f"{tier.label}: the queued rows are not the evictable ones"
            )
            urgencies = self._urgencies(expected, tier)
            assert np.array_equal(queue.urgency(expected), urgencies), (
                f"{tier.label}: a row is queued under an old urgency"
            )
            assert np.unique(urgencies).size == urgencies.size, (
                f"{tier.label}: two rows have the same priority"
            )
