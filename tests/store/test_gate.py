"""The gate, the page table, the pool and the CPU device, each alone."""

import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from toy_model import FULL, LATENT, MIXED, SLIDING, feed, full_group, sliding_group, states

from tierkv import CapacityError, InvalidInputError, SequenceEndedError, StoreClosedError
from tierkv.control_plane.table import GroupTable, Run
from tierkv.data_plane.extents import Extent, component_views
from tierkv.data_plane.gate import LayerGate
from tierkv.data_plane.pool import DevicePool
from tierkv.devices import open_device
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.devices.cpu import CpuDevice

SPECS = {"full": FULL, "latent": LATENT, "mixed": MIXED, "sliding": SLIDING}


@pytest.fixture
def device():
    made = CpuDevice()
    yield made
    made.check()
    made.close()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_layers_and_components_tile_a_page(device, spec):
    pool = DevicePool(device, spec, 4 * spec.slot_bytes)
    for group in spec.groups:
        covered = []
        for layer in group.layers:
            place = Extent(group.layer_range(layer)[0], pool.slot_bytes, pool.num_slots, 0)
            for view in component_views(pool.typed(group.dtype), group, place):
                pool.memory.zero_()
                view[2].fill_(1.0)
                touched = pool.memory[2].nonzero().flatten()
                assert not pool.memory[[0, 1, 3]].any()
                first, last = int(touched[0]), int(touched[-1])
                size = view[2].numel() * view.element_size()
                start = last + 1 - size if first + size > last + 1 else first
                covered.append((start - start % view.element_size(), size))
        at = 0
        for start, size in covered:
            assert abs(start - at) < 4  # a float's low bytes may be zero
            at += size
        assert at == group.page_bytes


@given(
    pages=st.integers(1, 7),
    length=st.integers(1, 28),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_reading_gathers_pages_wherever_they_lie(pages, length, seed):
    """Against plain indexing, for slots in any order and runs of any length."""
    length = min(length, pages * 4)
    device = CpuDevice()
    pool = DevicePool(device, FULL, 12 * FULL.slot_bytes)
    generator = torch.Generator().manual_seed(seed)
    table = GroupTable(FULL.groups[0])
    for page, slot in enumerate(torch.randperm(12, generator=generator)[:pages].tolist()):
        table.set(page, slot)
    gate = LayerGate(device, pool, [table], {1: 0}, 0, reserve=lambda a, b: None, timeout_s=1)
    state = [torch.randn(2, length, 32, generator=generator) for _ in range(2)]
    cut = int(torch.randint(0, length + 1, (1,), generator=generator))
    with gate.layer(1) as layer:
        for part in (slice(0, cut), slice(cut, length)):
            if part.stop > part.start:
                layer.append(*[s[:, part] for s in state])
        for got, right in zip(layer.read(), state, strict=True):
            assert torch.equal(got, right)
            assert got.is_contiguous()
    device.close()


def test_runs_join_adjacent_slots():
    table = GroupTable(full_group())
    for page, slot in enumerate([5, 6, 7, 2, 3, 9]):
        table.set(page, slot)
    assert table.runs(0, 24) == [Run(5, 3, 0), Run(2, 2, 12), Run(9, 1, 20)]
    assert table.runs(5, 12) == [Run(6, 2, 4)]
    table.set(3, 8)
    assert table.runs(0, 16) == [Run(5, 4, 0)]


def test_a_sliding_table_keeps_windows_of_the_end_and_of_boundaries():
    table = GroupTable(sliding_group(page_tokens=2, window=6))
    assert table.missing(0, 40, 16) == [5, 6, 7, 13, 14, 15, 17, 18, 19]
    for page in table.missing(0, 40, 16):
        table.set(page, page)
    assert table.missing(40, 1, 16) == [20]
    assert table.outdated(40, 0, 16) == []
    assert table.outdated(40, 16, 16) == [5, 6, 7]
    assert table.outdated(40, 40, 16) == [5, 6, 7, 13, 14, 15]


def test_a_pool_too_small_for_a_page_of_each_group_is_refused(device):
    with pytest.raises(CapacityError, match="2 layer groups"):
        DevicePool(device, MIXED, MIXED.slot_bytes)


def test_unknown_devices_are_refused():
    with pytest.raises(InvalidInputError, match="'cpu'"):
        open_device("tpu")


def test_copies_run_in_order_and_an_event_says_when(device):
    stream = device.stream("load")
    memory = device.allocate(3, 64)
    memory[0] = 7
    stream.copy([CopyOp(memory[1], memory[0])])
    stream.copy([CopyOp(memory[2], memory[1])])
    event = stream.record()
    assert event.wait(10)
    assert event.done()
    assert (memory == 7).all()
    assert device.stats().copies == 2
    assert device.stats().copied_bytes == 128


def test_a_failed_copy_is_reported_by_its_event_and_by_no_other(device):
    stream = device.stream("load")
    memory = device.allocate(2, 64)
    stream.copy([CopyOp(memory[0], memory[1][:3])])
    with pytest.raises(DeviceError, match="a copy on the CPU device failed"):
        stream.record().wait(10)
    assert stream.record().wait(10)
    assert device.stats().failed_copies == 1


def test_a_wait_ends_at_its_deadline(device):
    stream, release = device.stream("load"), threading.Event()

    class Slow:
        def numpy(self):
            release.wait(10)
            raise AssertionError("never copied")

    stream.copy([CopyOp(Slow(), Slow())])
    event = stream.record()
    assert not event.wait(0.01)
    with pytest.raises(DeviceError, match="did not finish"):
        device.compute.wait(event, 0.01)
    release.set()


def test_a_closed_device_gives_no_streams():
    device = CpuDevice()
    device.stream("load")
    device.close()
    device.close()
    with pytest.raises(StoreClosedError):
        device.stream("load")


@pytest.mark.parametrize("use", ["read", "append", "nothing"])
def test_a_layer_in_use_when_the_store_is_closed_is_a_clear_error(open_store, use):
    """Its pages are others' by then, so nothing that was read or written counts."""
    store = open_store()
    tokens = list(range(9))
    sequence = store.begin(tokens)
    feed(sequence, tokens[:5], 5)

    def step():
        with sequence.gate.layer(0) as view:
            store.close()
            if use == "read":
                view.read()
            elif use == "append":
                view.append(*states(FULL, 0, tokens, 5, 9))

    with pytest.raises(SequenceEndedError, match="while it was in use"):
        step()


def test_statistics_are_not_published_of_a_store_closed_meanwhile(open_store):
    store = open_store()

    def stats():
        found = store.stats()
        store.close()
        return found

    store._reporter.publish(stats)
    assert store.closed
