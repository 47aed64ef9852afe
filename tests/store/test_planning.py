"""What is loaded is what would take longer to compute, and a split holds the right bytes."""

import pytest
from toy_model import FULL, MIXED, feed, turn

from tierkv import InvalidInputError, Tier
from tierkv.control_plane.costs import ComputeCost, Link
from tierkv.devices.cpu import CpuDevice
from tierkv.devices.faults import Faults
from tierkv.devices.sim import SimDevice

TOKENS = [(11 * i) % 61 for i in range(64)]


def cost(seconds_a_token):
    """Return a model whose forward takes so long a token, however long the past."""
    return ComputeCost.from_model(10**6, 1, 1, 1, flops_per_s=2e6 / seconds_a_token)


def kept(open_store, tier, spec=FULL, **budgets):
    """Return a store that holds TOKENS in a tier and expects its transfers to be as given."""
    store = open_store(spec, **{"device": 60, "host": 120, "disk": 300, **budgets})
    turn(store, TOKENS)
    if tier is not Tier.DEVICE:
        turn(store, [99] * 240)  # takes the whole device pool
    assert store.flush().ok
    if tier is Tier.DISK:
        for filler in (98, 97, 96):
            turn(store, [filler] * 240)
    return store


def links(store, seconds_a_page, *tiers):
    """Make the planner expect so many seconds a page of ``tiers``, and nothing for the others."""
    store._loader._planning.observe()  # what the turns before took
    size = store.spec.slot_bytes
    for tier in Tier:
        rate = size / seconds_a_page if tier in tiers else 1e18
        store.costs.links[tier] = Link(0.0, rate)


@pytest.fixture
def from_host(open_store):
    return kept(open_store, Tier.HOST)


def test_everything_found_is_loaded_while_nothing_is_known_of_computing(from_host):
    sequence = from_host.begin([*TOKENS, 1])
    assert sequence.plan.name == "load"
    assert "not known" in sequence.plan.explain()
    assert sequence.length == 64
    sequence.abandon()
    assert from_host.stats().counters["plans"]["load"] >= 1


@pytest.mark.parametrize(("per_token", "decision"), [(1.0, "load"), (1e-9, "compute")])
def test_the_cheaper_of_loading_and_computing_is_taken(from_host, per_token, decision):
    links(from_host, 1e-3, Tier.HOST)
    from_host.costs.compute = cost(per_token)
    sequence = from_host.begin([*TOKENS, 1])
    assert sequence.plan.name == decision
    assert sequence.found.total == (64 if decision == "load" else 0)
    text = sequence.plan.explain()
    assert "host" in text
    assert "compute" in text
    feed(sequence, [*TOKENS, 1])
    sequence.finish([*TOKENS, 1])
    from_host.check()
    assert from_host.stats().counters["plans"][decision] >= 1


def test_what_is_in_memory_is_loaded_and_what_is_on_a_slow_disk_computed(open_store):
    store = kept(open_store, Tier.DISK)
    turn(store, TOKENS[:32])  # the front is in memory again
    links(store, 1.0, Tier.DISK)
    store.costs.compute = cost(1e-3)
    sequence = store.begin([*TOKENS, 1])
    assert sequence.plan.name == "partial"
    assert sequence.length == sequence.plan.prefix_tokens == 32
    feed(sequence, [*TOKENS, 1])
    sequence.finish([*TOKENS, 1])


@pytest.mark.parametrize("spec", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("from_tier", [Tier.HOST, Tier.DISK])
def test_a_split_computes_the_front_and_joins_the_back(open_store, spec, from_tier):
    store = kept(open_store, from_tier, spec)
    links(store, 1e-2, Tier.HOST, Tier.DISK)
    store.costs.compute = cost(2e-3)
    before = store.stats().counters["plans"]["split"]
    tokens = [*TOKENS, 5, 6, 7]
    sequence = store.begin(tokens, can_split=True)
    assert sequence.plan.name == "split"
    front = sequence.front
    assert 0 < front < 64
    assert front % 4 == 0
    assert sequence.length == 0
    assert sequence.found.total == 64 - front
    store.check()
    with pytest.raises(InvalidInputError, match=f"compute {front} first"):
        sequence.join()
    feed(sequence, tokens, front)
    with pytest.raises(InvalidInputError, match="join first"):
        sequence.commit(tokens)
    assert sequence.join() == 64
    assert sequence.front == 0
    feed(sequence, tokens)  # checks every layer's bytes
    sequence.finish(tokens)
    store.check()
    assert store.stats().counters["plans"]["split"] == before + 1
    store.costs.compute = None
    assert turn(store, [*tokens, 9], finish=False).total == len(tokens)


def test_a_caller_that_cannot_split_is_not_made_to(from_host):
    links(from_host, 1e-2, Tier.HOST)
    from_host.costs.compute = cost(2e-3)
    sequence = from_host.begin([*TOKENS, 5])
    assert sequence.plan.name != "split"
    assert sequence.front == 0
    sequence.abandon()


@pytest.mark.parametrize("end", ["abandon", "finish"])
def test_a_split_may_end_before_it_is_joined(from_host, end):
    links(from_host, 1e-2, Tier.HOST)
    from_host.costs.compute = cost(2e-3)
    sequence = from_host.begin([*TOKENS, 5], can_split=True)
    feed(sequence, TOKENS, sequence.front // 2)
    if end == "abandon":
        sequence.abandon()
    else:
        sequence.finish([*TOKENS, 5])
    from_host.check()
    assert turn(from_host, [*TOKENS, 5]).total == 64


def test_links_that_are_avoided_are_tried_again_now_and_then(from_host):
    links(from_host, 1.0, Tier.HOST)
    from_host.costs.compute = cost(1e-9)
    names = []
    for _ in range(17):
        sequence = from_host.begin([*TOKENS, 1])
        names.append(sequence.plan.name)
        if names[-1] == "load":
            assert "to measure" in sequence.plan.explain()
        sequence.abandon()
        links(from_host, 1.0, Tier.HOST)
    assert names == ["compute"] * 16 + ["load"]


def test_estimates_follow_what_transfers_take(from_host):
    before = from_host.costs.links[Tier.HOST].observations
    turn(from_host, [*TOKENS, 1])
    turn(from_host, [*TOKENS, 2])
    assert from_host.costs.links[Tier.HOST].observations > before
    from_host.costs.check()
    from_host.costs.compute = ComputeCost.from_model(1000, 2, 2, 32)
    from_host.observe_compute(64, 0, 0.5)
    assert from_host.costs.compute.known


def split(store, tokens):
    """Return a sequence whose front is to be computed while its back loads from host memory."""
    links(store, 1e-2, Tier.HOST)
    store.costs.compute = cost(2e-3)
    sequence = store.begin(tokens, can_split=True)
    assert sequence.front > 0
    return sequence


def test_what_loads_behind_a_front_cannot_be_taken_back_before_it_is_joined(from_host):
    tokens = [*TOKENS, 5]
    sequence = split(from_host, tokens)
    feed(sequence, tokens, sequence.front - 1)
    with pytest.raises(InvalidInputError, match="join first"):
        sequence.crop(3)
    feed(sequence, tokens, sequence.front)
    assert sequence.join() == 64
    sequence.crop(3)
    feed(sequence, tokens)
    sequence.finish(tokens)


def test_a_back_that_does_not_arrive_is_computed_after_the_front(open_store, device_name):
    faults = Faults()
    device = {"cpu": CpuDevice, "sim": SimDevice}[device_name](faults=faults)
    store = kept(open_store, Tier.HOST, torch_device=device)
    faults.fail_copies("load", count=None)
    tokens = [*TOKENS, 5]
    sequence = split(store, tokens)
    front = sequence.front
    feed(sequence, tokens, front)
    assert sequence.join() == front
    assert sequence.found.total == 0
    store.check()
    faults.clear()
    feed(sequence, tokens)
    sequence.finish(tokens)
    assert {store.stats().tiers[tier].held for tier in ("device", "host")} == {0}
