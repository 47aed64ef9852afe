"""The load plan against all choices of whole pages, published splits, and extremes."""

import random
import sys
from itertools import permutations

import pytest

from tierkv.control_plane.costs import ComputeCost, Costs, Link, minimum_bandwidth
from tierkv.control_plane.load_plan import (
    Alternative,
    Decision,
    Prefix,
    Run,
    _best,
    plan_load,
)
from tierkv.control_plane.pipeline import run_layers
from tierkv.errors import InvalidInputError
from tierkv.tiers import Tier

KV = 131_072  # bytes a token of Llama-3.1-8B in bf16
LLAMA_8B = (6_980_000_000, 32, 32, 128)
FREE = {tier: Link(0.0, float("inf")) for tier in Tier}


def llama(flops_per_s=495e12, forward_s=0.0):
    return ComputeCost.from_model(*LLAMA_8B, flops_per_s=flops_per_s, forward_s=forward_s)


def prefix(prompt, *runs, unit=16, layers=32, stops=None):
    """Return a prefix of runs (end, tier), one operation a page."""
    made, start = [], 0
    for end, tier in runs:
        nbytes = 0 if tier is Tier.DEVICE else (end - start) * KV
        made.append(Run(end, tier, nbytes, (end - start) // unit if nbytes else 0))
        start = end
    return Prefix(prompt_tokens=prompt, runs=made, layers=layers, unit=unit, stops=stops)


def made_up(rng):
    """Return a small prefix of 1 to 4 runs, and costs of any proportions."""
    unit, runs, end = rng.choice([1, 2, 4, 8]), [], 0
    for _ in range(rng.randint(1, 4)):
        end += unit * rng.randint(1, 12)
        tier = rng.choice(list(Tier))
        there = tier is Tier.DEVICE and rng.random() < 0.7
        runs.append(Run(end, tier, 0 if there else rng.randint(1, 10**6), rng.randint(0, 8)))
    if rng.random() < 0.2:
        runs.append(Run(end + rng.randint(1, unit), Tier.HOST, 1000, 1))  # a tail page
        end = runs[-1].end
    stops = None
    if rng.random() < 0.3:
        stops = sorted(s for s in range(unit, end, unit) if rng.random() < 0.3)
    compute = ComputeCost.from_model(
        int(10 ** rng.uniform(0, 5)),
        rng.choice([1, 4]),
        4,
        32,
        flops_per_s=10 ** rng.uniform(5, 9),
        forward_s=rng.choice([0, 10 ** rng.uniform(-5, -1)]),
    )
    links = {
        tier: Link(rng.choice([0, 10 ** rng.uniform(-6, -2)]), 10 ** rng.uniform(5, 9))
        for tier in Tier
    }
    found = Prefix(
        prompt_tokens=end + rng.randint(1, 60),
        runs=runs,
        layers=rng.choice([1, 4, 32]),
        unit=unit,
        stops=stops,
    )
    return found, Costs(compute, links=links)


def lanes(found, costs, tokens):
    """Return the seconds of reads and copies for a prefix, run by run."""
    read = copied = 0.0
    start = 0
    for run in found.runs:
        share = min(1.0, max(0.0, (tokens - start) / (run.end - start)))
        own = share * costs.links[run.tier].seconds(run.nbytes, ops=run.ops)
        if run.tier > Tier.HOST:
            read += own
            own = share * costs.links[Tier.HOST].seconds(run.nbytes, ops=run.ops)
        copied += own
        start = run.end
    return read, copied


def loaded(found, costs, tokens, restartable):
    """Return the time to the first token by the events of each layer."""
    read, copied = lanes(found, costs, tokens)
    compute = costs.compute.seconds(found.prompt_tokens - tokens, tokens)
    n = found.layers
    if not restartable:
        return read + run_layers([copied / n] * n, [compute / n] * n).finish_s
    arrivals = run_layers([read / n] * n, [copied / n] * n).computed
    done = 0.0
    for arrival in arrivals:
        done = max(done, arrival) + compute / n
    return done


def split(found, costs, tokens, front):
    load = sum(lanes(found, costs, tokens)) - sum(lanes(found, costs, front))
    rest = costs.compute.seconds(found.prompt_tokens - tokens, tokens)
    return max(costs.compute.seconds(front), load) + rest


def a_page(found, costs):
    """Return what one page costs at most: the rounding of a split to pages."""
    starts = [0, *(run.end for run in found.runs)]
    load = 0.0
    for start, run in zip(starts, found.runs, strict=False):
        whole = [sum(lanes(found, costs, at)) for at in (start, run.end)]
        load = max(load, (whole[1] - whole[0]) / (run.end - start) * found.unit)
    last = found.prompt_tokens - found.unit
    return load + costs.compute.seconds(found.unit, last) - costs.compute.forward_s


def test_no_choice_of_whole_pages_is_quicker():
    inexact = 0
    for seed in range(2_000):
        rng = random.Random(seed)
        found, costs = made_up(rng)
        restartable = rng.random() < 0.5
        plan = plan_load(found, costs, restartable=restartable, can_split=True)
        fronts = range(found.unit, found.tokens, found.unit)
        stops = fronts if found.stops is None else found.stops
        lengths = [*(s for s in stops if s < found.tokens), found.tokens]
        single = {p: loaded(found, costs, p, restartable) for p in (0, *lengths)}
        best = min(single.values())
        assert min(
            seconds for name, seconds in plan.seconds.items() if name != "split"
        ) == pytest.approx(best, rel=1e-6), seed
        load = {x: sum(lanes(found, costs, x)) for x in {*lengths, *fronts}}
        front = {x: costs.compute.seconds(x) for x in fronts}
        rest = {p: costs.compute.seconds(found.prompt_tokens - p, p) for p in lengths}
        pairs = [
            max(front[x], load[p] - load[x]) + rest[p] for p in lengths for x in fronts if x < p
        ]
        if pairs and min(pairs) < best:
            best = min(pairs)
        seconds = plan.chosen.seconds
        assert best * (1 - 1e-6) <= seconds <= best + a_page(found, costs), seed
        inexact += seconds > best * (1 + 1e-6)
        # The time it says is the time of what it chose.
        if plan.front_tokens:
            again = split(found, costs, plan.prefix_tokens, plan.front_tokens)
        else:
            again = single[plan.prefix_tokens]
        assert seconds == pytest.approx(again, rel=1e-6)
    assert inexact < 10, "rounding of the split is rarely seen at all"


def faster(costs, factor, tiers):
    links = {
        tier: Link(link.alpha_s / factor, link.bytes_per_s * factor) if tier in tiers else link
        for tier, link in costs.links.items()
    }
    return Costs(costs.compute, links=links)


def test_faster_links_never_load_less_and_never_take_longer():
    for seed in range(2_000):
        rng = random.Random(seed)
        found, costs = made_up(rng)
        factor, restartable = rng.choice([1.1, 2, 10]), rng.random() < 0.5
        tiers = rng.choice([list(Tier), [rng.choice(list(Tier))]])
        quick = faster(costs, factor, tiers)
        before = plan_load(found, costs, restartable=restartable)
        after = plan_load(found, quick, restartable=restartable)
        # Beside the forward, reads and copies of unequal speed can trade places.
        if len(tiers) > 1 or not restartable:
            assert after.load_tokens >= before.load_tokens, seed
        assert after.chosen.seconds <= before.chosen.seconds * (1 + 1e-9), seed
        for plan in (before, after):
            split = plan_load(
                found, costs if plan is before else quick, restartable=restartable, can_split=True
            )
            assert split.chosen.seconds <= plan.chosen.seconds * (1 + 1e-9)


def test_the_same_input_gives_the_same_plan():
    for seed in range(200):
        plans = []
        for _ in range(2):
            rng = random.Random(seed)
            found, costs = made_up(rng)
            plans.append(plan_load(found, costs, can_split=True))
        assert plans[0] == plans[1]
        assert plans[0].explain() == plans[1].explain()


def test_published_split_point():
    """F(x) / G = b_kv * (p - x) / B (Cake, KVPR): a quadratic equation for the front x."""
    p, rate, link = 32_768, 495e12, 4e9
    costs = Costs(llama(rate), links=FREE | {Tier.HOST: Link(0.0, link)})
    plan = plan_load(prefix(p + 16, (p, Tier.HOST), layers=1), costs, can_split=True)
    a, b, c = 2 * 32 * 4096 / rate, 2 * 6.98e9 / rate + KV / link, -KV * p / link
    front = (-b + (b * b - 4 * a * c) ** 0.5) / (2 * a)
    assert plan.decision is Decision.SPLIT
    assert abs(plan.front_tokens - front) <= 16
    assert plan.prefix_tokens == p
    load_s = KV * (p - front) / link
    assert plan.chosen.seconds == pytest.approx(load_s + costs.compute.seconds(16, p), rel=1e-2)
    # Both lanes take about that long, and less than either alone.
    assert plan.chosen.seconds < 0.7 * min(plan.seconds["load"], plan.seconds["compute"])


@pytest.mark.parametrize("tokens", [4096, 32_768, 131_072])
def test_loading_pays_above_the_minimum_bandwidth(tokens):
    """The whole prefix or nothing, without overlap: B > b_kv * p * G_eff / F(p)."""
    compute = llama()
    least = minimum_bandwidth(kv_bytes=KV * tokens, flops=compute.flops(tokens), flops_per_s=495e12)
    for factor in (0.99, 1.01):
        costs = Costs(compute, links=FREE | {Tier.HOST: Link(0.0, least * factor)})
        plan = plan_load(prefix(tokens + 100, (tokens, Tier.HOST), layers=1, stops=()), costs)
        assert plan.decision is (Decision.LOAD if factor > 1 else Decision.COMPUTE)


def test_one_pci_express_load_is_about_the_time_to_first_token():
    """Llama-3.1-8B, 32k history, 256 new tokens: 78 ms of load against 16 ms of compute."""
    costs = Costs(llama(494.5e12), links={Tier.HOST: Link(0.0, 55e9)})
    found = prefix(32_768 + 256, (32_768, Tier.HOST), stops=())
    plan = plan_load(found, costs)
    assert plan.decision is Decision.LOAD
    assert costs.compute.seconds(256, 32_768) == pytest.approx(16e-3, abs=0.5e-3)
    assert plan.chosen.seconds == pytest.approx(78e-3 + 16e-3 / 32, abs=0.5e-3)


def test_a_slow_disk_is_left_and_memory_is_loaded():
    costs = Costs(llama(), links={Tier.DISK: Link(1e-4, 0.5e9)})
    found = prefix(9000, (4096, Tier.HOST), (8192, Tier.DISK))
    plan = plan_load(found, costs)
    assert (plan.decision, plan.prefix_tokens, plan.load_tokens) == (Decision.PARTIAL, 4096, 4096)
    fast = Costs(llama(), links={Tier.DISK: Link(1e-4, 50e9)})
    assert plan_load(found, fast).load_tokens > 4096


def test_reads_that_overlap_are_worth_more():
    costs = Costs(llama(50e12), links={Tier.DISK: Link(0.0, 7e9), Tier.HOST: Link(0.0, 50e9)})
    found = prefix(12_000, (8192, Tier.DISK))
    first = plan_load(found, costs).seconds["load"]
    beside = plan_load(found, costs, restartable=True).seconds["load"]
    read, compute = 8192 * KV / 7e9, costs.compute.seconds(12_000 - 8192, 8192)
    assert first == pytest.approx(read + compute, rel=0.02)
    assert beside == pytest.approx(max(read, compute), rel=0.1)


def test_a_pages_length_where_reads_overtake_copies_is_found():
    """Two layers; a dense host run keeps the link busy while the disk run catches up."""
    compute = ComputeCost(1.5, 0.0)
    compute.observe(new=1000, past=0, seconds=1500.0)  # 1.5 s a token
    links = {Tier.HOST: Link(0.0, 10.0), Tier.DISK: Link(0.0, 1.0)}
    runs = [Run(5, Tier.HOST, 300, 0), Run(45, Tier.DISK, 40, 0)]
    found = Prefix(prompt_tokens=46, runs=runs, layers=2, unit=1)
    plan = plan_load(found, Costs(compute, links=links), restartable=True)
    # Reads of x tokens take x, copies 30 + x / 10: equal between 33 and 34 of the disk run.
    assert plan.prefix_tokens in (5 + 33, 5 + 34)
    best = min(loaded(found, Costs(compute, links=links), p, True) for p in range(46))
    assert plan.chosen.seconds == pytest.approx(best)


def test_what_of_a_slow_back_loads_beside_the_front_is_loaded():
    """Disk, host, disk: the front is computed, the host run and half of the back are loaded."""
    compute = ComputeCost(1.0, 0.0)
    compute.observe(new=1000, past=0, seconds=1.0)  # 1 ms a token
    links = FREE | {Tier.DISK: Link(0.0, 500.0)}  # a byte a token: 2 ms a token
    runs = [Run(1000, Tier.DISK, 1000, 0), Run(2000, Tier.HOST, 1000, 0)]
    runs.append(Run(3000, Tier.DISK, 1000, 0))
    found = Prefix(prompt_tokens=3001, runs=runs, layers=1, unit=10)
    plan = plan_load(found, Costs(compute, links=links), can_split=True)
    assert plan.decision is Decision.SPLIT
    assert (plan.front_tokens, plan.prefix_tokens) == (1000, 2500)
    assert plan.chosen.seconds == pytest.approx(1.501)


def test_only_lengths_that_can_be_resumed_are_considered():
    costs = Costs(llama(), links={Tier.HOST: Link(0.0, 1e9)})
    free = plan_load(prefix(9000, (8000, Tier.HOST)), costs)
    assert 0 < free.load_tokens < 8000
    assert free.load_tokens % 16 == 0
    bound = plan_load(prefix(9000, (8000, Tier.HOST), stops=(512, 7000)), costs)
    assert bound.load_tokens in (0, 512, 7000, 8000)
    none = plan_load(prefix(9000, (8000, Tier.HOST), stops=()), costs)
    assert set(none.seconds) == {"load", "compute"}


def test_extremes():
    links = {Tier.HOST: Link(0.0, 1.0)}  # a byte a second
    found = prefix(9000, (8000, Tier.HOST))
    nothing = plan_load(prefix(9000), Costs(llama()), can_split=True)
    assert (nothing.name, nothing.load_tokens) == ("compute", 0)
    assert "nothing was found" in nothing.explain()
    assert plan_load(prefix(9000), Costs()).seconds == {"compute": 0.0}

    # Without knowing what computing costs, whatever is found is loaded.
    for compute in (None, ComputeCost.from_model(*LLAMA_8B)):
        plan = plan_load(found, Costs(compute, links=links), can_split=True)
        assert (plan.name, plan.load_tokens) == ("load", 8000)
        assert "not known" in plan.explain()

    assert plan_load(found, Costs(llama(), links=links), can_split=True).name == "compute"
    plan = plan_load(found, Costs(llama(), links=FREE), can_split=True)
    assert (plan.name, plan.load_tokens) == ("load", 8000)
    # Where neither costs anything the two are equal, and the one that loads more is taken.
    plan = plan_load(found, Costs(llama(float("inf")), links=FREE), can_split=True)
    assert (plan.name, plan.load_tokens) == ("load", 8000)
    for end in range(32, 4096, 112):
        found = prefix(9000, (end, Tier.DEVICE), (8000, Tier.HOST))
        plan = plan_load(found, Costs(llama(float("inf")), links=links))
        assert (plan.name, plan.load_tokens) == ("partial", end)
    # Pages in the device pool cost nothing to use.
    resident = prefix(9000, (8000, Tier.DEVICE))
    assert plan_load(resident, Costs(llama(), links=links), can_split=True).name == "load"


def test_of_equal_ways_the_one_that_loads_most_is_taken_in_any_order():
    ways = [
        Alternative(Decision.PARTIAL, 64, 0, 1.0),
        Alternative(Decision.SPLIT, 128, 32, 1.0 + 1e-12),
        Alternative(Decision.COMPUTE, 0, 0, 1.0),
    ]
    for order in permutations(ways):
        assert _best(iter(order)) == ways[1]
    assert _best(iter([*ways, Alternative(Decision.COMPUTE, 0, 0, 0.999)])).seconds == 0.999


def test_a_plan_explains_itself_and_stays_as_it_was():
    costs = Costs(llama(), links={Tier.HOST: Link(10e-6, 25e9), Tier.DISK: Link(1e-4, 3e9)})
    found = prefix(9000, (2048, Tier.DEVICE), (4096, Tier.HOST), (8192, Tier.DISK))
    plan = plan_load(found, costs, can_split=True)
    text = plan.explain()
    assert text.splitlines()[:7] == [
        "found 8192 of 9000 prompt tokens",
        "  0 to 2048 on device: nothing to move",
        "  2048 to 4096 on host: 268 MB in 128 operations",
        "  4096 to 8192 on disk: 537 MB in 256 operations",
        "host to device: 805 MB at 25 GB/s + 384 x 10 us = 36.1 ms",
        "disk to host: 537 MB at 3 GB/s + 256 x 100 us = 205 ms",
        "forward: 495 TFLOP/s and 0 s a pass",
    ]
    for decision in Decision:
        assert f" {decision.value} " in text
    assert f"* {plan.name}" in text
    assert text.endswith(f"{plan.name}: the quickest")
    for _ in range(50):
        costs.links[Tier.HOST].observe(nbytes=1 << 20, seconds=1.0)
        costs.compute.observe(new=1000, past=0, seconds=10.0)
    assert plan.explain() == text
    assert plan_load(found, costs, can_split=True).explain() != text


def calls(work):
    """Return how many Python functions ``work`` calls: its cost, whatever else runs here."""
    count = 0

    def counted(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("restartable", [False, True])
def test_a_plan_costs_the_same_for_any_number_of_pages(restartable):
    costs = Costs(llama(forward_s=1e-3))
    made = []
    for scale in (1, 100):
        size = 4096 * scale
        found = prefix(4 * size, (size, Tier.DEVICE), (2 * size, Tier.HOST), (3 * size, Tier.DISK))
        made.append(
            calls(lambda f=found: plan_load(f, costs, restartable=restartable, can_split=True))
        )
    assert made[0] < 250
    assert made[1] < 350


@pytest.mark.parametrize(
    "options",
    [
        {"runs": [Run(16, Tier.HOST, 1, 1), Run(16, Tier.DISK, 1, 1)]},
        {"runs": [Run(16, Tier.HOST, -1, 1)]},
        {"runs": [Run(100, Tier.HOST, 1, 1)]},
        {"runs": [Run(64, Tier.HOST, 1, 1)], "stops": (16, 64)},
        {"layers": 0},
        {"unit": 0},
    ],
)
def test_what_describes_no_prefix_is_refused(options):
    usual = {"prompt_tokens": 100, "runs": [], "layers": 4, "unit": 16}
    with pytest.raises(InvalidInputError, match="load plan"):
        Prefix(**usual | options)
