"""Sequences that fork, and sequences that take tokens back."""

import pytest
from toy_model import MIXED, SLIDING, SPECS, feed, sliding_group, states, turn

from tierkv import (
    CacheSpec,
    InvalidInputError,
    PoolExhaustedError,
    SequenceEndedError,
    Tier,
)

LENGTHS = [1, 3, 4, 5, 8, 11, 16]


def used(store):
    return store.stats().tiers[Tier.DEVICE.label].used_bytes // store.spec.slot_bytes


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", LENGTHS)
def test_forks_go_on_apart_and_hold_what_each_was_fed(open_store, spec, length):
    store = open_store(spec, device=200)
    tokens = list(range(length))
    first = store.begin(tokens)
    feed(first, tokens)
    forks = [first.fork(), first.fork()]
    store.check()
    talks = []
    for number, sequence in enumerate([first, *forks]):
        talk = tokens + [100 * (number + 1) + i for i in range(7)]
        feed(sequence, talk, length + 3)
        store.check()
        feed(sequence, talk)
        talks.append(talk)
        store.check()
    for sequence, talk in zip([first, *forks], talks, strict=True):
        sequence.finish(talk)
        store.check()
    for talk in talks:
        assert turn(store, [*talk, 5]).total == len(talk)


def test_forks_share_every_page_until_they_write(open_store):
    store = open_store(MIXED, device=200)
    tokens = list(range(23))
    first = store.begin(tokens)
    feed(first, tokens)
    before = used(store)
    forks = [first.fork() for _ in range(5)]
    assert used(store) == before
    feed(forks[0], [*tokens, 1])
    # The partial page of each group; the window's pages stay shared.
    assert used(store) == before + 2
    for fork in forks:
        fork.abandon()
        store.check()
    assert used(store) == before
    feed(first, [*tokens, 1, 2])
    first.abandon()
    assert used(store) == 0


@pytest.mark.parametrize("length", [3, 4])
def test_pages_obtained_ahead_are_not_shared(open_store, length):
    store = open_store(device=200)
    tokens = list(range(length))
    first = store.begin(tokens, max_new_tokens=20)
    feed(first, tokens)
    fork = first.fork()
    left, right = [*tokens, *range(50, 60)], [*tokens, *range(70, 80)]
    for cut in range(length + 1, length + 11):
        feed(first, left, cut)
        feed(fork, right, cut)
        store.check()
    first.finish(left)
    fork.finish(right)
    for talk in (left, right):
        assert turn(store, [*talk, 1]).total == len(talk)


def test_a_fork_outlives_its_parent_however_that_ends(open_store):
    for end in ("finish", "abandon"):
        store = open_store(MIXED, device=200, path=None, disk=None)
        tokens = list(range(13))
        first = store.begin(tokens)
        feed(first, tokens)
        fork = first.fork()
        getattr(first, end)()
        store.check()
        talk = [*tokens, 50, 51, 52, 53, 54]
        feed(fork, talk)
        fork.finish(talk)
        assert turn(store, [*talk, 1]).total == len(talk)
        assert (turn(store, [*tokens, 1]).total == 13) == (end == "finish")
        store.close()


def test_a_page_that_one_fork_commits_stays_while_another_uses_it(open_store):
    """Full pages and tails become visible while forks hold their slots; eviction must wait."""
    store = open_store(device=12, host=None, path=None, disk=None)
    tokens = list(range(10))
    first = store.begin(tokens)
    feed(first, tokens)
    fork = first.fork()
    first.finish(tokens)
    store.check()
    for other in range(4):  # all room that is left, again and again
        turn(store, [1000 * other + 500 + i for i in range(32)])
    feed(fork, [*tokens, 1, 2, 3])  # compares every byte
    fork.finish([*tokens, 1, 2, 3])
    store.check()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("back", [1, 2, 3, 5, 9])
def test_tokens_taken_back_leave_no_trace(open_store, spec, back):
    store = open_store(spec, device=200)
    tokens = list(range(14))
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    sequence.keep_from(14)
    drafted = tokens + [70 + i for i in range(back)]
    for cut in (15, len(drafted)):
        if cut > sequence.length:
            feed(sequence, drafted, cut)
    sequence.crop(14)
    store.check()
    assert sequence.length == 14
    right = [*tokens, *range(30, 41)]
    feed(sequence, right, 15)
    feed(sequence, right)
    sequence.finish(right)
    store.check()
    assert turn(store, [*right, 1]).total == len(right)
    assert turn(store, [*drafted, 1]).total <= 14


@pytest.mark.parametrize("spec", [SPECS["full"], SPECS["latent"]], ids=["full", "latent"])
@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 11])
def test_crop_into_pages_that_were_committed_or_found(open_store, spec, length):
    store = open_store(spec, device=200)
    tokens = list(range(12))
    turn(store, tokens)
    sequence = store.begin([*tokens, 1])
    assert sequence.found.total == 12
    sequence.crop(length)
    other = [*tokens[:length], *range(60, 75)]
    feed(sequence, other)
    sequence.finish(other)
    store.check()
    assert turn(store, [*other, 1]).total == len(other)
    assert turn(store, [*tokens, 1]).total == 12, "what was committed is untouched"


def test_crop_and_finish_at_once_saves_the_shorter_tail(open_store):
    store = open_store(MIXED, device=200)
    tokens = list(range(11))
    sequence = store.begin(tokens)
    sequence.keep_from(0)
    feed(sequence, tokens)
    sequence.commit(tokens)
    fork = sequence.fork()
    sequence.crop(6)
    sequence.finish(tokens[:6])
    fork.finish(tokens)
    store.check()
    assert turn(store, [*tokens[:6], 99]).total == 6
    assert turn(store, [*tokens, 99]).total == 11


def test_a_window_that_is_gone_cannot_be_returned_to(open_store):
    store = open_store(SLIDING, device=100)
    tokens = list(range(40))
    sequence = store.begin(tokens)
    feed(sequence, tokens, 12)
    feed(sequence, tokens)
    with pytest.raises(InvalidInputError, match=r"keep_from\(21\)"):
        sequence.crop(21)
    assert sequence.length == 40
    sequence.finish(tokens)
    store.check()


def test_senseless_crops_are_refused(open_store):
    store = open_store()
    sequence = store.begin([1, 2, 3])
    feed(sequence, [1, 2, 3])
    for length in (-1, 4):
        with pytest.raises(InvalidInputError, match="holds 3 tokens"):
            sequence.crop(length)
    with sequence.gate.layer(0) as layer:
        layer.append(*[part[:, :1] for part in layer.read()])
    for use in (lambda: sequence.crop(1), sequence.fork):
        with pytest.raises(InvalidInputError, match="ended in the middle"):
            use()
    sequence.abandon()
    for use in (lambda: sequence.crop(1), sequence.fork, lambda: sequence.keep_from(1)):
        with pytest.raises(SequenceEndedError):
            use()


def test_a_pool_without_room_for_a_copy_refuses_the_fork_that_writes(open_store):
    store = open_store(device=4, host=None, path=None, disk=None)
    tokens = list(range(14))
    first = store.begin(tokens)
    feed(first, tokens)
    fork = first.fork()
    with pytest.raises(PoolExhaustedError):
        feed(fork, [*tokens, 1])
    store.check()
    fork.abandon()
    feed(first, [*tokens, 2])
    first.finish([*tokens, 2])
    store.check()


def test_begin_with_a_limit(open_store):
    store = open_store(device=60)
    tokens = list(range(12))
    turn(store, tokens)
    for limit in (0, 3, 4, 11, 12, 99):
        with store.begin([*tokens, 1], limit=limit) as sequence:
            assert sequence.length == min(limit, 12)
            feed(sequence, [*tokens, 1])
    with pytest.raises(InvalidInputError, match="limit"):
        store.begin(tokens, limit=-1)
    store.check()


def test_a_commit_between_obtaining_pages_and_writing_them(open_store):
    """What a step has obtained and not written must be obtained again, not be published."""
    spec = CacheSpec(groups=(sliding_group(layers=(0, 1), page_tokens=8, window=4),))
    tokens = list(range(13))
    for between in ("commit", "fork", "keep_from"):
        store = open_store(spec, device=40, path=None, disk=None, boundary_pages=8)
        sequence = store.begin(tokens)
        feed(sequence, tokens, 5)
        sequence.gate.make_room(0, 8)  # a step is prepared, and given up
        if between == "commit":
            sequence.commit(tokens)
        elif between == "fork":
            sequence.fork().finish(tokens[:5])
        else:
            sequence.keep_from(2)
        feed(sequence, tokens)
        sequence.finish(tokens)
        store.check()
        assert turn(store, [*tokens, 1]).total == 13
        store.close()


def test_a_commit_in_the_middle_of_a_forward_is_refused(open_store):
    store = open_store(SLIDING)
    tokens = list(range(13))
    sequence = store.begin(tokens)
    feed(sequence, tokens, 5)
    with sequence.gate.layer(0) as layer:
        layer.append(*states(SLIDING, 0, tokens, 5, 13))
    for end in (sequence.commit, sequence.finish):
        with pytest.raises(InvalidInputError, match="ended in the middle"):
            end(tokens)
    with sequence.gate.layer(1) as layer:  # the forward goes on after all
        layer.append(*states(SLIDING, 1, tokens, 5, 13))
    sequence.finish(tokens)
    assert turn(store, [*tokens, 1]).total == 13


def test_a_fork_in_the_middle_of_a_prompt_may_go_on_otherwise(open_store):
    store = open_store()
    tokens = list(range(12))
    sequence = store.begin(tokens)
    feed(sequence, tokens, 7)
    fork = sequence.fork()
    other = [*tokens[:7], 50, 51, 52]
    feed(fork, other)
    fork.finish(other)
    feed(sequence, tokens)
    sequence.finish()
    assert turn(store, [*other, 1]).total == 10
