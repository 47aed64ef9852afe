"""Virtual time equals the formulas, and nothing else decides it."""

import random

import pytest
import torch
from device_host import Host

from tierkv import InvalidInputError
from tierkv.devices.base import CopyOp
from tierkv.devices.faults import Faults
from tierkv.devices.sim import SimDevice
from tierkv.devices.sim_model import H100_PCIE5, HardwareModel, LinkSchedule

# Powers of two: sums are exact, whatever their order.
EXACT = HardwareModel(
    h2d_alpha=2**-10,
    h2d_bytes_per_s=2**16,
    d2h_alpha=2**-9,
    d2h_bytes_per_s=2**15,
    d2d_alpha=2**-8,
    d2d_bytes_per_s=2**18,
    nvme_alpha=2**-7,
    nvme_read_bytes_per_s=2**14,
    nvme_write_bytes_per_s=2**13,
)
SIZE = 4096


def made(model=EXACT, **options):
    device = SimDevice(model, **options)
    memory = device.allocate(8, SIZE)
    return device, memory, Host(device, 8, SIZE)


def test_one_batch_takes_alpha_and_n_over_beta():
    device, memory, host = made()
    stream, at = device.stream("s"), 0.0
    for ends, alpha, rate in (
        ((memory, host.tensor), 2**-10, 2**16),
        ((host.tensor, memory), 2**-9, 2**15),
        ((memory[:4], memory[4:]), 2**-8, 2**18),
    ):
        to, of = ends
        for pages in (1, 3):
            stream.copy([CopyOp(to[page], of[page]) for page in range(pages)])
            assert stream.record().wait(100)
            at += alpha + pages * SIZE / rate
            assert device.now() == at
    traffic = stream.traffic()
    assert (traffic.batches, traffic.bytes, traffic.seconds) == (6, 3 * 4 * SIZE, at)
    device.close()


def test_a_batch_of_two_directions_takes_both_one_after_the_other():
    device, memory, host = made()
    stream = device.stream("load")
    stream.copy([CopyOp(memory[0], host.tensor[0]), CopyOp(memory[1], memory[2])])
    assert stream.record().wait(100)
    assert device.now() == 2**-10 + SIZE / 2**16 + 2**-8 + SIZE / 2**18
    device.close()


def test_the_drive_has_a_link_of_its_own():
    device, memory, host = made()
    disk, read = device.disk(8, SIZE), device.stream("disk")
    disk[5] = 5
    load = device.stream("load")
    read.copy([CopyOp(host.tensor[1], disk[5])])
    load.wait(read.record(), 100)
    load.copy([CopyOp(memory[1], host.tensor[1])])
    assert load.record().wait(100)
    one = 2**-7 + SIZE / 2**14
    assert device.now() == one + 2**-10 + SIZE / 2**16
    assert (memory[1] == 5).all()
    with pytest.raises(InvalidInputError, match="through host memory"):
        read.copy([CopyOp(memory[0], disk[0])])
    device.close()


def test_streams_share_the_link_of_their_direction_and_no_other():
    device, memory, host = made()
    a, b, c = (device.stream(name) for name in "abc")
    one, back = 2**-10 + SIZE / 2**16, 2**-9 + SIZE / 2**15
    a.copy([CopyOp(memory[0], host.tensor[0])])
    b.copy([CopyOp(memory[1], host.tensor[1])])
    c.copy([CopyOp(host.tensor[2], memory[2])])
    ends = []
    for stream in (a, c, b):
        assert stream.record().wait(100)
        ends.append(device.now())
    assert ends == [one, back, 2 * one] == sorted(ends)
    device.close()


def test_a_link_fills_its_gaps():
    link = LinkSchedule()
    assert link.book(10.0, 2.0, now=0.0) == 10.0
    assert link.book(0.0, 4.0, now=0.0) == 0.0
    assert link.book(1.0, 7.0, now=0.0) == 12.0  # the gap from 4 to 10 is too short
    assert link.book(1.0, 6.0, now=0.0) == 4.0
    assert link.book(30.0, 1.0, now=29.0) == 30.0
    assert link.book(29.0, 1.0, now=29.0) == 29.0


def test_bytes_can_stand_for_more():
    device, memory, host = made(byte_scale=1024)
    device.stream("load").copy([CopyOp(memory[0], host.tensor[0])])
    assert device.stream("load").record().wait(100)
    assert device.now() == 2**-10 + 1024 * SIZE / 2**16
    assert device.stream("load").traffic().bytes == SIZE
    device.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_pipeline_of_layers_equals_the_recursion(seed):
    """T = max over j of (loads up to j + computation from j on), the bound of any schedule."""
    chance = random.Random(seed)
    layers = chance.randrange(1, 40)
    device = SimDevice(EXACT)
    memory, host = device.allocate(layers, SIZE), Host(device, layers, SIZE)
    load, events, loads, runs = device.stream("load"), [], [], []
    for layer in range(layers):
        size = chance.randrange(1, SIZE)
        load.copy([CopyOp(memory[layer, :size], host.tensor[layer, :size])])
        events.append(load.record())
        loads.append(2**-10 + size / 2**16)
    for layer, event in enumerate(events):
        runs.append(chance.randrange(1, 256) / 2**11)
        device.compute.wait(event, 100)
        device.compute.run("layer", runs[-1], reads=[memory[layer]])
    assert device.compute.record().wait(100)
    assert device.now() == max(sum(loads[: j + 1]) + sum(runs[j:]) for j in range(layers))
    device.close()


def test_the_host_moves_only_when_it_waits_asks_or_works():
    device, memory, host = made()
    stream = device.stream("load")
    stream.copy([CopyOp(memory[0], host.tensor[0])])
    event = stream.record()
    assert device.now() == 0.0
    assert not event.wait(2**-11)
    assert device.now() == 2**-11
    asked = 0
    while not event.done():
        asked += 1
    assert asked == pytest.approx((2**-10 + SIZE / 2**16 - 2**-11) / 1e-6, abs=2)
    device.advance_host(1.0)
    now = device.now()
    stream.copy([CopyOp(memory[1], host.tensor[1])])
    assert stream.record().wait(100)
    assert device.now() == now + 2**-10 + SIZE / 2**16
    device.close()


def test_copies_are_made_only_when_somebody_waits():
    device, memory, host = made()
    host.bytes[:] = 1
    a, b = device.stream("a"), device.stream("b")
    a.copy([CopyOp(memory[0], host.tensor[0])])
    b.wait(a.record(), 100)
    b.copy([CopyOp(memory[1], memory[0])])
    a.copy([CopyOp(memory[2], host.tensor[0])])
    event, last = b.record(), a.record()
    device.advance_host(50)
    assert not memory.any()  # time has passed, but nobody knows
    assert event.wait(1)
    assert memory[:2].all()  # with what it was ordered after
    assert not memory[2].any()
    device.compute.wait(last, 1)
    assert memory[2].all()
    device.close()


def test_long_chains_of_waits_end():
    device, memory, host = made()
    host.bytes[0] = 1
    streams, event = [device.stream(name) for name in "ab"], None
    for step in range(3000):
        stream = streams[step % 2]
        if event is not None:
            stream.wait(event, 1e9)
        stream.copy([CopyOp(memory[step % 2], memory[1 - step % 2] if step else host.tensor[0])])
        event = stream.record()
    assert event.wait(1e9)
    assert memory[:2].all()
    device.close()


def program(trace):
    """A ring of three buffers, saves behind it, a copy that hangs for a while."""
    faults = Faults()
    faults.hang("load", after=5, seconds=0.25)
    device = SimDevice(H100_PCIE5, trace=True, faults=faults, byte_scale=100)
    ring, pool = device.allocate(3, SIZE), device.allocate(24, SIZE)
    host = Host(device, 24, SIZE)
    load, save, free = device.stream("load"), device.stream("save"), [None] * 3
    for step in range(24):
        at = step % 3
        if free[at] is not None:
            load.wait(free[at], 10)
        load.copy([CopyOp(ring[at], host.tensor[step])])
        device.compute.wait(load.record(), 10)
        device.compute.run(f"layer {step}", 1e-4, reads=[ring[at]], writes=[pool[step]])
        free[at] = device.compute.record()
        save.wait(free[at], 10)
        save.copy([CopyOp(host.tensor[step], pool[step])])
    assert save.record().wait(10)
    trace += device.timeline
    trace.append(device.now())
    device.close()


def test_the_same_program_gives_the_same_timeline():
    first, second = [], []
    program(first)
    program(second)
    assert first == second
    assert len(first) == 3 * 24 + 1


def test_a_model_of_hardware_is_checked():
    with pytest.raises(InvalidInputError, match="d2h_bytes_per_s"):
        HardwareModel(d2h_bytes_per_s=0)
    with pytest.raises(InvalidInputError, match="byte_scale"):
        SimDevice(byte_scale=0)
    assert H100_PCIE5.compute_seconds(495e12) == 1.0
    assert H100_PCIE5.seconds("h2d", 50e9) == pytest.approx(1.0000145)


def test_memory_of_an_engine_counts_as_the_devices():
    device, _, host = made()
    pool = torch.zeros(4, SIZE, dtype=torch.uint8)
    device.stream("save").copy([CopyOp(host.tensor[0], pool[1])])
    assert device.stream("save").record().wait(100)
    assert device.now() == 2**-9 + SIZE / 2**15
    device.close()
