"""The order checker finds each planted bug, names both sides, and nothing else."""

import re
import threading
from contextlib import suppress

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from device_host import Host
from hypothesis import given, settings

from tierkv.devices.base import CopyOp, DeviceError
from tierkv.devices.sim import SimDevice
from tierkv.devices.sim_order import OrderError

SIZE, LONG = 128, 1e6


class Rig:
    """A simulated device with eight slots on either side."""

    def __init__(self):
        self.device = SimDevice()
        self.memory = self.device.allocate(8, SIZE)
        self.host = Host(self.device, 8, SIZE)
        self.load, self.save = self.device.stream("load"), self.device.stream("save")
        self.compute = self.device.compute

    def down(self, slot, page):
        """Copy a host slot into a device slot."""
        self.load.copy([CopyOp(self.memory[slot], self.host.tensor[page])])
        return self.load.record()

    def up(self, slot, page):
        """Copy a device slot into a host slot."""
        self.save.copy([CopyOp(self.host.tensor[page], self.memory[slot])])
        return self.save.record()

    def attend(self, slot, *, what="attention"):
        self.compute.use(what, reads=[self.memory[slot]])

    def append(self, slot, *, what="append"):
        self.compute.use(what, writes=[self.memory[slot]])

    def finish(self):
        for stream in (self.load, self.save):
            assert stream.record().wait(LONG)
        self.device.check()
        self.device.close()


@pytest.fixture
def rig():
    return Rig()


def read_before_its_copy_is_ordered(rig):
    rig.down(3, 5)
    rig.attend(3)


def slot_reused_while_a_copy_reads(rig):
    loaded = rig.down(2, 0)
    for stream in (rig.save, rig.compute):
        stream.wait(loaded, LONG)
    rig.up(2, 6)
    rig.append(2)


def slot_reused_while_a_kernel_reads(rig):
    rig.compute.wait(rig.down(2, 0), LONG)
    rig.attend(2)
    rig.down(2, 1)


def two_writes_in_no_order(rig):
    rig.down(4, 0)
    rig.device.stream("prefetch").copy([CopyOp(rig.memory[4], rig.host.tensor[1])])


def host_slot_reused_while_a_load_reads_it(rig):
    rig.down(1, 7)
    rig.up(5, 7)


def save_not_ordered_behind_its_kernel(rig):
    rig.append(6)
    rig.up(6, 0)


def disk_read_into_a_slot_that_is_copied(rig):
    rig.down(1, 7)
    rig.device.host_use("disk read", writes=[rig.host.tensor[7]])


def disk_write_of_a_slot_that_is_not_there_yet(rig):
    rig.up(1, 7)
    rig.device.host_use("disk write", reads=[rig.host.tensor[7]])


def copies_of_one_batch_touch(rig):
    ops = [CopyOp(rig.memory[1], rig.memory[0]), CopyOp(rig.memory[2], rig.memory[1])]
    rig.load.copy(ops)


def waited_for_an_earlier_event(rig):
    event = rig.load.record()
    rig.down(3, 5)
    rig.compute.wait(event, LONG)
    rig.attend(3)


def only_part_of_a_slot_is_waited_for(rig):
    for half in (slice(0, 64), slice(64, 128)):
        rig.load.copy([CopyOp(rig.memory[3, half], rig.host.tensor[5, half])])
        if half.start == 0:
            rig.compute.wait(rig.load.record(), LONG)
    rig.compute.use("attention", reads=[rig.memory[3, :64], rig.memory[3, 60:70]])


PLANTED = [
    (
        read_before_its_copy_is_ordered,
        "'attention' on stream 'compute'.* reads device pool slot 3 bytes 0 to 128, which copy on "
        "stream 'load' .*host memory slot 5 bytes 0 to 128 -> device pool slot 3.* writes",
    ),
    (
        slot_reused_while_a_copy_reads,
        "'append' on stream 'compute'.* writes device pool slot 2 .*copy on stream 'save' .*"
        "device pool slot 2 .*-> host memory slot 6.* reads",
    ),
    (
        slot_reused_while_a_kernel_reads,
        "copy on stream 'load' .*host memory slot 1 .*writes device pool slot 2 .*'attention' on "
        "stream 'compute'.* reads",
    ),
    (
        two_writes_in_no_order,
        "copy on stream 'prefetch' .*writes device pool slot 4 .*copy on stream 'load' .*writes",
    ),
    (
        host_slot_reused_while_a_load_reads_it,
        "copy on stream 'save' .*writes host memory slot 7 .*copy on stream 'load' .*reads",
    ),
    (
        save_not_ordered_behind_its_kernel,
        "copy on stream 'save' .*reads device pool slot 6 .*'append' on stream 'compute'.* writes",
    ),
    (
        disk_read_into_a_slot_that_is_copied,
        "'disk read' by the host .*writes host memory slot 7 .*copy on stream 'load' .*reads",
    ),
    (
        disk_write_of_a_slot_that_is_not_there_yet,
        "'disk write' by the host .*reads host memory slot 7 .*copy on stream 'save' .*writes",
    ),
    (
        copies_of_one_batch_touch,
        "reads device pool slot 1 .*copy on stream 'load' .*both belong to one batch",
    ),
    (waited_for_an_earlier_event, "'attention' on .* reads device pool slot 3 .*stream 'load'"),
    (only_part_of_a_slot_is_waited_for, "reads device pool slot 3 bytes 64 to 70, .*'load'"),
]


@pytest.mark.parametrize(("bug", "message"), PLANTED, ids=[bug.__name__ for bug, _ in PLANTED])
def test_a_planted_bug_is_found_and_told_again(rig, bug, message):
    with pytest.raises(OrderError) as found:
        bug(rig)
    assert re.search(message, str(found.value)), found.value
    assert not isinstance(found.value, DeviceError)
    for again in (rig.device.check, rig.device.close):
        with pytest.raises(OrderError) as told:
            again()
        assert str(told.value) == str(found.value)


def test_a_violation_in_a_thread_is_not_lost(rig):
    def work():
        with suppress(AssertionError):  # as a careless worker would
            read_before_its_copy_is_ordered(rig)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with pytest.raises(OrderError, match="slot 3"):
        rig.device.check()


def test_an_event_recorded_anew_before_anybody_waited(rig):
    event = rig.down(1, 1)
    rig.load.copy([CopyOp(rig.memory[2], rig.host.tensor[2])])
    with pytest.raises(OrderError) as found:
        rig.load.record(event)
    assert re.search(
        "recorded anew after copy on stream 'load' .*device pool slot 2.*earlier point after copy "
        "on stream 'load' .*device pool slot 1",
        str(found.value),
    )


@pytest.mark.parametrize("who", ["host", "stream"])
def test_an_event_may_be_recorded_anew_once_somebody_waited(rig, who):
    event = rig.down(1, 1)
    assert event.wait(LONG) if who == "host" else rig.save.wait(event, LONG) is None
    rig.load.copy([CopyOp(rig.memory[2], rig.host.tensor[2])])
    rig.load.record(event)
    rig.finish()


def test_work_that_nobody_waits_for_is_found_in_the_end(rig):
    rig.down(1, 1).wait(LONG)
    rig.up(1, 2)
    for check in (rig.device.check_waited, rig.device.close):
        with pytest.raises(OrderError, match=r"never waited for: copy on stream 'save' .*slot 2"):
            check()


def test_a_missing_wait_also_shows_in_the_bytes(rig):
    rig.host.bytes[5] = 1
    with pytest.raises(OrderError):
        read_before_its_copy_is_ordered(rig)
    assert not rig.memory[3].any()


# -- correct programs --------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [2, 3])
def test_rings_of_buffers_pass(rig, buffers):
    rig.host.bytes[:] = np.arange(8)[:, None]
    free, seen = [None] * buffers, []
    for step in range(40):
        at = step % buffers
        if free[at] is not None:
            rig.load.wait(free[at], LONG)
        rig.compute.wait(rig.down(at, step % 8), LONG)
        rig.attend(at)
        seen.append(int(rig.memory[at, 0]))
        free[at] = rig.compute.record(free[at])
    rig.finish()
    assert seen == [step % 8 for step in range(40)]


def test_saves_behind_computation_pass(rig):
    saved = {}
    for step in range(40):
        slot = step % 4
        if slot in saved:
            rig.compute.wait(saved[slot], LONG)
        rig.append(slot)
        rig.save.wait(rig.compute.record(), LONG)
        saved[slot] = rig.up(slot, slot)
        if step % 4 == 3:
            assert saved[slot].wait(LONG)
            rig.device.host_use("disk write", reads=[rig.host.tensor[:4]])
    rig.finish()


def test_one_kernel_may_read_what_it_writes(rig):
    rig.compute.use("step", reads=[rig.memory[1]], writes=[rig.memory[1, 8:16]])
    rig.compute.use("step", reads=[rig.memory[1]], writes=[rig.memory[1, 16:24]])
    rig.finish()


def test_interleaved_ranges_do_not_touch(rig):
    """Rows of two layers in the same pages, each moved by a stream of its own."""
    parts = [slice(0, 64), slice(64, 128)]
    for stream, part in zip((rig.load, rig.save), parts, strict=True):
        stream.copy([CopyOp(rig.memory[:, part], rig.host.tensor[:, part])])
    rig.finish()


def test_what_has_settled_is_forgotten(rig):
    """Whatever the host has waited for needs no room any more."""
    memory = rig.device.allocate(4, 1 << 16)
    cells = rig.device.order.memory.find(memory, rig.device.order.settled)._cells
    for step in range(3000):
        at = step * 37 % 4096 * 16
        rig.compute.use("append", writes=[memory[step % 4, at : at + 4]])
        if step % 50 == 0:
            assert rig.compute.record().wait(LONG)
    assert len(cells) < 1200
    rig.finish()


def test_addresses_of_freed_memory_mean_nothing(rig):
    for _ in range(50):
        engine = torch.zeros(1 << 16, dtype=torch.uint8)
        rig.load.copy([CopyOp(rig.memory[0], engine[:SIZE])])
        assert rig.load.record().wait(LONG)
        rig.compute.use("fill", writes=[engine])
        rig.load.wait(rig.compute.record(), LONG)
    rig.finish()


# -- against an oracle -------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["copy", "copy", "record", "wait", "host", "use"]),
        st.integers(0, 2),  # the stream: compute, load, save
        st.integers(0, 7),
        st.integers(0, 7),
        st.integers(1, 4),
    ),
    max_size=30,
)


class Oracle:
    """Happens-before as reachability, bytes as sets: slow and plain."""

    def __init__(self):
        self.before = []  # of each operation, all that it is ordered after
        self.touched = []
        self.ends = [set(), set(), set()]
        self.host = set()

    def add(self, stream, reads, writes):
        """Enter an operation; return whether it conflicts with an earlier one."""
        self.ends[stream] |= self.host
        number, before = len(self.before), set(self.ends[stream])
        conflict = any(
            (writes & (r | w)) or (reads & w)
            for other, (r, w) in enumerate(self.touched)
            if other not in before
        )
        self.before.append(before)
        self.touched.append((reads, writes))
        self.ends[stream] = before | {number}
        return conflict


@given(steps=STEPS)
@settings(max_examples=200, deadline=None)
def test_conflicts_are_found_exactly_and_bytes_are_those_of_plain_execution(steps):
    device = SimDevice()
    memory = device.allocate(1, 16)
    memory[0] = torch.arange(16)
    plain = memory.clone()
    streams = [device.compute, device.stream("load"), device.stream("save")]
    oracle, events = Oracle(), []
    for what, at, source, target, size in steps:
        if what == "record":
            events.append((streams[at].record(), oracle.ends[at] | oracle.host))
        elif what == "wait" and events:
            event, done = events[source % len(events)]
            streams[at].wait(event, LONG)
            oracle.ends[at] |= done | oracle.host
        elif what == "host" and events:
            event, done = events[source % len(events)]
            assert event.wait(LONG) if at else event.done() or event.wait(LONG)
            oracle.host |= done
        elif what in ("copy", "use"):
            of, to = slice(source, source + size), slice(8 + target, 8 + min(target + size, 8))
            of = slice(source, source + to.stop - to.start)
            reads, writes = set(range(16)[of]), set(range(16)[to])
            if reads & writes:
                continue
            conflict = oracle.add(at, reads, writes)
            try:
                if what == "copy":
                    streams[at].copy([CopyOp(memory[0, to], memory[0, of])])
                    plain[0, to] = plain[0, of]
                else:
                    streams[at].use("kernel", reads=[memory[0, of]], writes=[memory[0, to]])
            except OrderError:
                assert conflict
                return
            assert not conflict
    for stream in streams:
        assert stream.record().wait(LONG)
    assert torch.equal(memory, plain)
    device.close()
