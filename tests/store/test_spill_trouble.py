"""Faults under sequences longer than the pool: an error that can be told, never wrong bytes."""

import pytest
from toy_model import feed, full_group

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
