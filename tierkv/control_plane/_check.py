"""The invariants of a prefix index, checked against its raw columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._columns import BRANCH, LISTED, PAGE_TAIL, UNKNOWN_GROUP, Columns
from tierkv.control_plane._forest import Forest
from tierkv.control_plane._ranking import Ranking
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.index import IndexStats


def check_index(columns: Columns, forest: Forest, ranking: Ranking, stats: IndexStats) -> None:
    """Assert every invariant of an index; O(rows)."""
    used = forest.table.rows()
    forest.allocator.check(used)
    assert np.array_equal(forest.table.find(columns.keys[used]), used), (
        "key table: a row is not found by its key"
    )
    _check_unused(columns, used)
    _check_counts(columns, used, stats)
    _check_trees(columns, used)
    _check_tails(columns, forest, used)
    ranking.check(used)


def _check_unused(columns: Columns, used: NDArray[np.int32]) -> None:
    """Free rows, and the entry for "no row", must look untouched."""
    unused = np.ones(columns.parent.size, np.bool_)
    unused[used] = False
    for name in ("keys", "residency", "pins"):
        assert not getattr(columns, name)[unused].any(), f"a free row has {name}"
    unused[-1] = False  # counts of "no parent" land there
    for name in ("children", "branches"):
        assert not getattr(columns, name)[unused].any(), f"a free row has {name}"


def _check_counts(columns: Columns, used: NDArray[np.int32], stats: IndexStats) -> None:
    held = columns.residency[used]
    total = sum(pins[used] for pins in columns.tier_pins.values())
    assert np.array_equal(columns.pins[used], total), "the pins of a row do not add up"
    unknown = columns.group[used] == UNKNOWN_GROUP
    assert not held[unknown].any(), "a page is resident of which only the key is known"
    assert stats.pages == np.count_nonzero(held), "the count of pages is wrong"
    for tier in Tier:
        inside = (held & (1 << tier)) != 0
        assert stats.resident[tier] == inside.sum(), f"{tier.label}: resident count is wrong"
        pins = columns.tier_pins[tier][used]
        assert (pins >= 0).all(), f"{tier.label}: a row has a negative number of pins"
        pinned = np.count_nonzero(inside & (pins > 0))
        assert stats.pinned[tier] == pinned, f"{tier.label}: pinned count is wrong"
        if tier in columns.slots:
            slots = columns.slots[tier][used]
            assert not slots[~inside].any(), f"{tier.label}: a page not resident has a slot"
            taken = slots[slots > 0]
            assert np.unique(taken).size == taken.size, f"{tier.label}: two pages share a slot"


def _check_trees(columns: Columns, used: NDArray[np.int32]) -> None:
    parents = columns.parent[used]
    linked = parents >= 0
    assert np.isin(parents[linked], used).all(), "a parent is not a row in use"

    def children(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        count = np.bincount(parents[linked & mask], minlength=columns.parent.size)
        return count[used]

    anything = np.ones(used.size, np.bool_)
    assert np.array_equal(columns.children[used], children(anything)), "children count is wrong"
    branches = (columns.flags[used] & BRANCH) != 0
    assert np.array_equal(columns.branches[used], children(branches)), "branch count is wrong"
    for tier in Tier:
        inside = (columns.residency[used] & (1 << tier)) != 0
        assert np.array_equal(columns.kids[tier][used], children(inside)), (
            f"{tier.label}: count of resident children is wrong"
        )
    above = np.full(used.size + 1, -1)  # by position in ``used``; the last is "none"
    above[:-1][linked] = np.searchsorted(used, parents[linked])
    for _ in range(used.size.bit_length()):
        above = above[above]  # twice as many levels up; only a cycle has no end
    assert (above < 0).all(), "parents form a cycle"


def _check_tails(columns: Columns, forest: Forest, used: NDArray[np.int32]) -> None:
    flags, parents = columns.flags[used], columns.parent[used]
    tails = ((flags & PAGE_TAIL) != 0) & (parents >= 0)
    assert np.array_equal(tails, (flags & LISTED) != 0), "a tail page is not listed, or another is"
    for parent in np.unique(parents[tails]).tolist():
        listed = sorted(forest.tails.rows(parent))
        assert listed == used[tails & (parents == parent)].tolist(), "tail lists are wrong"
        kinds = [
            (columns.group[row], columns.num_tokens[row])
            for row in forest.tails.representatives(parent)
        ]
        assert len(set(kinds)) == len(kinds), "tail lists: a length is listed twice"
