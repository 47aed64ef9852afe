"""Making room: nobody waits for room that only they themselves could give."""

import time

import pytest
from toy_model import MIXED, feed, turn


def test_loading_from_a_full_host_tier_does_not_wait_for_itself(open_store):
    """All of host memory was pinned by the prefix being loaded, so nothing could leave it.

    The pages leaving the device counted as pages on their way, and the load waited for its
    own evictions until the deadline.
    """
    store = open_store(device=13, host=8, io_timeout_s=20.0)
    talks = [[start] * 44 for start in (1, 2, 3)]
    started = time.monotonic()
    found = [0, 0, 0]
    for which in (0, 1, 2, 2, 1, 0, 0, 1, 2):
        talks[which].append(7)
        found[which] += turn(store, talks[which]).total
    assert time.monotonic() - started < 15
    assert all(found), "some talk was never found again"


def test_pages_reach_the_disk_though_pages_in_use_fill_host_memory(open_store):
    """They used to be dropped: 8 host pages, all pinned by the prefix on its way in."""
    store = open_store(device=13, host=8)
    talks = [[start] * 44 for start in (1, 2, 3)]
    for which in (0, 1, 2, 2, 1, 0, 0, 1, 2):
        before = len(talks[which])
        talks[which].append(7)
        found = turn(store, talks[which]).total
        assert found in (0, before)
    assert store.stats().counters["dropped_pages"] == 0
    assert all(turn(store, [*talk, 9], finish=False).total == len(talk) for talk in talks)


def test_a_flush_is_whole_though_pins_fill_host_memory(open_store):
    store = open_store(device=40, host=8)
    for start in (1, 2, 3, 4):
        turn(store, [start] * 16)
    turn(store, [9] * 160)  # pushes the others down
    with store.begin([1] * 16 + [5]), store.begin([2] * 16 + [5]):
        report = store.flush()
    assert report.ok
    assert report.failed_pages == 0


@pytest.mark.parametrize("length", [18, 20])
def test_what_fits_cold_fits_with_its_prefix_found(open_store, length):
    """A page used in part needs a copy beside it, for which there was no room."""
    store = open_store(device=5)
    tokens = list(range(length))
    assert turn(store, tokens).total == 0
    assert turn(store, tokens).total == 16  # the fifth page has no room for a copy
    # By now the fifth page is in host memory, and what it holds needs no second page here.
    assert turn(store, [*tokens, 1][:20]).total == min(length, 19)


def test_windows_of_boundaries_give_way_to_the_sequence_itself(open_store):
    store = open_store(MIXED, device=40)
    tokens = list(range(120))
    sequence = store.begin(tokens[:4], max_new_tokens=116)
    for stop in range(4, 121):
        feed(sequence, tokens, stop)
    sequence.finish(tokens)
    assert turn(store, [*tokens[:110], 7], finish=False).total <= 110
    store.check()
