"""Sequences longer than the device pool: the same bytes, streamed layer by layer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import feed, full_group, latent_group, sliding_group, turn

from tierkv import CacheSpec, PoolExhaustedError, SequenceTooLongError
from tierkv.control_plane.spilling import (
    can_spill,
    fits,
    longest_that_fits,
    pages_per_ring_slot,
    plan_spill,
    ring_depth,
)

# Groups with layers enough that their pages can stream: rings of depth 1, 2 and 3.
TALL = CacheSpec(groups=(full_group(layers=tuple(range(6))),))
PAIR = CacheSpec(groups=(full_group(layers=(0, 1)),))
TEN = CacheSpec(groups=(full_group(layers=tuple(range(10)), heads=1, dim=16),))
WINDOWED = CacheSpec(
    groups=(full_group(layers=(0, 2, 4, 6)), sliding_group(layers=(1, 3, 5), page_tokens=2))
)
TWO = CacheSpec(
    groups=(full_group(layers=(0, 1, 2, 3)), latent_group(layers=(4, 5, 6, 7), page_tokens=8))
)
SPECS = {"tall": TALL, "pair": PAIR, "ten": TEN, "windowed": WINDOWED, "two": TWO}


def tokens_of(count, seed=0):
    return [(7 * i + seed) % 97 for i in range(count)]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_prompt_longer_than_the_pool_runs_and_is_found_again(open_store, spec):
    store = open_store(spec, device=18, host=48)
    tokens = tokens_of(72)
    sequence = store.begin(tokens, max_new_tokens=8)
    assert sequence.spilled_pages > 0
    feed(sequence, tokens)
    store.check()
    for token in range(8):
        tokens.append(token)
        feed(sequence, tokens)
    store.check()
    sequence.finish(tokens)
    store.check()
    again = store.begin([*tokens, 3], max_new_tokens=4)
    assert again.found.total == len(tokens)
    assert again.spilled_pages > 0
    tokens.append(3)
    feed(again, tokens)
    again.abandon()
    store.check()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_sequence_that_outgrows_the_pool_spills_while_it_runs(open_store, spec):
    """Nobody said how long it would become: resident pages leave one after the other."""
    store = open_store(spec, device=18, host=48)
    tokens = tokens_of(5)
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    while len(tokens) < 80:
        tokens += tokens_of(3, seed=len(tokens))
        feed(sequence, tokens)
        store.check()
    assert store.stats().counters["spilled_pages"] > 0
    report = sequence.commit(tokens)
    assert report.pages > 0
    tokens += [1, 2]
    feed(sequence, tokens)
    sequence.finish(tokens)
    # The tail page needs a copy of its own, for which there may be no room.
    assert turn(store, [*tokens, 5], finish=False).total in (80, len(tokens))


@pytest.mark.parametrize("spec", [TALL, WINDOWED], ids=["tall", "windowed"])
def test_sequences_with_limits_share_a_pool_that_is_too_small_for_both(open_store, spec):
    store = open_store(spec, device=28, host=64)
    both = [tokens_of(64, seed) for seed in (1, 2)]
    running = [store.begin(t, max_new_tokens=8, device_pages=14) for t in both]
    for sequence, tokens in zip(running, both, strict=True):
        feed(sequence, tokens)
    for step in range(8):
        for sequence, tokens in zip(running, both, strict=True):
            tokens.append(step)
            feed(sequence, tokens)
    store.check()
    for sequence, tokens in zip(running, both, strict=True):
        sequence.finish(tokens)
    for tokens in both:
        assert turn(store, [*tokens, 1], finish=False).total == len(tokens)


@pytest.mark.parametrize("spec", [TALL, TEN, TWO], ids=["tall", "ten", "two"])
def test_forks_and_crops_of_spilled_sequences_hold_what_each_was_fed(open_store, spec):
    store = open_store(spec, device=28, host=64)
    tokens = tokens_of(50)
    sequence = store.begin(tokens, device_pages=14)
    feed(sequence, tokens)
    other = sequence.fork()
    left, right = [*tokens, 1, 2, 3], [*tokens, 4]
    feed(sequence, left)
    feed(other, right)
    store.check()
    for cut in (49, 30, 7, 2):
        other.crop(cut)
        right = [*right[:cut], *tokens_of(3, seed=cut)]
        feed(other, right)
        store.check()
    other.finish(right)
    left += [9] * 6
    feed(sequence, left)
    sequence.finish(left)
    store.check()
    assert turn(store, [*left, 8], finish=False).total == len(left)
    assert turn(store, [*right, 8], finish=False).total == len(right)


def test_layers_may_be_entered_in_any_order_and_again(open_store):
    store = open_store(TEN, device=8, host=64)
    tokens = tokens_of(60)
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    from toy_model import expect_state

    for layer in (7, 7, 2, 9, 0, 4, 3, 2, 1, 0):
        with sequence.gate.layer(layer) as view:
            expect_state(TEN, layer, tokens, len(tokens), view.read())
    sequence.abandon()


def test_what_device_and_host_together_cannot_hold_is_refused_with_the_arithmetic(open_store):
    store = open_store(TALL, device=6, host=10, disk=None)
    longest = longest_that_fits(TALL, device=6, host=10)
    assert 6 * 4 < longest <= 16 * 4
    with pytest.raises(SequenceTooLongError, match=f"needs .* pages .* has 6 .*{longest} tokens"):
        store.begin(tokens_of(longest + 1))
    turn(store, tokens_of(longest))
    store.check()


def test_growing_beyond_device_and_host_is_an_error_and_leaves_nothing(open_store):
    store = open_store(TALL, device=6, host=10, disk=None)
    tokens = tokens_of(4)
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    grown = tokens_of(200)

    def grow():
        for stop in range(8, len(grown), 4):
            feed(sequence, tokens_of(4) + grown[4:stop], stop)

    with pytest.raises((PoolExhaustedError, SequenceTooLongError)):
        grow()
    sequence.abandon()
    store.check()
    assert store.stats().tiers["device"].used_bytes == 0


@given(
    pages=st.lists(st.integers(0, 40), min_size=2, max_size=2),
    fixed=st.integers(0, 3),
    device=st.integers(0, 60),
    host=st.integers(0, 60),
)
@settings(max_examples=300, deadline=None)
def test_the_fewest_pages_spill_that_make_the_sequence_fit(pages, fixed, device, host):
    groups = WINDOWED.groups
    able = [can_spill(group) for group in groups]
    assert able == [True, False]

    def need(spilled):
        ring = -(-spilled // pages_per_ring_slot(groups[0]))
        return fixed + pages[0] - spilled + ring + pages[1]

    enough = [s for s in range(pages[0] + 1) if need(s) <= device and s <= host]
    found = plan_spill(groups, pages, fixed=fixed, device=device, host=host)
    assert found == ([min(enough), 0] if enough else None)


def test_rings_are_as_deep_as_the_layers_allow():
    assert [ring_depth(n) for n in (1, 2, 3, 4, 6, 30)] == [1, 1, 1, 2, 3, 3]
    assert not can_spill(full_group(layers=(0,)))
    assert fits(TALL, 10**6, device=2, host=10) is False
