"""The prefix index: which pages are where, how they hang together, and who may go.

A page is a row; the rows form trees through the pages' parent keys.  Three words:

* *resident*: the page's bytes are in at least one tier.
* *ghost*: a row that is only known as somebody's parent, or whose page left every tier
  while children stayed.  It keeps the children's place and is never a hit.
* *evictable* in a tier: resident and not pinned there, and no child resident there.  So
  the end of a sequence leaves before its beginning.

The parent of a chain's first page is the chain's root key (``KeyChain.root``), which is
no page and becomes a ghost; all-zero parents mean none.  A page of a sliding or snapshot
group that is not the spec's anchor hangs below the anchor page (or tail) whose boundary
it serves, and is a child like any other.  Everything about the trees follows from
(key, parent, group, end_token, num_tokens, flags), so an index can be rebuilt from the
disk tier's records in any order.

Pins belong to a copy: a page pinned in the host tier, say as the source of a transfer, may
still leave the device.

Row numbers are valid while the page is resident or pinned.  The index does no I/O, starts
no thread and reads no clock; it is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._check import check_index
from tierkv.control_plane._columns import PAGE_TAIL, UNKNOWN_GROUP, Columns, Rows, RowsLike, as_rows
from tierkv.control_plane._forest import Forest
from tierkv.control_plane._ranking import Ranking
from tierkv.control_plane._reader import PageReader
from tierkv.control_plane._table import KEY_WORDS, Words
from tierkv.control_plane.policies import LRU, EvictionClass, Policy
from tierkv.errors import InvalidInputError
from tierkv.identity.keys import KeyArray
from tierkv.tiers import Tier

ANYWHERE = sum(1 << tier for tier in Tier)  # every tier, as bits

__all__ = [
    "ANYWHERE",
    "PAGE_TAIL",
    "UNKNOWN_GROUP",
    "IndexStats",
    "PrefixIndex",
    "Rows",
    "RowsLike",
]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Counts of an index.

    Attributes:
        max_pages: rows there can be.
        rows: rows in use, ghosts included.
        pages: rows with a residency.
        resident: pages by tier.
        pinned: pages pinned in a tier that holds them, by tier.
        evictable: evictable pages (leaves) by tier, for the tiers with a policy.
    """

    max_pages: int
    rows: int
    pages: int
    resident: dict[Tier, int]
    pinned: dict[Tier, int]
    evictable: dict[Tier, int]


class PrefixIndex(PageReader):
    """Pages by key, as trees, with residency, pins and eviction order for each tier."""

    def __init__(self, max_pages: int, policies: Mapping[Tier, Policy] | None = None) -> None:
        """Create an empty index.

        Args:
            max_pages: rows there can ever be, ghosts and chain roots included: the slots
                of all tiers plus a margin.
            policies: the policy of each tier that pages are evicted from, each its own
                instance; LRU for device, host and disk when None.

        Raises:
            InvalidInputError: ``max_pages`` not in [1, 2**31 - 2], or a policy shared by tiers.
        """
        if not 1 <= max_pages < 2**31 - 1:
            raise InvalidInputError(f"index: max_pages must lie in [1, 2**31 - 2], got {max_pages}")
        if policies is None:
            policies = {tier: LRU() for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)}
        if len({id(policy) for policy in policies.values()}) < len(policies):
            raise InvalidInputError("index: each tier needs a policy instance of its own")
        self.max_pages = max_pages
        self._columns = Columns(max_pages)
        self._ranking = Ranking(self._columns, policies, max_pages)
        self._forest = Forest(self._columns, self._ranking, max_pages)
        self._allocator = self._forest.allocator
        self._clock = 0  # stamps handed out
        self._pages = 0
        self._resident = dict.fromkeys(Tier, 0)
        self._pinned = dict.fromkeys(Tier, 0)

    def find(self, keys: KeyArray, *, within: int = ANYWHERE) -> Rows:
        """Return the rows of keys ``[n, 32]``; -1 where no tier holds the page.

        Args:
            keys: page keys.
            within: the tiers that count, as bits ``1 << tier``.
        """
        rows = self._forest.table.find(_words(keys))
        resident = self._columns.residency.take(rows)
        if within != ANYWHERE:
            resident &= within
        if np.count_nonzero(resident) < rows.size:  # row -1 reads no residency
            rows[resident == 0] = -1
        return rows

    def lookup(self, keys: KeyArray) -> Rows:
        """Return the rows of keys, ghosts included; -1 where a key is unknown."""
        return self._forest.table.find(_words(keys))

    def touch(self, rows: RowsLike, *, now: int = 0) -> None:
        """Record one use of a path's pages.

        The deepest page counts as used first, so that recency orders ends before
        beginnings.  A page of the DEAD class becomes NORMAL again.

        Args:
            rows: distinct rows in prefix order, the root first; pages that serve a
                boundary come after the anchor page they serve.
            now: caller's clock in seconds, kept for inspection; 0 leaves it as it is.
        """
        where = as_rows(rows)
        columns = self._columns
        stamps = self._new_stamps(where.size)
        columns.stamp[where] = stamps
        columns.hits[where] += 1
        if now:
            columns.used_s[where] = now
        self._ranking.touched(where, stamps)

    def restore_usage(
        self, rows: RowsLike, *, hits: NDArray[np.integer], used_s: NDArray[np.integer]
    ) -> None:
        """Set the use counts and last uses that were recorded before a restart.

        Orders the pages by ``used_s``, and pages used in the same second deepest first;
        all of them count as used later than every page of an earlier call, so restore all
        pages in one call.
        """
        where = as_rows(rows)
        columns = self._columns
        columns.hits[where] = hits
        columns.used_s[where] = used_s
        oldest_first = np.lexsort((-columns.end_token.take(where).astype(np.int64), used_s))
        where = where[oldest_first]
        columns.stamp[where] = self._new_stamps(where.size)[::-1]
        self._ranking.restored(where)

    def _new_stamps(self, count: int) -> NDArray[np.int64]:
        """Return new stamps, the newest first."""
        self._clock += count
        return np.arange(self._clock, self._clock - count, -1)

    def insert(
        self,
        keys: KeyArray,
        parents: KeyArray,
        *,
        group: int | NDArray[np.integer],
        end_tokens: int | NDArray[np.integer],
        num_tokens: int | NDArray[np.integer],
        flags: int | NDArray[np.integer] = 0,
        now: int = 0,
    ) -> Rows:
        """Enter pages by key and return their rows; nothing becomes resident by it.

        A page that is resident already is left as it is; a ghost is filled in.  Parents
        are resolved by key, within the call as well and in any order; unknown ones become
        ghosts.  A page keeps the first parent it was given.  Follow up with
        :meth:`set_resident` or :meth:`pin` (an unpinned page that never becomes resident
        is forgotten by :meth:`unpin`).

        Args:
            keys: page keys, ``[n, 32]``, in prefix order where they form a path.
            parents: parent keys, ``[n, 32]``; zeros for none.
            group: layer group, or one for each page.
            end_tokens: prefix length that each page completes.
            num_tokens: valid tokens in each page, at least 1.
            flags: ``PAGE_TAIL`` or 0.
            now: caller's clock in seconds, kept for inspection.

        Returns:
            Rows, -1 for pages that found no room (neither for them nor their parent).
        """
        words, parent_words = _words(keys), _words(parents)
        count = len(words)
        assert len(parent_words) == count, "insert: keys and parents differ in number"
        columns = (np.asarray(values) for values in (group, end_tokens, num_tokens, flags))
        group, ends, lengths, flags = (np.broadcast_to(values, count) for values in columns)
        assert count == 0 or 0 <= group.max() < UNKNOWN_GROUP, "insert: no such layer group"
        meta, stamps = (group, ends, lengths, flags), self._new_stamps(count)
        return self._forest.insert(words, parent_words, meta, stamps, now)

    def set_resident(self, rows: RowsLike, tier: Tier, slots: RowsLike | None = None) -> None:
        """Record that a tier holds these pages (distinct rows), in these slots."""
        where = _distinct(rows)
        columns, bit = self._columns, 1 << tier
        if slots is not None:
            columns.slots[tier][where] = np.asarray(slots) + 1
        before = columns.residency.take(where)
        absent = (before & bit) == 0
        new = where[absent]
        if not new.size:
            return
        columns.residency[new] |= bit
        self._pages += int(np.count_nonzero(before[absent] == 0))
        self._resident[tier] += new.size
        self._pinned[tier] += int(np.count_nonzero(columns.tier_pins[tier].take(new)))
        parents = columns.parent.take(new)
        np.add.at(columns.kids[tier], parents, 1)
        self._ranking.dequeue(parents, tier)
        self._ranking.refresh(new, tier)

    def clear_resident(self, rows: RowsLike, tier: Tier) -> None:
        """Record that a tier holds these pages (distinct rows) no longer.

        A page without residency, pins and children is forgotten, and so are ghosts above
        it that nothing needs any more.  The caller frees the slot: read it before.
        """
        where = _distinct(rows)
        columns, bit = self._columns, 1 << tier
        held = where[(columns.residency.take(where) & bit) != 0]
        if held.size:
            columns.residency[held] &= ~bit & 0xFF
            if tier in columns.slots:
                columns.slots[tier][held] = 0
            self._resident[tier] -= held.size
            self._pages -= int(np.count_nonzero(columns.residency.take(held) == 0))
            self._pinned[tier] -= int(np.count_nonzero(columns.tier_pins[tier].take(held)))
            self._ranking.dequeue(held, tier)
            parents = columns.parent.take(held)
            np.subtract.at(columns.kids[tier], parents, 1)
            self._ranking.refresh(parents[parents >= 0], tier)
        self._forest.forget(where)

    def pin(self, rows: RowsLike, tier: Tier) -> None:
        """Add a pin to the copies of these pages (distinct rows) in a tier.

        A pinned copy is no victim, and a pinned page is not forgotten.  The copy need not
        be there yet, so that a page on its way can be pinned.
        """
        where = _distinct(rows)
        pins = self._columns.tier_pins[tier]
        first = where[pins.take(where) == 0]
        pins[where] += 1
        self._columns.pins[where] += 1
        self._pinned[tier] += self._count_resident(first, tier)
        self._ranking.dequeue(first, tier)

    def unpin(self, rows: RowsLike, tier: Tier) -> None:
        """Take one pin off the copies of these pages (distinct rows) in a tier.

        A page without residency, pins and children is forgotten.
        """
        where = _distinct(rows)
        pins = self._columns.tier_pins[tier]
        assert where.size == 0 or pins.take(where).min() > 0, f"{tier.label}: page not pinned"
        pins[where] -= 1
        self._columns.pins[where] -= 1
        last = where[pins.take(where) == 0]
        self._pinned[tier] -= self._count_resident(last, tier)
        self._ranking.refresh(last, tier)
        self._forest.forget(last)

    def _count_resident(self, rows: NDArray[np.integer], tier: Tier) -> int:
        return int(np.count_nonzero(self._columns.residency.take(rows) & (1 << tier)))

    def set_class(self, rows: RowsLike, eviction_class: EvictionClass) -> None:
        """Set the eviction class of pages (distinct rows); it outranks every policy."""
        self._ranking.set_class(_distinct(rows), eviction_class)

    def victims(self, tier: Tier, count: int) -> Rows:
        """Choose up to ``count`` pages to evict from a tier and pin them there.

        The lowest class goes first, then the lowest priority; a page whose children are
        all chosen is a candidate within the same call.  To evict, clear the residency and
        unpin; to put a page back, just unpin.

        Returns:
            Rows in the order chosen, children before parents; fewer than ``count`` when
            no more are evictable.
        """
        rows = self._ranking.choose(tier, count)
        self.pin(rows, tier)
        return np.array(rows, np.int32)

    def path(self, row: int) -> Rows:
        """Return the pages from the root to ``row``; unknown parents are left out."""
        return self._forest.path(row)

    def unshared_path(self, row: int) -> Rows:
        """Return the pages from ``row`` up, the deepest first, that only it continues.

        A page is shared when two children of its own group hang below it.
        """
        return self._forest.unshared_path(row)

    def tails(self, parent_key: bytes) -> list[int]:
        """Return the resident tail pages below a page or a chain's root."""
        parent = int(self.lookup(np.frombuffer(parent_key, np.uint8).reshape(1, -1))[0])
        if parent < 0:
            return []
        return [row for row in self._forest.tails.rows(parent) if self._columns.residency[row]]

    def tail_ends(self, parents: RowsLike) -> list[tuple[int, int, int]]:
        """Return (position in ``parents``, group, num_tokens) of tails below these rows.

        Each length of a group below one row is named once.  Whether a tail of that length
        continues a given sequence, and is resident, the caller finds out by its key.
        """
        columns, rows = self._columns, as_rows(parents)
        return [
            (i, int(columns.group[row]), int(columns.num_tokens[row]))
            for i in self._forest.tails.has_any(rows).nonzero()[0].tolist()
            for row in self._forest.tails.representatives(int(rows[i]))
        ]

    @property
    def pages(self) -> int:
        """Pages held by at least one tier."""
        return self._pages

    def resident_count(self, tier: Tier) -> int:
        """Return how many pages a tier holds."""
        return self._resident[tier]

    def pinned_count(self, tier: Tier) -> int:
        """Return how many of a tier's pages are pinned."""
        return self._pinned[tier]

    def evictable_count(self, tier: Tier) -> int:
        """Return how many of a tier's pages could be evicted right now, leaves only."""
        return self._ranking.queues[tier].count

    def stats(self) -> IndexStats:
        """Return the counts."""
        return IndexStats(
            max_pages=self.max_pages,
            rows=self.max_pages - self._allocator.free_count,
            pages=self._pages,
            resident=dict(self._resident),
            pinned=dict(self._pinned),
            evictable={tier: queue.count for tier, queue in self._ranking.queues.items()},
        )

    def check(self) -> None:
        """Assert every invariant; visits every row."""
        check_index(self._columns, self._forest, self._ranking, self.stats())


def _distinct(rows: RowsLike) -> NDArray[np.intp]:
    """Return rows as an array; each must be a row, and named once."""
    where = as_rows(rows)
    named = set(where.tolist())
    assert len(named) == where.size, "a row is named twice"
    assert -1 not in named, "row -1 is no page"
    return where


def _words(keys: KeyArray) -> Words:
    """Return keys ``[n, 32]`` of bytes as ``[n, 4]`` of words, without a copy if possible."""
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_WORDS)
