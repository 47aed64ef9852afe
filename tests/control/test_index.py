"""What the prefix index promises, case by case."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_model import NO_PARENT, enter, evict, find, insert_named, keys_of, name_key, parent_name

from tierkv.control_plane.index import PAGE_TAIL, UNKNOWN_GROUP, PrefixIndex
from tierkv.control_plane.policies import EvictionClass
from tierkv.errors import InvalidInputError
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
PATH = ["a", "a/b", "a/b/c", "a/b/c/d"]


@pytest.fixture
def index():
    index = PrefixIndex(100)
    yield index
    index.check()


# --- entering and finding ---


def test_a_page_is_found_once_a_tier_holds_it(index):
    rows = insert_named(index, PATH)
    assert (find(index, *PATH) == -1).all()
    index.set_resident(rows, HOST, [5, 6, 7, 8])
    assert find(index, *PATH, "other").tolist() == [*rows.tolist(), -1]
    assert index.slot(rows, HOST).tolist() == [5, 6, 7, 8]
    assert index.slot(rows, DEVICE).tolist() == [-1] * 4
    assert index.residency(rows).tolist() == [1 << HOST] * 4


def test_find_within_some_tiers_only(index):
    on_disk, in_host = enter(index, ["a"], DISK)[0], enter(index, ["a/b"], HOST)[0]
    assert find(index, "a", "a/b").tolist() == [on_disk, in_host]
    keys = key_array(keys_of("a", "a/b"))
    assert index.find(keys, within=1 << HOST | 1 << DEVICE).tolist() == [-1, in_host]


@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_many_and_few_keys_are_found_alike(index, count):
    rows = enter(index, [f"page {i}" for i in range(60)])
    asked = [f"page {i}" for i in range(0, 2 * count, 2)]
    expected = [rows[i] if i < 60 else -1 for i in range(0, 2 * count, 2)]
    assert find(index, *asked).tolist() == expected


def test_no_keys_are_no_rows(index):
    assert find(index).size == 0
    assert insert_named(index, []).size == 0
    index.touch([])
    index.pin([], HOST)


def test_inserting_again_changes_nothing(index):
    rows = enter(index, PATH)
    index.touch(rows)
    assert insert_named(index, PATH).tolist() == rows.tolist()
    assert index.hits(rows).tolist() == [1] * 4
    assert index.stats().rows == 4


def test_a_key_named_twice_in_one_call_is_one_page(index):
    rows = enter(index, ["a"])
    again = insert_named(index, ["b", "a", "b", "b/c", "b/c"])
    assert again[0] == again[2]
    assert again[1] == rows[0]
    assert again[3] == again[4]
    assert index.stats().rows == 3
    index.set_resident(np.unique(again), HOST)


@settings(deadline=None, max_examples=60)
@given(st.permutations([*PATH, "a/x", "a/x/y", "z"]), st.lists(st.integers(0, 7), max_size=3))
def test_the_order_of_insertion_does_not_matter(names, cuts):
    index = PrefixIndex(20)
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 7], strict=True):
        enter(index, names[start:stop], DISK)
    index.check()
    for name in names:
        row = int(find(index, name)[0])
        assert index.parent_key(row) == name_key(parent_name(name))
        assert index.children(row) == sum(parent_name(n) == name for n in names)
    assert index.evictable_count(DISK) == 3


def test_a_page_without_a_parent(index):
    row = int(enter(index, ["a"])[0])
    assert index.parent(row) == -1
    assert index.parent_key(row) == NO_PARENT


def test_columns_tell_what_was_entered(index):
    rows = index.insert(
        key_array(keys_of("a", "a/b")),
        key_array([name_key("root"), name_key("a")]),
        group=np.array([0, 2]),
        end_tokens=np.array([640, 700]),
        num_tokens=np.array([640, 60]),
        flags=np.array([0, PAGE_TAIL]),
        now=1234,
    )
    index.set_resident(rows, HOST)
    assert index.group(rows).tolist() == [0, 2]
    assert index.end_token(rows).tolist() == [640, 700]
    assert index.num_tokens(rows).tolist() == [640, 60]
    assert index.flags(rows).tolist() == [0, PAGE_TAIL]
    assert index.used_s(rows).tolist() == [1234] * 2
    assert index.keys(rows).tobytes() == b"".join(keys_of("a", "a/b"))
    root = index.parent(int(rows[0]))
    assert index.group([root])[0] == UNKNOWN_GROUP
    assert index.path(int(rows[1])).tolist() == rows.tolist()


# --- use ---


def test_ends_are_used_before_beginnings(index):
    rows = enter(index, ["a", "b", "c"])
    index.touch(rows, now=77)
    assert evict(index, HOST, 3) == keys_of("c", "b", "a")
    assert index.used_s(rows[:1])[0] == 77


def test_a_used_page_outlives_the_others(index):
    rows = enter(index, ["a", "b", "c"])
    index.touch(rows[2:])
    assert evict(index, HOST, 2) == keys_of("b", "a")


def test_a_dead_page_that_is_used_comes_back_to_life(index):
    rows = enter(index, ["a", "b", "c"])
    index.set_class(rows[:2], EvictionClass.DEAD)
    index.touch(rows[:1])
    assert index.eviction_class(rows).tolist() == [1, 0, 1]
    assert evict(index, HOST, 3) == keys_of("b", "c", "a")


def test_the_class_outranks_the_policy(index):
    rows = enter(index, ["a", "b", "c", "d"])
    index.touch(rows)
    index.set_class(rows[3:], EvictionClass.PROTECTED)
    index.set_class(rows[:1], EvictionClass.DEAD)
    assert evict(index, HOST, 4) == keys_of("a", "c", "b", "d")


def test_use_is_restored_in_the_order_of_time_and_depth(index):
    rows = enter(index, ["a", "b", "b/c", "d"], DISK)
    used = np.array([50, 20, 20, 90])
    index.restore_usage(rows, hits=np.array([3, 1, 4, 1]), used_s=used)
    assert index.hits(rows).tolist() == [3, 1, 4, 1]
    assert index.used_s(rows).tolist() == used.tolist()
    assert evict(index, DISK, 4) == keys_of("b/c", "b", "a", "d")


# --- victims and pins ---


def test_leaves_go_first_and_bare_parents_follow_in_one_call(index):
    rows = enter(index, PATH)
    index.touch(rows[::-1])  # the leaf last used of all, and still the first to go
    assert evict(index, HOST, 3) == keys_of("a/b/c/d", "a/b/c", "a/b")
    assert index.resident_count(HOST) == 1


def test_a_parent_waits_for_all_its_children(index):
    enter(index, ["a", "a/b", "a/c"])
    assert evict(index, HOST, 1) == keys_of("a/c")
    assert evict(index, HOST, 9) == keys_of("a/b", "a")


def test_children_in_another_tier_do_not_hold_a_page(index):
    rows = enter(index, ["a", "a/b"], DISK)
    index.set_resident(rows[:1], HOST)
    assert index.victims(HOST, 5).tolist() == [rows[0]]
    index.unpin(rows[:1], HOST)


def test_victims_are_pinned_and_can_be_put_back(index):
    rows = enter(index, PATH)
    first = index.victims(HOST, 2)
    assert index.pins(first, HOST).tolist() == [1, 1]
    assert index.victims(HOST, 2).size == 0, "their parent still has them as children"
    index.unpin(first, HOST)
    assert index.victims(HOST, 4).tolist() == rows[::-1].tolist()
    index.unpin(rows, HOST)


def test_a_pinned_page_and_those_above_it_stay(index):
    rows = enter(index, [*PATH, "x"])
    index.pin(rows[1:2], HOST)
    assert evict(index, HOST, 9) == keys_of("x", "a/b/c/d", "a/b/c")
    assert index.pinned_count(HOST) == 1
    index.unpin(rows[1:2], HOST)
    assert evict(index, HOST, 9) == keys_of("a/b", "a")


def test_a_pin_holds_one_copy(index):
    rows = enter(index, ["a"])
    index.set_resident(rows, DEVICE)
    index.pin(rows, HOST)
    assert evict(index, DEVICE, 1) == keys_of("a")
    assert evict(index, HOST, 1) == []
    index.unpin(rows, HOST)


def test_pins_are_counted(index):
    rows = enter(index, ["a"])
    index.pin(rows, HOST)
    index.pin(rows, HOST)
    index.unpin(rows, HOST)
    assert index.victims(HOST, 1).size == 0
    index.unpin(rows, HOST)
    with pytest.raises(AssertionError, match="not pinned"):
        index.unpin(rows, HOST)
    with pytest.raises(AssertionError, match="not pinned"):
        index.unpin(rows, DEVICE)


@pytest.mark.parametrize("rows", [[0, 0], [-1]])
def test_rows_must_be_pages_and_distinct(index, rows):
    enter(index, ["a"])
    for change in (
        lambda: index.pin(rows, HOST),
        lambda: index.set_resident(rows, DEVICE),
        lambda: index.clear_resident(rows, HOST),
        lambda: index.set_class(rows, EvictionClass.DEAD),
    ):
        with pytest.raises(AssertionError, match="row"):
            change()


# --- capacity and counts ---


def test_what_finds_no_room_gets_no_row():
    index = PrefixIndex(3)
    rows = insert_named(index, ["a", "a/b", "c/d", "e", "a"])
    assert rows.tolist() == [0, 1, -1, 2, 0]
    index.set_resident(np.unique(rows[rows >= 0]), HOST)
    index.check()
    assert insert_named(index, ["a/b", "x", "a/b/y"]).tolist() == [1, -1, -1]
    evict(index, HOST, 3)
    assert (enter(index, ["c/d", "x"]) >= 0).all()
    index.check()


def test_rows_are_used_again(index):
    for turn in range(30):
        enter(index, [f"{turn}", f"{turn}/x", f"{turn}/x/y"])
        assert evict(index, HOST, 3)
    assert index.stats().rows == 0
    assert max(enter(index, PATH)) < 3 + len(PATH)


def test_select_picks_by_tiers(index):
    rows = enter(index, PATH, DISK)
    index.set_resident(rows[1:3], HOST)
    index.set_resident(rows[2:3], DEVICE)
    index.clear_resident(rows[1:2], DISK)
    assert index.select().tolist() == rows.tolist()
    assert index.select(within=[HOST, DEVICE], without=[DISK]).tolist() == [rows[1]]
    assert index.select(within=[DEVICE]).tolist() == [rows[2]]


def test_stats_count_by_tier(index):
    rows = enter(index, PATH)
    index.set_resident(rows[:2], DEVICE)
    index.pin(rows[1:2], DEVICE)
    stats = index.stats()
    assert (stats.max_pages, stats.rows, stats.pages) == (100, 4, 4)
    assert (stats.resident[DEVICE], stats.resident[HOST]) == (2, 4)
    assert (stats.pinned[DEVICE], stats.pinned[HOST]) == (1, 0)
    assert stats.evictable == {DEVICE: 0, HOST: 1, DISK: 0}
    assert index.evictable_count(HOST) == 1
    index.unpin(rows[1:2], DEVICE)


@pytest.mark.parametrize("max_pages", [0, -1, 2**31])
def test_an_impossible_size_is_refused(max_pages):
    with pytest.raises(InvalidInputError, match="max_pages"):
        PrefixIndex(max_pages)


def test_check_names_what_is_broken():
    index = PrefixIndex(10)
    enter(index, PATH)
    index._columns.children[0] += 1
    with pytest.raises(AssertionError, match="children count"):
        index.check()


def test_check_finds_a_cycle():
    index = PrefixIndex(10)
    rows = enter(index, ["a", "b"])
    columns = index._columns
    columns.parent[rows] = rows[::-1]
    columns.children[rows] = columns.branches[rows] = columns.kids[HOST][rows] = 1
    columns.flags[rows] |= 0x80
    with pytest.raises(AssertionError, match="cycle"):
        index.check()


def test_a_long_path_is_checked_quickly():
    index = PrefixIndex(70_000)
    enter(index, [f"page {i}" for i in range(3)])
    keys = np.random.default_rng(0).integers(1, 2**63, (60_000, 4), np.uint64).view(np.uint8)
    parents = np.zeros_like(keys)
    parents[1:] = keys[:-1]
    rows = index.insert(keys, parents, group=0, end_tokens=1, num_tokens=1)
    index.set_resident(rows, DISK)
    index.check()
    assert index.path(int(rows[-1])).tolist() == rows.tolist()
    assert index.victims(DISK, 1000).tolist() == rows[:-1001:-1].tolist()
