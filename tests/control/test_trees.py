"""Parents, children, ghosts and tails of the prefix index, case by case."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_model import enter, evict, find, insert_named, keys_of, name_key

from tierkv.control_plane.index import PAGE_TAIL, PrefixIndex
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PATH = ["a", "a/b", "a/b/c", "a/b/c/d"]


@pytest.fixture
def index():
    index = PrefixIndex(100)
    yield index
    index.check()


# --- ghosts ---


def test_an_unknown_parent_is_a_ghost_and_becomes_a_page(index):
    enter(index, ["a/b"])
    assert find(index, "a")[0] == -1
    assert index.stats().rows == 2
    assert index.pages == 1
    row = int(enter(index, ["a"])[0])
    assert index.children(row) == 1
    assert evict(index, HOST, 2) == keys_of("a/b", "a")
    assert index.stats().rows == 0


def test_a_page_that_left_keeps_its_childrens_place(index):
    rows = enter(index, PATH)
    index.clear_resident(rows[:2], HOST)
    assert find(index, *PATH).tolist() == [-1, -1, *rows[2:].tolist()]
    assert index.path(int(rows[3])).tolist() == rows.tolist()
    index.clear_resident(rows[2:], HOST)
    assert index.stats().rows == 0


def test_a_pinned_page_without_residency_stays_until_it_is_unpinned(index):
    rows = insert_named(index, PATH[:2])
    index.pin(rows, DEVICE)
    assert index.stats().rows == 2
    index.unpin(rows, DEVICE)
    assert index.stats().rows == 0
    assert (index.lookup(key_array(keys_of(*PATH))) == -1).all()


# --- trees ---


def test_the_unshared_path_ends_at_a_branch(index):
    enter(index, [*PATH, "a/x"])
    leaf = int(find(index, "a/b/c/d")[0])
    assert index.keys(index.unshared_path(leaf)).tobytes() == b"".join(keys_of(*PATH[:0:-1]))


def test_pages_of_other_groups_below_a_page_do_not_share_it(index):
    rows = enter(index, ["a", "a/b"])
    enter(index, ["a/window 1", "a/window 2", "a/b/window 3"], group=1)
    assert index.unshared_path(int(rows[1])).tolist() == rows[::-1].tolist()
    assert index.children(int(rows[0])) == 3
    assert evict(index, HOST, 1) != keys_of("a")


def test_tails_are_found_below_their_parent_key(index):
    enter(index, ["root/a"])
    for name, tokens in [("root/t", 1), ("root/a/t", 2), ("root/a/u", 2), ("root/a/v", 3)]:
        enter(index, [name], flags=PAGE_TAIL, num_tokens=tokens)

    def tails(name):
        return {index.key(row) for row in index.tails(name_key(name))}

    assert tails("root") == set(keys_of("root/t"))
    assert tails("root/a") == set(keys_of("root/a/t", "root/a/u", "root/a/v"))
    assert tails("unknown") == set()
    parents = index.lookup(key_array(keys_of("root", "root/a", "unknown")))
    assert sorted(index.tail_ends(parents)) == [(0, 0, 1), (1, 0, 2), (1, 0, 3)]
    assert index.tail_ends([]) == []
    index.clear_resident(find(index, "root/a/t"), HOST)
    assert tails("root/a") == set(keys_of("root/a/u", "root/a/v"))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=40))
def test_tail_lists_equal_a_set(steps):
    index, there = PrefixIndex(40), set()
    for add, number in steps:
        name = f"root/tail {number}"
        if add and number not in there:
            there.add(number)
            enter(index, [name], flags=PAGE_TAIL, num_tokens=number % 4 + 1)
        elif not add and number in there:
            there.discard(number)
            index.clear_resident(find(index, name), HOST)
        index.check()
        listed = {index.key(row) for row in index.tails(name_key("root"))}
        assert listed == {name_key(f"root/tail {n}") for n in there}
        root = index.lookup(key_array(keys_of("root")))
        lengths = [tokens for _, _, tokens in index.tail_ends(root)]
        assert sorted(lengths) == sorted({n % 4 + 1 for n in there})
