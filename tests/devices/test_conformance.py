"""What every device does; the same tests for all of them."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from device_host import Host
from hypothesis import HealthCheck, given, settings

from tierkv import CapacityError, StoreClosedError
from tierkv.devices.base import CopyOp, DeviceError

LONG = 30.0  # a deadline that is never met: nothing takes so long


def rows(device, count=4, size=64):
    memory = device.allocate(count, size)
    memory.zero_()
    assert device.compute.record().wait(LONG)
    return memory


def test_a_stream_keeps_its_order(device):
    host, memory = Host(device, 2, 64), rows(device)
    host.bytes[0] = 7
    stream = device.stream("load")
    stream.copy([CopyOp(memory[0], host.tensor[0])])
    for row in range(3):
        stream.copy([CopyOp(memory[row + 1], memory[row])])
    stream.copy([CopyOp(host.tensor[1], memory[3])])
    event = stream.record()
    assert event.wait(LONG)
    assert event.done()
    assert (host.bytes[1] == 7).all()
    assert device.stats().copies == 5
    assert device.stats().copied_bytes == 5 * 64
    assert device.stream("load") is stream


def test_streams_wait_for_each_other(device):
    host, memory = Host(device, 20, 64), rows(device)
    host.bytes[0] = 1
    a, b = device.stream("a"), device.stream("b")
    turn = None
    for step in range(18):  # a row goes in and out, each time by another stream
        stream, other = (a, b) if step % 2 == 0 else (b, a)
        stream.copy([CopyOp(memory[0], host.tensor[step])])
        other.wait(stream.record(), LONG)
        other.copy([CopyOp(host.tensor[step + 1], memory[0])])
        turn = other.record()
        stream.wait(turn, LONG)
    assert turn.wait(LONG)
    assert (host.bytes[:19] == 1).all()


def test_the_compute_stream_is_ordered_both_ways(device):
    host, memory = Host(device, 2, 64), rows(device)
    host.bytes[0] = 5
    load, save = device.stream("load"), device.stream("save")
    load.copy([CopyOp(memory[0], host.tensor[0])])
    device.compute.wait(load.record(), LONG)
    memory[1] = memory[0] + 1  # the caller's kernel
    device.compute.copy([CopyOp(memory[2], memory[1])])
    save.wait(device.compute.record(), LONG)
    save.copy([CopyOp(host.tensor[1], memory[2])])
    assert save.record().wait(LONG)
    assert (host.bytes[1] == 6).all()


@st.composite
def strided(draw):
    """Two layouts of one shape in buffers of 4 KiB: padded, permuted but for the last."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    layouts = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape) - 1)))
        strides, span = [0] * len(shape), shape[-1]
        strides[-1] = 1
        for dim in order:
            span += draw(st.integers(0, 3))
            strides[dim] = span
            span *= shape[dim]
        layouts.append((tuple(strides), draw(st.integers(0, 9))))
    return tuple(shape), layouts


@given(case=strided(), seed=st.integers(0, 255))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_strided_copies_are_exact(device, case, seed):
    shape, ((inward, at), (outward, start)) = case
    host, memory = Host(device, 2, 4096), rows(device, 1, 4096)
    host.bytes[0] = np.random.default_rng(seed).integers(1, 256, 4096, np.uint8)
    stream = device.stream("load")
    source = host.tensor.as_strided(shape, inward, at)
    there = memory.as_strided(shape, outward, start)
    back = host.tensor.as_strided(shape, inward, at + 4096)
    stream.copy([CopyOp(there, source)])
    stream.copy([CopyOp(back, there)])
    assert stream.record().wait(LONG)
    assert torch.equal(back, source)
    assert int((memory != 0).sum()) == source.numel() == int((host.tensor[1] != 0).sum())


def test_a_batch_of_strided_layers(device):
    """Pages of several layers, as the load of one layer moves them."""
    host, memory = Host(device, 6, 96), rows(device, 6, 96)
    host.bytes[:] = np.arange(96)
    stream = device.stream("load")
    for layer in range(3):
        part = slice(32 * layer, 32 * layer + 32)
        stream.copy(
            [
                CopyOp(memory[1:3, part], host.tensor[3:5, part]),
                CopyOp(memory[5, part], host.tensor[0, part]),
            ]
        )
    assert stream.record().wait(LONG)
    for row in (1, 2, 5):
        assert torch.equal(memory[row].cpu(), host.tensor[0])
    assert not memory[[0, 3, 4]].any()


def test_an_event_recorded_anew_stands_for_the_new_point(device):
    host, memory = Host(device, 3, 64), rows(device)
    host.bytes[0] = 3
    stream = device.stream("load")
    event = stream.record()
    for row in range(3):
        assert event.wait(LONG)
        stream.copy([CopyOp(memory[row], host.tensor[0])])
        assert stream.record(event) is event
    assert event.wait(LONG)
    assert event.done()
    assert (memory[:3] == 3).all()


def test_a_failed_copy_is_reported_once_by_the_event_behind_it(device):
    memory = rows(device)
    stream = device.stream("load")
    before = stream.record()
    stream.copy([CopyOp(memory[0], memory[1][:3])])
    failed, after = stream.record(), stream.record()
    with pytest.raises(DeviceError, match="failed"):
        failed.wait(LONG)
    with pytest.raises(DeviceError):  # and whoever asks again learns it again
        failed.wait(LONG)
    assert failed.done()
    assert before.wait(LONG)
    assert after.wait(LONG)
    assert device.stats().failed_copies == 1


def test_a_source_is_never_repeated_to_fill_a_destination(device):
    memory = rows(device)
    device.stream("load").copy([CopyOp(memory[0], memory[1][:1])])
    with pytest.raises(DeviceError):
        device.stream("load").record().wait(LONG)


def test_the_compute_stream_fails_at_once(device):
    memory = rows(device)
    with pytest.raises(DeviceError, match="failed"):
        device.compute.copy([CopyOp(memory[0], memory[1][:3])])
    assert device.compute.record().wait(LONG)


def test_what_is_ordered_after_a_failure_is_not_done(device):
    host, memory = Host(device, 1, 64), rows(device)
    host.bytes[0] = 9
    load, save = device.stream("load"), device.stream("save")
    load.copy([CopyOp(memory[0], memory[1][:3])])
    broken = load.record()
    save.wait(broken, LONG)
    save.copy([CopyOp(memory[2], host.tensor[0])])
    with pytest.raises(DeviceError):
        save.record().wait(LONG)
    with pytest.raises(DeviceError):
        device.compute.wait(broken, LONG)
    save.copy([CopyOp(memory[3], host.tensor[0])])
    assert save.record().wait(LONG)
    assert not memory[2].any()
    assert (memory[3] == 9).all()


def test_traffic_counts_finished_batches(device):
    host, memory = Host(device, 1, 4096), rows(device, 4, 4096)
    stream = device.stream("load")
    assert stream.traffic().batches == 0
    for _ in range(3):
        stream.copy([CopyOp(memory[row], host.tensor[0]) for row in range(4)])
    assert stream.record().wait(LONG)
    traffic = stream.traffic()
    assert (traffic.batches, traffic.bytes) == (3, 3 * 4 * 4096)
    assert traffic.seconds > 0


def test_closing_ends_every_use_and_may_be_repeated(device):
    memory = rows(device)
    stream = device.stream("load")
    stream.copy([CopyOp(memory[1], memory[0])])
    event = stream.record()
    assert event.wait(LONG)
    device.close()
    device.close()
    assert event.done()
    for use in (
        lambda: device.stream("load"),
        lambda: device.stream("other"),
        lambda: device.allocate(1, 64),
        lambda: stream.copy([CopyOp(memory[1], memory[0])]),
        lambda: device.compute.copy([CopyOp(memory[1], memory[0])]),
    ):
        with pytest.raises(StoreClosedError):
            use()


def test_threads_share_streams(device):
    host, memory = Host(device, 16, 256), rows(device, 16, 256)
    host.bytes[:8] = np.arange(1, 9)[:, None]
    wrong = []

    def work(row):
        for _ in range(25):
            load, save = device.stream("load"), device.stream("save")
            load.copy([CopyOp(memory[row], host.tensor[row])])
            save.wait(load.record(), LONG)
            save.copy([CopyOp(host.tensor[8 + row], memory[row])])
            event = save.record()
            if not event.wait(LONG) or not (host.bytes[8 + row] == row + 1).all():
                wrong.append(row)
            host.bytes[8 + row] = 0

    threads = [threading.Thread(target=work, args=[row]) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not wrong
    assert device.stats().copies == 8 * 25 * 2
    assert device.stats().streams == 2


def test_an_empty_pool_has_its_shape(device):
    assert device.allocate(0, 64).shape == (0, 64)


# -- faults that were asked for: on the devices that take them ---------------------------


def test_deadlines_end_every_kind_of_wait(faulty, faults):
    memory = rows(faulty)
    load, save = faulty.stream("load"), faulty.stream("save")
    faults.hang("load")
    load.copy([CopyOp(memory[1], memory[0])])
    event = load.record()
    assert not event.done()
    assert not event.wait(0.01)
    with pytest.raises(DeviceError):
        faulty.compute.wait(event, 0.01)
    save.wait(event, 0.01)
    for row in (2, 3):  # neither of them may come before what it is ordered after
        save.copy([CopyOp(memory[row], memory[1])])
        with pytest.raises(DeviceError):
            save.record().wait(LONG)
    let_go(faulty, faults)
    assert event.wait(LONG)
    save.copy([CopyOp(memory[3], memory[1])])
    assert save.record().wait(LONG)


def let_go(device, faults):
    faults.clear()
    if device.checks_order:
        device.advance_host(4000)


def test_a_wait_after_a_late_one_still_counts(faulty, faults):
    memory = rows(faulty)
    a, b, c = (faulty.stream(name) for name in "abc")
    faults.hang("a")
    faults.hang("b")
    a.copy([CopyOp(memory[0], memory[1])])
    b.copy([CopyOp(memory[2], memory[3])])
    c.wait(a.record(), 0.01)
    c.wait(b.record(), 0.01)
    first = c.record()
    with pytest.raises(DeviceError):
        first.wait(LONG)
    with pytest.raises(DeviceError):  # both are late still
        c.record().wait(LONG)
    let_go(faulty, faults)
    assert a.record().wait(LONG)
    assert b.record().wait(LONG)
    assert c.record().wait(LONG)


def test_copies_fail_when_asked_to(faulty, faults):
    memory = rows(faulty)
    faults.fail_copies("load", after=1, count=2)
    stream, outcomes = faulty.stream("load"), []
    for _ in range(5):
        stream.copy([CopyOp(memory[1], memory[0])])
        event = stream.record()
        try:
            outcomes.append(event.wait(LONG))
        except DeviceError:
            outcomes.append(False)
    assert outcomes == [True, False, False, True, True]
    assert faults.struck == 2
    assert faulty.stats().failed_copies == 2
    faulty.check()


def test_a_dead_worker_fails_what_is_behind_it_and_is_told_of(faulty, faults):
    memory = rows(faulty)
    stream, other = faulty.stream("load"), faulty.stream("save")
    faults.kill("load", after=1)
    stream.copy([CopyOp(memory[1], memory[0])])
    before = stream.record()
    events = []
    for _ in range(3):
        stream.copy([CopyOp(memory[1], memory[0])])
        events.append(stream.record())
    assert before.wait(LONG)
    for event in [*events, stream.record()]:
        with pytest.raises(DeviceError, match="told to die"):
            event.wait(LONG)
    other.wait(events[0], LONG)
    other.copy([CopyOp(memory[3], memory[2])])
    with pytest.raises(DeviceError):
        other.record().wait(LONG)
    with pytest.raises(AssertionError, match="load"):
        faulty.check()


def test_memory_runs_out_when_asked_to(faulty, faults):
    faults.fail_allocations(after=1)
    faulty.allocate(1, 64)
    with pytest.raises(CapacityError, match="smaller budget"):
        faulty.allocate(1, 64)
    assert faulty.stats().allocated_bytes == 64


def test_closing_a_device_that_hangs_says_so(faulty, faults):
    memory = rows(faulty)
    faults.hang("load")
    faulty.stream("load").copy([CopyOp(memory[1], memory[0])])
    with pytest.raises(DeviceError, match="load"):
        faulty.close(0.01)
