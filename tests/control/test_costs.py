"""Links and the forward pass, learned from observations."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.control_plane.costs import (
    LEAST_TOKENS,
    ComputeCost,
    Costs,
    Link,
    minimum_bandwidth,
)
from tierkv.errors import InvalidInputError
from tierkv.tiers import Tier

MIB = 1 << 20


def feed(link, alpha, beta, *, count, noise=0.0, seed=0, smallest=4096):
    rng = random.Random(seed)
    for _ in range(count):
        nbytes, ops = int(smallest * 2 ** rng.uniform(0, 14)), rng.choice([1, 1, 4, 16])
        took = (ops * alpha + nbytes / beta) * (1 + noise * rng.uniform(-1, 1))
        link.observe(nbytes=nbytes, ops=ops, seconds=took)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(14.5e-6, 51.2e9), (100e-6, 3e9), (1e-3, 2e8), (5e-6, 4e12)]
)
def test_a_link_converges_to_the_truth(alpha, beta):
    exact, noisy = Link(15e-6, 20e9), Link(15e-6, 20e9)
    feed(exact, alpha, beta, count=300)
    assert exact.alpha_s == pytest.approx(alpha, rel=1e-3)
    assert exact.bytes_per_s == pytest.approx(beta, rel=1e-3)
    feed(noisy, alpha, beta, count=300, noise=0.3)
    assert noisy.alpha_s == pytest.approx(alpha, rel=0.15)
    assert noisy.bytes_per_s == pytest.approx(beta, rel=0.15)


def test_published_points_of_one_link():
    """64 KB at 4, 1 MB at 30 and 16 MB at 49 GB/s: 14.5 us and 51.2 GB/s."""
    link = Link(100e-6, 10e9)
    for _ in range(100):
        for nbytes, rate in ((65_536, 4e9), (MIB, 30e9), (16 * MIB, 49e9)):
            link.observe(nbytes=nbytes, seconds=nbytes / rate)
    assert link.alpha_s == pytest.approx(14.5e-6, rel=0.05)
    assert link.bytes_per_s == pytest.approx(51.2e9, rel=0.05)
    half = link.alpha_s * link.bytes_per_s  # half of the peak, and nine times as much for 90 %
    assert half / link.seconds(half) == pytest.approx(link.bytes_per_s / 2)
    assert 9 * half / link.seconds(9 * half) == pytest.approx(0.9 * link.bytes_per_s)


def test_operations_of_a_batch_each_pay_the_latency():
    link = Link(10e-6, 1e9)
    assert link.seconds(MIB, ops=8) == pytest.approx(80e-6 + MIB / 1e9)
    for _ in range(200):
        for ops in (1, 8):
            link.observe(nbytes=MIB, ops=ops, seconds=ops * 50e-6 + MIB / 5e9)
    assert link.seconds(0, ops=1) == pytest.approx(50e-6, rel=0.02)


@pytest.mark.parametrize("factor", [10, 2, 0.5, 0.1])
def test_a_link_follows_a_change(factor):
    link = Link(15e-6, 20e9)
    feed(link, 15e-6, 20e9, count=200, noise=0.1)
    feed(link, 15e-6, 20e9 * factor, count=100, noise=0.1, seed=1)
    assert link.seconds(16 * MIB) == pytest.approx(15e-6 + 16 * MIB / (20e9 * factor), rel=0.3)


@pytest.mark.parametrize("odd", [1000, 20, 1 / 20])
def test_one_odd_observation_changes_little(odd):
    link = Link(15e-6, 20e9)
    feed(link, 15e-6, 20e9, count=100)
    before = link.seconds(4 * MIB)
    link.observe(nbytes=4 * MIB, seconds=before * odd)
    assert link.seconds(4 * MIB) == pytest.approx(before, rel=0.1)
    feed(link, 15e-6, 20e9, count=5, seed=1)
    assert link.seconds(4 * MIB) == pytest.approx(before, rel=0.05)
    assert link.stats()["surprises"] == 1


def test_a_first_observation_that_is_odd_is_soon_forgotten():
    link = Link(15e-6, 20e9)
    link.observe(nbytes=4 * MIB, seconds=1.0)
    assert link.seconds(4 * MIB) < 3 * (15e-6 + 4 * MIB / 20e9)
    feed(link, 15e-6, 20e9, count=8)
    assert link.seconds(4 * MIB) == pytest.approx(15e-6 + 4 * MIB / 20e9, rel=0.2)


def test_transfers_of_one_size_tell_the_time_of_that_size():
    link = Link(15e-6, 20e9)
    for _ in range(100):
        link.observe(nbytes=4 * MIB, seconds=1e-3)
    assert link.seconds(4 * MIB) == pytest.approx(1e-3, rel=0.02)
    assert link.seconds(8 * MIB) > 1.2e-3, "not taken for latency alone"
    assert 0 < link.alpha_s < 1e-3


def test_small_transfers_that_are_quicker_leave_no_negative_latency():
    """Out of a cache, say, at half as much again: the bandwidth lies between the two."""
    link = Link(15e-6, 20e9)
    for _ in range(100):
        link.observe(nbytes=MIB, seconds=MIB / 15e9)
        link.observe(nbytes=16 * MIB, seconds=16 * MIB / 10e9)
    assert link.alpha_s == 0
    assert 11e9 < link.bytes_per_s < 14e9


def test_transfers_of_no_bytes_are_latency_and_what_is_no_time_is_ignored():
    link = Link(15e-6, 20e9)
    for _ in range(50):
        link.observe(nbytes=0, seconds=60e-6)
    assert link.alpha_s == pytest.approx(60e-6, rel=0.02)
    assert link.bytes_per_s == pytest.approx(20e9)
    before = link.stats()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        link.observe(nbytes=MIB, seconds=seconds)
    link.observe(nbytes=0, ops=0, seconds=1.0)
    link.observe(nbytes=-1, seconds=1.0)
    assert link.stats() == before | {"ignored": 6}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40), st.integers(0, 1000), st.floats(0, 1e6, allow_subnormal=False)
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_observed_a_link_stays_a_link(observed):
    link = Link(0.0, math.inf)
    for nbytes, ops, seconds in observed:
        link.observe(nbytes=nbytes, ops=ops, seconds=seconds)
        assert 0 <= link.alpha_s < math.inf
        assert link.bytes_per_s > 0
        assert math.isfinite(link.seconds(MIB))
    assert link.seconds(2 * MIB) >= link.seconds(MIB) >= link.seconds(0)


def test_a_link_without_limit_learns_one():
    link = Link(0.0, math.inf)
    assert link.seconds(1 << 40) == 0.0
    feed(link, 10e-6, 10e9, count=200)
    assert link.bytes_per_s == pytest.approx(10e9, rel=0.01)


# Llama-3.1-8B: parameters without embeddings, layers, query heads, head dim.
LLAMA_8B = (6_980_000_000, 32, 32, 128)
HALF_OF_H100 = 494.5e12


def test_flops_are_the_causal_formula_and_add_up():
    cost = ComputeCost.from_model(*LLAMA_8B)
    for p in (1, 1000, 131_072):
        assert cost.flops(p) == pytest.approx(2 * 6.98e9 * p + 2 * 32 * 4096 * p**2)
        assert cost.flops(p) + cost.flops(77, past=p) == pytest.approx(cost.flops(p + 77))


def test_a_sliding_layer_sees_its_window():
    full = ComputeCost.from_model(1, 2, 4, 8)
    sliding = ComputeCost.from_model(1, 2, 4, 8, sliding_layers=2, window=10)
    assert sliding.flops(10) == full.flops(10)
    assert sliding.flops(5, past=100) == pytest.approx(2 * 5 + 2 * 4 * 4 * 8 * 5 * 10)
    mixed = ComputeCost.from_model(1, 2, 4, 8, sliding_layers=1, window=10)
    assert mixed.flops(50) == pytest.approx((full.flops(50) + sliding.flops(50)) / 2)
    assert sliding.flops(30) + sliding.flops(20, past=30) == pytest.approx(sliding.flops(50))


@pytest.mark.parametrize(("tokens", "gb_per_s"), [(4096, 4.31), (32_768, 2.87), (131_072, 1.34)])
def test_published_bandwidths_at_which_loading_equals_computing(tokens, gb_per_s):
    least = minimum_bandwidth(
        kv_bytes=131_072 * tokens,
        flops=ComputeCost.from_model(*LLAMA_8B).flops(tokens),
        flops_per_s=HALF_OF_H100,
    )
    assert least / 1e9 == pytest.approx(gb_per_s, abs=0.011)


@pytest.mark.parametrize(("peak", "gb_per_s", "published"), [(312e12, 5.86, 6), (989e12, 18.6, 19)])
def test_published_minimum_bandwidth_of_llama3_70b(peak, gb_per_s, published):
    """Mooncake counts 4*p*d + 22*d*d a layer and token; eight accelerators at their peak."""
    p, layers, d = 8192, 80, 8192
    least = minimum_bandwidth(
        kv_bytes=2 * 2 * layers * (d // 8) * p,
        flops=layers * (4 * p * p * d + 22 * p * d * d),
        flops_per_s=8 * peak,
    )
    assert least / 1e9 == pytest.approx(gb_per_s, abs=0.05)
    assert round(least / 1e9) == published


def test_compute_is_unknown_until_observed_and_converges():
    cost = ComputeCost.from_model(*LLAMA_8B)
    assert not cost.known
    with pytest.raises(InvalidInputError, match="unknown"):
        cost.seconds(100)
    rng = random.Random(0)
    for _ in range(200):
        new, past = rng.randint(16, 4096), rng.randint(0, 30_000)
        took = 2e-3 + cost.flops(new, past) / 3e14
        cost.observe(new=new, past=past, seconds=took * rng.uniform(0.8, 1.2))
    assert cost.known
    assert cost.flops_per_s == pytest.approx(3e14, rel=0.1)
    assert cost.forward_s == pytest.approx(2e-3, rel=0.3)
    assert cost.seconds(0, past=100) == 0


def test_steps_of_few_tokens_say_nothing_of_the_rate():
    cost = ComputeCost.from_model(*LLAMA_8B)
    cost.observe(new=1, past=5000, seconds=0.01)
    assert not cost.known
    cost.observe(new=LEAST_TOKENS, past=0, seconds=0.01)
    assert cost.known
    rate = cost.flops_per_s
    cost.observe(new=1, past=5000, seconds=0.01)
    assert cost.flops_per_s == rate
    assert cost.stats()["ignored"] == 1


def test_a_rate_given_is_used_as_it_is_and_then_corrected():
    cost = ComputeCost.from_model(*LLAMA_8B, flops_per_s=1e15, forward_s=1e-3)
    assert cost.seconds(512, past=512) == pytest.approx(1e-3 + cost.flops(512, 512) / 1e15)
    for new in (512, 1024, 4096) * 20:
        cost.observe(new=new, past=0, seconds=1e-3 + cost.flops(new) / 1e14)
    assert cost.flops_per_s == pytest.approx(1e14, rel=0.03)


def test_costs_hold_a_link_a_tier():
    costs = Costs(ComputeCost.from_model(*LLAMA_8B), links={Tier.DISK: Link(0.0, 7e9)})
    assert set(costs.links) == set(Tier)
    assert costs.links[Tier.DISK].seconds(7e9) == pytest.approx(1)
    costs.links[Tier.HOST].observe(nbytes=MIB, seconds=1e-4)
    costs.check()
    stats = costs.stats()
    assert stats["host"]["observations"] == 1
    assert stats["compute"]["flops_per_s"] == 0
    assert Costs().stats()["compute"] is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(-1e-6, 1e9),
        lambda: Link(0.0, 0.0),
        lambda: ComputeCost.from_model(0, 1, 1, 1),
        lambda: ComputeCost.from_model(1, 1, 1, 1, sliding_layers=2, window=4),
        lambda: ComputeCost.from_model(1, 1, 1, 1, sliding_layers=1),
        lambda: ComputeCost.from_model(1, 1, 1, 1, flops_per_s=0),
    ],
)
def test_impossible_costs_are_refused(make):
    with pytest.raises(InvalidInputError):
        make()
