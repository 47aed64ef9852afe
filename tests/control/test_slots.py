"""The slot allocator against a plain set of free slots."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.control_plane.slots import SlotAllocator
from tierkv.errors import InvalidInputError


def runs(slots):
    """Return the number of runs of adjacent slots, in the order given."""
    return 1 + sum(b != a + 1 for a, b in pairwise(slots)) if slots else 0


def test_allocates_one_extent_where_it_can():
    slots = SlotAllocator(100)
    assert slots.alloc(10).tolist() == list(range(10))
    slots.check()
    assert slots.free_count == 90


def test_continues_after_near_when_there_is_room():
    slots = SlotAllocator(100)
    first = slots.alloc(10)
    gap = slots.alloc(10)
    slots.alloc(5)
    slots.free(gap)
    assert slots.alloc(4, near=int(first[-1])).tolist() == [10, 11, 12, 13]
    assert slots.alloc(3, near=99).size == 3, "nothing follows the last slot"


def test_takes_the_smallest_extent_that_fits():
    slots = SlotAllocator(30)
    slots.alloc(30)
    slots.free(range(2, 10))
    slots.free(range(12, 16))
    assert slots.alloc(3).tolist() == [12, 13, 14]


def test_takes_the_fewest_extents_when_none_fits():
    slots = SlotAllocator(30)
    slots.alloc(30)
    slots.free([0, 1, 2, 5, 8, 9, 10, 11, 15])
    taken = slots.alloc(8).tolist()
    assert taken[:7] == [8, 9, 10, 11, 0, 1, 2]
    assert runs(taken) == 3
    slots.check()


def test_refuses_what_is_not_there_and_changes_nothing():
    slots = SlotAllocator(4)
    slots.alloc(3)
    assert slots.alloc(2) is None
    assert slots.free_count == 1
    assert slots.alloc(0).size == 0
    slots.check()


def test_double_free_is_a_bug():
    slots = SlotAllocator(4)
    taken = slots.alloc(2)
    slots.free(taken)
    for wrong in ([0], [3], [4], [-1]):
        with pytest.raises(AssertionError, match="free"):
            slots.free(wrong)
    slots.alloc(4)
    with pytest.raises(AssertionError, match="twice"):
        slots.free([1, 1])
    slots.check()


def test_negative_capacity_is_refused_and_zero_works():
    with pytest.raises(InvalidInputError, match="capacity"):
        SlotAllocator(-1)
    empty = SlotAllocator(0)
    assert empty.alloc(1) is None
    assert empty.stats().fragmentation == 0.0
    empty.check()


def test_stats_tell_the_fragmentation():
    slots = SlotAllocator(10)
    slots.alloc(10)
    slots.free([0, 2, 3, 4])
    stats = slots.stats()
    assert (stats.free, stats.extents, stats.largest_extent) == (4, 2, 3)
    assert stats.fragmentation == 0.25


def test_a_million_slots_in_single_extents():
    slots = SlotAllocator(1_000_000)
    slots.alloc(1_000_000)
    slots.free(np.arange(0, 200_000, 2))
    assert runs(slots.alloc(1000).tolist()) == 1000
    slots.check()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equals_a_set_of_free_slots(data):
    capacity = data.draw(st.integers(1, 40))
    slots, free = SlotAllocator(capacity), set(range(capacity))
    taken = []
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, capacity))
            near = data.draw(st.none() | st.integers(0, capacity - 1))
            got = slots.alloc(count, near=near)
            assert (got is None) == (count > len(free))
            if got is not None:
                chosen = got.tolist()
                assert len(set(chosen)) == count
                assert free.issuperset(chosen)
                fits = any(set(range(s, s + count)) <= free for s in free)
                assert not (fits and count) or runs(chosen) == 1
                free -= set(chosen)
                taken += chosen
        elif taken:
            back = data.draw(st.lists(st.sampled_from(taken), unique=True, min_size=1))
            slots.free(back)
            free |= set(back)
            taken = [slot for slot in taken if slot not in back]
        slots.check()
        assert slots.free_count == len(free)
