"""Faults under sequences longer than the pool: an error that can be told, never wrong bytes."""

import pytest
from toy_model import MIXED, feed, full_group, turn

from tierkv import CacheSpec, PoolExhaustedError
from tierkv.devices.base import DeviceError
from tierkv.devices.cpu import CpuDevice
from tierkv.devices.faults import Faults
from tierkv.devices.sim import SimDevice

TALL = CacheSpec(groups=(full_group(layers=tuple(range(6))),))


def tokens_of(count, seed=0):
    return [(7 * i + seed) % 97 for i in range(count)]


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def small_store(open_store, device_name, faults):
    """A store whose pool is outgrown after 64 tokens."""
    device = {"cpu": CpuDevice, "sim": SimDevice}[device_name](faults=faults)
    return open_store(TALL, device=18, host=48, disk=None, torch_device=device, io_timeout_s=5)


@pytest.fixture
def nearly_full(small_store):
    """A sequence of the store that is going to spill soon."""
    sequence = small_store.begin(tokens_of(1))
    feed(sequence, tokens_of(1))
    feed(sequence, tokens_of(64))
    yield sequence
    sequence.abandon()
    small_store.check()
    assert {small_store.stats().tiers[tier].held for tier in ("device", "host")} == {0}


def grow(sequence, lengths):
    for length in lengths:
        feed(sequence, tokens_of(length))


@pytest.mark.parametrize("after", range(0, 30))
def test_a_load_into_the_ring_that_failed_is_not_forgotten(nearly_full, faults, after):
    """Though more pages spill, and are loaded, before the layer is entered that it was for."""
    faults.fail_copies("load", after=after)
    with pytest.raises(DeviceError):
        grow(nearly_full, range(68, 100, 4))
    assert faults.struck == 1


@pytest.mark.parametrize("after", range(0, 6))
def test_a_page_that_cannot_spill_now_may_spill_later(nearly_full, faults, after):
    faults.fail_copies("save", after=after)
    length = 64
    for _ in range(12):
        try:
            feed(nearly_full, tokens_of(length + 4))
            length += 4
        except (PoolExhaustedError, DeviceError):
            if nearly_full.gate.written[0] != nearly_full.gate.written[5]:
                return  # a page was not written back
    assert length > 90


def nothing_is_held(store):
    store.check()
    assert {store.stats().tiers[tier].held for tier in ("device", "host")} == {0}


@pytest.fixture
def make_store(open_store, device_name, faults):
    def make(spec=TALL, **options):
        device = {"cpu": CpuDevice, "sim": SimDevice}[device_name](faults=faults)
        return open_store(spec, torch_device=device, **options)

    return make


def test_a_page_that_arrives_late_is_not_taken_down_before(make_store, faults):
    store = make_store(device=14, host=16, disk=None, io_timeout_s=0.2)
    turn(store, tokens_of(1))
    faults.hang("load", after=1, seconds=5.0)
    sequence = store.begin(tokens_of(30), device_pages=5)  # a copy of the page has to spill
    assert sequence.length == 0
    store.check()
    faults.clear()
    feed(sequence, tokens_of(30))
    sequence.finish()
    store._loader._stream.record().wait(20)
    turn(store, tokens_of(40))
    nothing_is_held(store)


def test_pages_that_leave_slowly_are_counted_after_the_end(make_store):
    store = make_store(device=28, host=64, disk=None)
    sequence = store.begin(tokens_of(60), device_pages=14)
    feed(sequence, tokens_of(60))
    other = sequence.fork()
    sequence.crop(0)  # while loads ahead still read its pages
    sequence.abandon()
    store.check()
    feed(other, [*tokens_of(60), 1])
    other.abandon()
    nothing_is_held(store)


def test_a_spilled_tail_is_handed_over_when_nothing_loads_from_it(make_store):
    store = make_store(MIXED, device=8, host=None, disk=40, write_through=True)
    tokens = tokens_of(30)
    sequence = store.begin(tokens)
    feed(sequence, tokens[:1], 1)
    for length in range(4, 31, 2):
        feed(sequence, tokens, length)
    assert sequence.spilled_pages == 8
    assert sequence.finish(tokens).tail_pages > 0
    nothing_is_held(store)


def test_a_copy_of_a_page_that_fails_is_a_miss_and_leaks_nothing(make_store, faults):
    store = make_store(device=30, host=64, disk=None)
    tokens = tokens_of(6)
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    other = sequence.fork()
    faults.fail_copies("compute")
    assert sequence.commit(tokens, turn_end=True).tail_pages == 0
    faults.fail_copies("compute", count=None)
    with pytest.raises(PoolExhaustedError):
        feed(other, [*tokens, 1])
    faults.clear()
    feed(other, [*tokens, 1])
    for each in (sequence, other):
        each.abandon()
    nothing_is_held(store)


def test_a_late_copy_in_host_memory_keeps_its_slots(make_store, faults):
    store = make_store(device=8, host=40, disk=None, io_timeout_s=0.2)
    tokens = tokens_of(30)
    sequence = store.begin(tokens, device_pages=4)
    feed(sequence, tokens)
    other = sequence.fork()
    faults.hang("save", seconds=0.5)
    with pytest.raises(PoolExhaustedError):
        feed(other, [*tokens, 1])
    store.check()
    faults.clear()
    sequence.abandon()
    other.abandon()
    store._transfers._save.record().wait(20)
    turn(store, tokens_of(30, seed=3))
    nothing_is_held(store)


def test_a_tail_that_was_there_already_gives_its_slot_back_behind_its_copy(open_store):
    device = SimDevice()
    store = open_store(TALL, disk=None, torch_device=device)
    tokens = tokens_of(6)
    for each in (store.begin(tokens), store.begin(tokens)):
        feed(each, tokens)
        device.compute.run("a long kernel", 5.0)
        each.commit(tokens, turn_end=True)
    with store.begin([*tokens, 7]) as again:  # its copy of the tail goes into that slot
        assert again.length == 6
        feed(again, [*tokens, 7])
