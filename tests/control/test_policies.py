"""Policies against independent twins, through the index and alone."""

import numpy as np
import pytest
from index_model import insert_named, name_key, parent_name

from tierkv.control_plane.index import PrefixIndex
from tierkv.control_plane.policies import LRU, PRIORITY_BITS, AgeingFrequency, make_policy
from tierkv.errors import InvalidInputError
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier


def random_trace(seed, requests=250, width=3, depth=6):
    """Return paths of a random tree, the popular branches more often."""
    rng = np.random.default_rng(seed)
    trace = []
    for _ in range(requests):
        steps = np.minimum(rng.geometric(0.5, rng.integers(1, depth + 1)), width)
        trace.append(["/".join(map(str, steps[: i + 1])) for i in range(len(steps))])
    return trace


def replay(trace, capacity, policy):
    """Run a trace through the index as a cache; return hits a request, victims and index."""
    index = PrefixIndex(500, {Tier.HOST: policy})
    hits, evicted = [], []
    for path in trace:
        rows = index.find(key_array(map(name_key, path)))
        found = rows[: int(np.argmin(rows)) if (rows < 0).any() else len(rows)]
        hits.append(len(found))
        index.touch(found)
        index.pin(found, Tier.HOST)
        new = path[len(found) :]
        short = len(new) - (capacity - index.resident_count(Tier.HOST))
        victims = index.victims(Tier.HOST, max(0, short))
        evicted += [index.key(row) for row in victims.tolist()]
        index.clear_resident(victims, Tier.HOST)
        index.unpin(victims, Tier.HOST)
        new = new[: max(0, capacity - index.resident_count(Tier.HOST))]
        index.set_resident(insert_named(index, new), Tier.HOST)
        index.unpin(found, Tier.HOST)
        if len(hits) % 20 == 0:
            index.check()
    return hits, evicted, index


def leaf_lru(trace, capacity):
    """An independent leaf-LRU: hits a request and the victims, in 20 lines."""
    last, clock, hits, evicted = {}, 0, [], []
    for path in trace:
        found = 0
        while found < len(path) and path[found] in last:
            found += 1
        hits.append(found)
        for name in reversed(path[:found]):
            clock += 1
            last[name] = clock
        new = path[found:]
        for _ in range(len(last) + len(new) - capacity):
            parents = {parent_name(name) for name in last}
            leaves = [n for n in last if n not in parents and n not in path[:found]]
            if leaves:
                evicted.append(name_key(min(leaves, key=last.get)))
                del last[min(leaves, key=last.get)]
        for name in reversed(new[: max(0, capacity - len(last))]):
            clock += 1
            last[name] = clock
    return hits, evicted


@pytest.mark.parametrize("capacity", [3, 8, 20, 60])
def test_lru_equals_an_independent_leaf_lru(capacity):
    trace = random_trace(seed=capacity)
    hits, evicted, _ = replay(trace, capacity, LRU())
    assert (hits, evicted) == leaf_lru(trace, capacity)


def test_lru_hits_never_fall_when_capacity_grows():
    trace = random_trace(seed=7)
    totals = [sum(replay(trace, capacity, LRU())[0]) for capacity in (6, 9, 14, 25, 60, 200)]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


@pytest.mark.parametrize("policy", [LRU, AgeingFrequency])
def test_the_same_trace_gives_the_same_decisions(policy):
    trace = random_trace(seed=3)
    first, second = (replay(trace, 20, policy())[:2] for _ in range(2))
    assert first == second
    assert first[1], "nothing was evicted"


@pytest.mark.parametrize("policy", [LRU, AgeingFrequency])
def test_what_is_resident_is_closed_under_prefixes(policy):
    trace = random_trace(seed=4)
    _, _, index = replay(trace, 25, policy())
    for row in index.select():
        for above in index.path(int(row)):
            assert index.residency([above])[0]


class AgeingTwin:
    """Frequency with dynamic ageing over flat pages, with unbounded integers."""

    def __init__(self, cap):
        self.cap, self.age, self.uses, self.order, self.clock = cap, 0, {}, {}, 0

    def use(self, name):
        self.clock += 1
        self.uses[name] = min(self.uses.get(name, 0) + 1, self.cap)
        self.order[name] = (self.age + self.uses[name], self.clock)

    def evict(self):
        victim = min(self.order, key=self.order.get)
        self.age = max(self.age, self.order.pop(victim)[0])
        del self.uses[victim]
        return victim


@pytest.mark.parametrize("level_bits", [4, 5, 24])
def test_ageing_frequency_equals_an_independent_twin(level_bits):
    """With few level bits priorities are renumbered all the time, and nothing changes."""
    rng = np.random.default_rng(2)
    policy = AgeingFrequency(max_frequency=7, level_bits=level_bits)
    index, twin = PrefixIndex(100, {Tier.HOST: policy}), AgeingTwin(7)
    for name in map(str, rng.zipf(1.3, 3000) % 60):
        rows = index.find(key_array([name_key(name)]))
        if rows[0] >= 0:
            index.touch(rows)
        else:
            if index.pages == 20:
                victim = index.victims(Tier.HOST, 1)
                assert index.key(int(victim[0])) == name_key(twin.evict())
                index.clear_resident(victim, Tier.HOST)
                index.unpin(victim, Tier.HOST)
            index.set_resident(insert_named(index, [name]), Tier.HOST)
        twin.use(name)
    index.check()
    assert (policy.generation > 0) == (level_bits < 24)


def test_ageing_frequency_keeps_the_popular_and_lets_them_age():
    index = PrefixIndex(100, {Tier.HOST: AgeingFrequency(max_frequency=3)})
    rows = insert_named(index, ["old", "new"])
    index.set_resident(rows, Tier.HOST)
    for _ in range(9):
        index.touch(rows[:1])
    evicted = []
    for i in range(12):
        victim = index.victims(Tier.HOST, 1)
        evicted.append(int(victim[0]))
        index.clear_resident(victim, Tier.HOST)
        index.unpin(victim, Tier.HOST)
        index.set_resident(insert_named(index, [f"once {i}"]), Tier.HOST)
    assert rows[0] in evicted, "a page popular once stays for ever"
    assert evicted.index(rows[0]) >= 2, "its uses did not count"


def test_priorities_fit_beside_the_class():
    policy = AgeingFrequency()
    policy.bind(4)
    rows = np.array([1, 2])
    policy.created(rows, np.array([2**35, 2**36 - 1]), np.array([1, 300]))
    priorities = policy.priority(rows, np.zeros(2, np.int64))
    assert (priorities > 0).all()
    assert (priorities < 2**PRIORITY_BITS).all()


def test_recency_beyond_its_bits_is_renumbered():
    policy = AgeingFrequency()
    policy.bind(4)
    policy.created(np.array([1]), np.array([2**36 - 1]), np.array([1]))
    policy.created(np.array([2]), np.array([2**36 + 5]), np.array([1]))
    older, newer = policy.priority(np.array([1, 2]), np.zeros(2, np.int64))
    assert policy.generation == 1
    assert older < newer


def test_policies_have_names():
    assert isinstance(make_policy("lru"), LRU)
    assert isinstance(make_policy("ageing"), AgeingFrequency)
    with pytest.raises(InvalidInputError, match="'mru' is unknown; choose one of"):
        make_policy("mru")


@pytest.mark.parametrize(
    "options", [{"max_frequency": 0}, {"max_frequency": 300}, {"level_bits": 4}, {"level_bits": 40}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(InvalidInputError, match="ageing policy"):
        AgeingFrequency(**options)


def test_a_policy_serves_one_tier():
    policy = LRU()
    with pytest.raises(InvalidInputError, match="of its own"):
        PrefixIndex(10, {Tier.HOST: policy, Tier.DISK: policy})
