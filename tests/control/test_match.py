"""Matching against brute force over every length, and the cases by name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.control_plane.index import PAGE_TAIL, PrefixIndex
from tierkv.control_plane.match import match
from tierkv.identity.keys import KeyChain, key_array
from tierkv.identity.spec import CacheSpec, Component, GroupKind, LayerGroup, kv_components
from tierkv.tiers import Tier


def make_spec(*kinds):
    """Return a spec of (kind, page_tokens, window) groups."""
    groups = [
        LayerGroup(
            name=str(i),
            kind=GroupKind(kind),
            layers=(i,),
            components=kv_components(1, 4, value_dim=2)
            if kind == "latent"
            else (Component(name="state", heads=1, dim=4),),
            dtype="float32",
            page_tokens=size,
            window=window,
        )
        for i, (kind, size, window) in enumerate(kinds)
    ]
    return CacheSpec(groups=tuple(groups))


def make_chains(spec, tokens):
    chains = [
        KeyChain(bytes([g + 1]) * 32, group.page_tokens) for g, group in enumerate(spec.groups)
    ]
    for chain in chains:
        chain.extend(tokens)
    return chains


class Saved:
    """Pages of past turns in an index, and the set of their keys."""

    def __init__(self, spec):
        self.spec = spec
        self.index = PrefixIndex(2000)
        self.resident = {}  # key -> tiers

    def save_turn(self, tokens):
        """Enter every page of a turn, tails at its end, in all groups."""
        tokens = np.asarray(tokens, np.uint32)
        chains, end = make_chains(self.spec, tokens), len(tokens)
        anchor = chains[self.spec.anchor]
        boundary = anchor.tail(tokens) if end % anchor.page_tokens else anchor.parent(len(anchor))
        order = sorted(range(len(chains)), key=lambda g: g != self.spec.anchor)
        for g in order:
            chain, group = chains[g], self.spec.groups[g]
            own_tree = g == self.spec.anchor or group.kind.needs_every_page
            for page in range(len(chain)):
                parent = chain.parent(page) if own_tree else boundary
                self.enter(chain.key(page), parent, g, (page + 1) * chain.page_tokens, 0)
            if end % chain.page_tokens:
                parent = chain.parent(len(chain)) if own_tree else boundary
                self.enter(chain.tail(tokens), parent, g, end, PAGE_TAIL)

    def enter(self, key, parent, group, end, flags):
        size = self.spec.groups[group].page_tokens
        rows = self.index.insert(
            key_array([key]),
            key_array([parent]),
            group=group,
            end_tokens=end,
            num_tokens=end % size or size,
            flags=flags,
        )
        self.index.set_resident(rows, Tier.HOST)
        self.resident[key] = {Tier.HOST}

    def drop(self, key):
        rows = self.index.find(key_array([key]))
        self.index.clear_resident(rows, Tier.HOST)
        del self.resident[key]

    def move(self, key, tier):
        rows = self.index.find(key_array([key]))
        self.index.set_resident(rows, tier)
        self.index.clear_resident(rows, Tier.HOST)
        self.resident[key] = {tier}


def brute_force(saved, chains, tokens, limit, tiers):
    """Return the longest acceptable length by trying every one."""

    def there(key):
        return bool(saved.resident.get(key, set()) & tiers)

    def covers(chain, page, length):
        """Whether some page or tail holds the tokens from the page's start up to length."""
        if page < len(chain) and there(chain.key(page)):
            return True
        start = page * chain.page_tokens
        ends = range(length, min(start + chain.page_tokens, len(tokens) + 1))
        return any(there(chain.tail(tokens[:end])) for end in ends)

    def accepts(group, chain, length):
        if group.kind is GroupKind.SNAPSHOT:
            if length % group.page_tokens:
                return there(chain.tail(tokens[:length]))
            return there(chain.key(length // group.page_tokens - 1))
        *whole, last = group.needed_pages(length)
        return all(there(chain.key(page)) for page in whole) and covers(chain, last, length)

    for length in range(limit, 0, -1):
        if all(map(accepts, saved.spec.groups, chains, [length] * len(chains))):
            return length
    return 0


def check_rows(saved, chains, tokens, found):
    """Assert that the rows of a match are the right pages and cover its length."""
    for group, chain, part in zip(saved.spec.groups, chains, found.groups, strict=True):
        pages = group.needed_pages(found.tokens)
        assert len(part.rows) == len(pages)
        assert part.first_page == pages.start
        assert part.partial == (found.tokens % group.page_tokens != 0)
        for page, row in zip(pages, part.rows.tolist(), strict=True):
            key, end = saved.index.key(row), int(saved.index.end_token([row])[0])
            tail = saved.index.flags([row])[0] & PAGE_TAIL
            assert key == (chain.tail(tokens[:end]) if tail else chain.key(page))
            assert end >= min(found.tokens, (page + 1) * group.page_tokens)
            assert not tail or page == pages.stop - 1
            if group.kind is GroupKind.SNAPSHOT:
                assert end == found.tokens


sizes = st.integers(1, 5)
kinds = st.one_of(
    st.tuples(st.sampled_from(["full", "latent", "snapshot"]), sizes, st.none()),
    st.tuples(st.just("sliding"), sizes, st.integers(2, 9)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(kinds, min_size=1, max_size=3), st.data())
def test_equals_brute_force(groups, data):
    saved = Saved(make_spec(*groups))
    letters = st.lists(st.integers(0, 1), max_size=7)
    turns = []
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.sampled_from([[], *turns]))
        turns.append([*start, *data.draw(letters)])
        saved.save_turn(turns[-1])
    for key in list(saved.resident):
        fate = data.draw(st.sampled_from(["keep", "keep", "keep", "drop", "move"]))
        if fate == "drop":
            saved.drop(key)
        elif fate == "move":
            saved.move(key, Tier.DISK)
    saved.index.check()
    tokens = np.array([*data.draw(st.sampled_from(turns)), *data.draw(letters)], np.uint32)
    limit = data.draw(st.integers(0, len(tokens)))
    tiers = data.draw(st.sampled_from([set(Tier), {Tier.HOST}]))
    chains = make_chains(saved.spec, tokens)
    found = match(
        saved.index, saved.spec, chains, tokens, limit=limit, within=sum(1 << t for t in tiers)
    )
    assert found.tokens == brute_force(saved, chains, tokens, limit, tiers)
    check_rows(saved, chains, tokens, found)


FULL = ("full", 4, None)


def found_after(turns, tokens, *groups, limit=None, drop=()):
    saved = Saved(make_spec(*groups))
    for turn in turns:
        saved.save_turn(turn)
    for group, page in drop:
        saved.drop(make_chains(saved.spec, np.array(turns[-1], np.uint32))[group].key(page))
    tokens = np.array(tokens, np.uint32)
    chains = make_chains(saved.spec, tokens)
    found = match(
        saved.index, saved.spec, chains, tokens, limit=len(tokens) if limit is None else limit
    )
    check_rows(saved, chains, tokens, found)
    return found


def test_nothing_saved_matches_nothing():
    found = found_after([], range(10), FULL)
    assert found.tokens == 0
    assert found.groups[0].rows.size == 0
    assert not found.groups[0].partial


def test_an_empty_sequence_matches_nothing():
    assert found_after([range(8)], [], FULL, ("sliding", 2, 3)).tokens == 0


@pytest.mark.parametrize(("end", "expected"), [(7, 7), (8, 8), (9, 9), (3, 3)])
def test_a_turn_resumes_where_it_ended(end, expected):
    found = found_after([range(end)], range(20), FULL)
    assert found.tokens == expected
    assert found.groups[0].partial == (end % 4 != 0)


def test_the_longest_of_several_tails_is_taken():
    turns = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6, 7]]
    assert found_after(turns, range(20), FULL).tokens == 6


def test_a_page_is_cut_at_the_limit():
    found = found_after([range(8)], range(8), FULL, limit=7)
    assert found.tokens == 7
    assert found.groups[0].partial


def test_a_tail_is_cut_at_the_limit():
    found = found_after([range(7)], range(7), FULL, limit=6)
    assert found.tokens == 6
    assert found.groups[0].rows.size == 2


def test_a_hole_ends_the_prefix():
    assert found_after([range(16)], range(16), FULL, drop=[(0, 1)]).tokens == 4


def test_a_window_needs_only_its_pages():
    groups = (FULL, ("sliding", 2, 4))
    found = found_after([range(16)], range(20), *groups, drop=[(1, 0), (1, 3)])
    assert found.tokens == 16
    assert found.groups[1].first_page == 6


def test_a_window_with_a_hole_falls_back_to_a_shorter_length():
    groups = (FULL, ("sliding", 2, 4))
    found = found_after([range(16)], range(20), *groups, drop=[(1, 7), (1, 4)])
    assert found.tokens == 14
    found = found_after([range(16)], range(20), *groups, drop=[(1, 7), (1, 5)])
    assert found.tokens == 10


def test_a_snapshot_accepts_exactly_its_ends():
    groups = (FULL, ("snapshot", 8, None))
    assert found_after([range(14)], range(20), *groups).tokens == 14
    assert found_after([range(14)], range(20), *groups, limit=13).tokens == 8
    assert found_after([range(14)], range(14), *groups, limit=7).tokens == 0


def test_groups_of_different_kinds_agree_on_one_length():
    groups = (("latent", 3, None), ("sliding", 2, 5), ("snapshot", 4, None))
    found = found_after([range(12)], range(13), *groups, drop=[(0, 3)])
    assert found.tokens == 8


def test_a_spec_of_windows_only():
    found = found_after([range(16)], range(20), ("sliding", 4, 6), drop=[(0, 0), (0, 1)])
    assert found.tokens == 16
    assert found.groups[0].rows.size == 2


def test_many_tails_below_one_page_cost_one_try_for_each_length():
    turns = [[0, 1, 2, 3, *([9, i] if i % 2 else [i])] for i in range(10, 400)]
    found = found_after([*turns, range(6)], range(9), FULL)
    assert found.tokens == 6


def test_an_index_rebuilt_from_records_in_any_order_matches_alike():
    rng = np.random.default_rng(11)
    saved = Saved(make_spec(FULL, ("sliding", 2, 5), ("snapshot", 8, None)))
    turns = [rng.integers(0, 2, rng.integers(1, 30)) for _ in range(30)]
    for turn in turns:
        saved.save_turn(turn)
    old, new = saved.index, PrefixIndex(2000)
    for row in rng.permutation(old.select()).reshape(-1, 1):
        rows = new.insert(
            old.keys(row),
            key_array([old.parent_key(int(row[0]))]),
            group=old.group(row),
            end_tokens=old.end_token(row),
            num_tokens=old.num_tokens(row),
            flags=old.flags(row),
        )
        new.set_resident(rows, Tier.DISK)
    new.check()
    assert new.stats().rows == old.stats().rows
    for turn in turns:
        tokens = np.append(turn, [1, 0, 1]).astype(np.uint32)
        chains = make_chains(saved.spec, tokens)
        results = [match(i, saved.spec, chains, tokens, limit=len(tokens)) for i in (old, new)]
        assert results[0].tokens == results[1].tokens >= len(turn)
        for before, after in zip(results[0].groups, results[1].groups, strict=True):
            assert old.keys(before.rows).tobytes() == new.keys(after.rows).tobytes()
