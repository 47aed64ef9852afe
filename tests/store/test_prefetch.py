"""Announced prompts: their disk pages are read ahead, and nothing is owed for it."""

import errno
import threading

import pytest
from layered import (
    FULL,
    MIXED,
    SPECS,
    TOKENS,
    held,
    nothing_is_held,
    reads_of,
    wait_for_disk,
)
from toy_model import feed, turn

from tierkv import StoreClosedError
from tierkv.devices.base import DeviceError
from tierkv.storage.testing import Gate

PROMPT = [*TOKENS, 7]
LONG = [(3 * i) % 61 for i in range(8 * 14 + 3)]


def run(store, tokens=PROMPT, **options):
    """Run one turn; return what was found."""
    sequence = store.begin(tokens, **options)
    found = sequence.found
    feed(sequence, tokens)
    store.check()
    sequence.abandon()
    return found


# -- it works ----------------------------------------------------------------------------


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_was_announced_is_read_once_and_found_in_host_memory(reopen, spec, restartable):
    store = reopen(spec)
    with store.announce(PROMPT) as announcement:
        assert announcement.tokens == len(TOKENS)
        assert announcement.wait(20)
        assert announcement.done()
        pages = announcement.pages
        assert store.stats().tiers["host"].pages == pages > 0
        nothing_is_held(store)
        assert run(store, restartable=restartable).host == len(TOKENS)
    counters = store.stats().counters
    assert counters["announced_pages"] == counters["prefetched_pages"] == pages
    assert counters["bytes_in"]["host"] == pages * spec.groups[0].page_bytes
    assert counters["delay_hits"] == counters["gated_pages"] == 0
    nothing_is_held(store)


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_sequence_joins_the_reads_under_way(reopen, disk, spec, restartable):
    store = reopen(spec)
    disk.hold()
    announcement = store.announce(PROMPT)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(run(store, restartable=restartable)), daemon=True
    )
    thread.start()
    while store.stats().counters["delay_hits"] < announcement.pages:
        assert thread.is_alive()
    store.check()
    disk.free()
    thread.join(30)
    assert found[0].disk == len(TOKENS)
    assert announcement.done()
    counters = store.stats().counters
    assert counters["prefetched_pages"] == announcement.pages
    assert counters["bytes_in"]["host"] == announcement.pages * spec.groups[0].page_bytes
    nothing_is_held(store)


def test_announcing_twice_reads_once(reopen, disk):
    store = reopen(MIXED)
    disk.hold()
    first, second = store.announce(PROMPT), store.announce(PROMPT)
    assert first.pages == second.pages
    assert store.stats().counters["announced_pages"] == first.pages
    first.cancel()
    store.check()
    disk.free()
    assert second.wait(20)
    assert run(store).host == len(TOKENS)
    nothing_is_held(store)


def test_several_announcements_are_held_as_one(reopen, disk):
    from tierkv.data_plane.announcing import Announcement

    other = [(2 * i) % 37 for i in range(20)]
    store = reopen(FULL, TOKENS, other)
    disk.hold()
    both = Announcement.all_of([store.announce(PROMPT), store.announce([*other, 7])])
    assert both.tokens == len(TOKENS) + len(other)
    assert not both.wait(0.01)
    disk.free()
    assert both.wait(20)
    assert run(store).host == len(TOKENS)


# -- bounds ------------------------------------------------------------------------------


def test_it_takes_half_of_the_host_tier_and_never_waits(reopen, disk):
    other = [(2 * i) % 37 for i in range(8 * 9)]
    store = reopen(FULL, LONG, other, host=16)
    disk.hold()
    first = store.announce([*LONG, 7])
    assert first.pages == 8
    assert held(store)["host"] == 8
    assert store.announce([*other, 7]).pages == 0  # the share is taken
    disk.free()
    assert first.wait(20)
    assert store.stats().tiers["host"].pages == 8
    disk.hold()
    assert store.announce([*other, 7]).pages == 8  # what the first brought may have to go
    disk.free()
    assert run(store, [*LONG, 7]).total == len(LONG)
    nothing_is_held(store)


def test_pages_in_use_and_pages_that_are_nowhere_else_stay(reopen):
    store = reopen(FULL, TOKENS, host=8)
    mine = [77] * 8 * 6
    turn(store, mine)
    with store._core.lock:
        rows = store._core.index.select(within=(0,))
        store._core.index.pin(rows, 0)
    store._transfers.copy_to_host(rows, store._core.deadline())  # six dirty pages in host memory
    with store._core.lock:
        store._core.index.unpin(rows, 1)
        store._core.index.unpin(rows, 0)
    assert store.stats().tiers["host"].pages == 6
    announcement = store.announce(PROMPT)
    assert announcement.pages == 2  # what was free
    assert announcement.wait(20)
    assert store.stats().tiers["host"].pages == 8
    assert run(store).total == len(TOKENS)
    nothing_is_held(store)


def test_a_sequence_waits_for_host_slots_that_announced_reads_hold(reopen, disk):
    other = [(2 * i) % 37 for i in range(8 * 6)]
    store = reopen(FULL, LONG, other, host=8)
    disk.hold()
    store.announce([*LONG, 7])
    found = []
    thread = threading.Thread(target=lambda: found.append(run(store, [*other, 7])), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    disk.free()
    thread.join(30)
    assert found[0].total == len(other)
    nothing_is_held(store)


@pytest.mark.parametrize("tokens", [[], [3], [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]])
def test_announcing_what_is_not_there_is_nothing(reopen, tokens):
    store = reopen(FULL)
    announcement = store.announce(tokens)
    assert (announcement.tokens, announcement.pages) == (0, 0)
    assert announcement.done()
    assert announcement.wait(0)
    nothing_is_held(store)


def test_without_a_disk_there_is_nothing_to_read(open_store):
    store = open_store(path=None, disk=None)
    turn(store, TOKENS)
    assert store.announce(PROMPT).pages == 0


# -- nobody comes, or somebody changes their mind ----------------------------------------


def test_an_announcement_that_nobody_collects_is_taken_in_when_room_is_looked_for(reopen, disk):
    store = reopen(MIXED)
    disk.hold()
    store.announce(PROMPT)
    disk.free()
    wait_for_disk(store)
    (read,) = reads_of(store)
    store.check()
    assert held(store) == {"device": 0, "host": 0}  # which looks for room
    assert store.stats().tiers["host"].pages == len(read.rows)
    turn(store, [55] * 30)
    nothing_is_held(store)


@pytest.mark.parametrize("spec", SPECS)
def test_it_can_be_cancelled_after_any_read(reopen, disk, spec, monkeypatch):
    monkeypatch.setattr("tierkv.data_plane.announcing._PAGES_A_READ", 1)
    for done in range(8):
        store = reopen(SPECS[spec])
        disk.hold()
        announcement = store.announce(PROMPT)
        disk.step(min(done, announcement.pages))
        store.check()
        announcement.cancel()
        announcement.cancel()
        store.check()
        assert announcement.done()
        if done % 2:  # at once, while a read that had begun still holds its slot
            disk.free()
            assert run(store).total == len(TOKENS)
        disk.free()
        nothing_is_held(store)
        assert run(store).total == len(TOKENS)
        assert store.stats().counters["disk_timeouts"] == 0
        store.close()


@pytest.mark.parametrize("spec", SPECS)
def test_a_sequence_keeps_what_the_announcer_gives_up(reopen, disk, spec, monkeypatch):
    monkeypatch.setattr("tierkv.data_plane.announcing._PAGES_A_READ", 1)
    for done in range(0, 6):
        store = reopen(SPECS[spec])
        disk.hold()
        announcement = store.announce(PROMPT)
        sequence = store.begin(PROMPT, restartable=True)
        disk.step(min(done, announcement.pages))
        announcement.cancel()
        store.check()
        disk.free()
        feed(sequence, PROMPT)
        sequence.abandon()
        nothing_is_held(store)
        store.close()


def test_a_store_closes_over_announcements(reopen, disk):
    store = reopen(FULL)
    disk.hold()
    announcement = store.announce(PROMPT)
    disk.step(1)
    disk.free()
    store.close()
    assert announcement.done()
    assert announcement.wait(0)
    announcement.cancel()
    with pytest.raises(StoreClosedError):
        store.announce(PROMPT)


# -- trouble -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["flip", errno.EIO, errno.EAGAIN], ids=["flip", "eio", "eagain"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_read_that_fails_is_a_shorter_prefix(reopen, disk, spec, fault):
    for skip in (0, 1, 3):
        store = reopen(SPECS[spec])
        disk.inject("preadv", fault, skip=skip, times=2, match="slabs")
        assert store.announce(PROMPT).wait(20)
        assert run(store).total <= len(TOKENS)
        disk.clear()
        turn(store, PROMPT)
        assert run(store, [*PROMPT, 1]).total == len(PROMPT)
        nothing_is_held(store)
        store.close()


@pytest.mark.parametrize("restartable", [False, True])
def test_a_read_that_hangs_is_a_miss_at_its_own_deadline(reopen, disk, restartable):
    store = reopen(FULL, io_timeout_s=0.3)
    gate = Gate()
    disk.inject("preadv", gate, match="slabs")
    announcement = store.announce(PROMPT)
    assert gate.reached.wait(20)
    assert not announcement.wait(0.01)
    assert announcement.wait(10)  # at its deadline it is given up
    store.check()
    assert store.stats().counters["disk_timeouts"] == announcement.pages
    assert held(store)["host"] > 0  # the device may still write there
    assert store._transfers.reads.trusted is False
    gate.opened.set()
    disk.clear()
    assert run(store, restartable=restartable).total == len(TOKENS)
    nothing_is_held(store)


def test_a_hanging_read_joined_behind_the_gate_is_a_device_error(reopen, disk):
    store = reopen(FULL, io_timeout_s=0.3)
    gate = Gate()
    disk.inject("preadv", gate, match="slabs")
    store.announce(PROMPT)
    sequence = store.begin(PROMPT, restartable=True)
    assert sequence.found.disk == len(TOKENS)
    with pytest.raises(DeviceError):
        feed(sequence, PROMPT)
    sequence.abandon()
    gate.opened.set()
    disk.clear()
    assert run(store, restartable=True).total == len(TOKENS)
    nothing_is_held(store)
