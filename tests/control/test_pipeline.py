"""The layer pipeline: closed forms, recursion and bounds against each other."""

import math
import random

import pytest

from tierkv.control_plane.pipeline import (
    hidden_share,
    layers_to_preload,
    no_overlap,
    optimum,
    overlap_limit,
    preload_finish,
    run_layers,
    uniform_finish,
)
from tierkv.errors import InvalidInputError


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def ragged(rng):
    layers = rng.randint(1, 12)
    loads = [rng.choice([0, rng.random()]) for _ in range(layers)]
    return loads, [rng.random() for _ in range(layers)]


def test_closed_form_equals_the_recursion():
    rng = random.Random(1)
    for _ in range(20_000):
        layers, load, compute = rng.randint(1, 30), rng.random(), rng.random()
        if rng.random() < 0.2:
            load = compute
        k = rng.randint(0, layers)
        run = run_layers([load] * layers, [compute] * layers, resident=k)
        assert run.finish_s == close(preload_finish(layers, load, compute, k))


def test_more_resident_layers_never_take_longer_and_bounds_hold():
    rng = random.Random(2)
    for _ in range(2_000):
        layers, load, compute = rng.randint(1, 20), rng.random(), rng.random()
        times = [preload_finish(layers, load, compute, k) for k in range(layers + 1)]
        assert times == sorted(times, reverse=True)
        assert times[0] <= layers * (load + compute) + 1e-12
        for k, time in enumerate(times):
            assert time >= max((layers - k) * load, layers * compute) - 1e-12
        k = layers_to_preload(layers, load, compute)
        assert times[k] == close(layers * compute), "k* layers leave no bubble"
        assert times[k - 1] > layers * compute, "one layer fewer leaves one"


def test_preload_count_at_exact_quotients_and_without_load():
    for layers in range(1, 40):
        for compute in (0.1, 0.3, 1 / 3):
            k = layers_to_preload(layers, 2 * compute, compute)
            assert k == layers - (layers - 1) // 2
    assert layers_to_preload(8, 0.0, 1.0) == 0


def test_recursion_reaches_the_optimum_and_less_staging_never_helps():
    rng = random.Random(3)
    for _ in range(2_000):
        loads, computes = ragged(rng)
        layers, k = len(loads), rng.randint(0, len(loads))
        best = optimum(loads, computes, resident=k)
        worst = no_overlap(loads, computes, resident=k)
        assert run_layers(loads, computes, resident=k).finish_s == close(best)
        before = math.inf
        for buffers in range(1, layers + 1):
            run = run_layers(loads, computes, resident=k, staging=buffers)
            assert best - 1e-9 <= run.finish_s <= min(before, worst) + 1e-9
            assert run.hidden_s + run.stall_s == close(max(run.load_s, run.stall_s))
            before = run.finish_s
        assert before == close(best), "a buffer for every layer is as good as no bound"


def test_one_buffer_overlaps_nothing_and_look_ahead_is_one_buffer_less():
    rng = random.Random(4)
    for _ in range(1_000):
        layers = rng.randint(1, 10)
        loads = [rng.random() + 0.01 for _ in range(layers)]
        computes = [rng.random() for _ in range(layers)]
        assert run_layers(loads, computes, staging=1).finish_s == close(no_overlap(loads, computes))
        for ahead in range(layers):
            assert run_layers(loads, computes, look_ahead=ahead) == run_layers(
                loads, computes, staging=ahead + 1
            )


def test_resident_layers_take_no_buffer():
    run = run_layers([0, 2, 0, 2], [1, 1, 1, 1], staging=1)
    # Layer 3 may be loaded when layer 1 has been computed, at 3, and not only after layer 2.
    assert run.loaded == (0.0, 2.0, 0.0, 5.0)
    assert run.computed == (1, 3, 4, 6)
    assert (run.stall_s, run.exposed_s, run.hidden_s) == (2, 2, 2)


def test_equal_layers_in_any_number_of_lanes():
    rng = random.Random(5)
    for _ in range(2_000):
        layers, lanes = rng.randint(1, 12), [rng.random() for _ in range(rng.randint(1, 4))]
        ready = [0.0] * len(lanes)
        for _ in range(layers):
            done = 0.0
            for lane, time in enumerate(lanes):
                done = ready[lane] = max(done, ready[lane]) + time
        total = [time * layers for time in lanes]
        assert uniform_finish(total, layers) == close(ready[-1])
        if len(lanes) == 2:
            assert ready[-1] == close(preload_finish(layers, lanes[0], lanes[1], 0))


def test_hidden_share_runs_from_no_overlap_to_the_optimum():
    loads, computes = [1.0] * 4, [2.0] * 4
    assert hidden_share(no_overlap(loads, computes), loads, computes) == 0
    assert hidden_share(optimum(loads, computes), loads, computes) == 1
    assert hidden_share(10.5, loads, computes) == pytest.approx(0.5)
    assert hidden_share(8.0, [0.0] * 4, computes) == 1


def test_published_case_of_thirteen_billion_parameters():
    """1K tokens of history, 100 new ones, 40 layers, compute 39 % of the sum."""
    layers, load, compute = 40, 0.61, 0.39
    plain = layers * (load + compute)
    assert 1 - preload_finish(layers, load, compute, 0) / plain == pytest.approx(0.38, abs=0.005)
    assert layers - (layers - 1) * compute / load == pytest.approx(15.07, abs=0.005)
    assert layers_to_preload(layers, load, compute) == 16
    with_buffer = preload_finish(layers, load, compute, 15)
    assert 1 - with_buffer / plain == pytest.approx(0.61, abs=0.005)
    assert (with_buffer - layers * compute) / plain < 0.002


def test_buffer_tends_to_bandwidth_times_the_difference_of_the_times():
    """k* layers of the history's bytes tend to B * (T_load * L_hist - T_pref * L_new)."""
    bandwidth, load_s, compute_s = 25e9, 0.4, 0.15
    layers = 10_000
    k = layers_to_preload(layers, load_s / layers, compute_s / layers)
    assert k * (bandwidth * load_s / layers) == pytest.approx(
        bandwidth * (load_s - compute_s), rel=1e-3
    )


# Llama-3.1-8B after 32k tokens of history, at half of 989 TFLOPS.
LLAMA_8B = 2 * 6.98e9 + 4 * 32 * 4096 * 32768


@pytest.mark.parametrize(
    ("gb_per_s", "kappa", "half_a_digit"),
    [(55, 26, 0.5), (25.5, 12, 0.5), (375, 180, 0.5), (14, 6.7, 0.05)],
)
def test_published_overlap_limits(gb_per_s, kappa, half_a_digit):
    limit = overlap_limit(
        flops_per_token=LLAMA_8B,
        kv_bytes_per_token=131_072,
        bytes_per_s=gb_per_s * 1e9,
        flops_per_s=494.5e12,
    )
    assert limit == pytest.approx(kappa, abs=half_a_digit)


def test_overlap_limit_is_where_the_load_no_longer_hides():
    rng = random.Random(6)
    for _ in range(2_000):
        flops, kv = 10 ** rng.uniform(8, 12), 10 ** rng.uniform(3, 6)
        link, rate = 10 ** rng.uniform(8, 11), 10 ** rng.uniform(11, 15)
        limit = overlap_limit(
            flops_per_token=flops, kv_bytes_per_token=kv, bytes_per_s=link, flops_per_s=rate
        )
        new = rng.randint(1, 1000)
        history = new * limit * rng.choice([0.5, 0.99, 1.01, 2])
        load_s, compute_s = kv / link * history, flops / rate * new
        assert (load_s <= compute_s) == (history / new <= limit)
        # With many layers that is where the bubble begins.
        layers = 1000
        run = preload_finish(layers, load_s / layers, compute_s / layers, 1)
        assert (run <= compute_s * 1.0015) == (history / new <= limit)


@pytest.mark.parametrize(
    ("loads", "computes", "options"),
    [
        ([1], [1, 2], {}),
        ([1], [1], {"resident": 2}),
        ([-1], [1], {}),
        ([1], [1], {"staging": 0}),
        ([1], [1], {"look_ahead": -1}),
    ],
)
def test_what_is_no_pipeline_is_refused(loads, computes, options):
    with pytest.raises(InvalidInputError):
        run_layers(loads, computes, **options)


def test_no_layers_take_no_time():
    assert run_layers([], []).finish_s == optimum([], []) == no_overlap([], []) == 0
