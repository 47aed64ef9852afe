"""Disk pages read behind the gate: right bytes or a DeviceError, and nothing is left over."""

import errno
import threading
from types import SimpleNamespace

import pytest
from layered import (
    FULL,
    MIXED,
    SPECS,
    TOKENS,
    held,
    nothing_is_held,
    parts_of,
)
from toy_model import expect_state, feed, full_group, states, turn

from tierkv import SequenceEndedError, StoreClosedError
from tierkv.data_plane.arrivals import LoadMeter, LoadTime
from tierkv.data_plane.parts import layer_parts
from tierkv.devices.base import DeviceError, Traffic
from tierkv.devices.cpu import CpuDevice
from tierkv.devices.faults import Faults
from tierkv.storage.testing import Gate


def begin(store, tokens=TOKENS, **options):
    return store.begin([*tokens, 7], restartable=True, **options)


def generate(store, tokens=TOKENS, attempts=6):
    """Do what a restartable caller does; return what each attempt had found."""
    found = []
    for _ in range(attempts):
        sequence = begin(store, tokens)
        found.append(sequence.found.total)
        store.check()
        try:
            feed(sequence, [*tokens, 7])
        except DeviceError:
            store.check()
            sequence.abandon()
            store.check()
            continue
        sequence.finish([*tokens, 7])
        store.check()
        return found
    raise AssertionError(f"no attempt succeeded; they found {found}")


# -- it works ----------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 100])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pages_read_behind_the_gate_hold_the_right_bytes(reopen, spec, layers):
    store = reopen(spec, layers=layers)
    assert generate(store) == [len(TOKENS)]
    assert store.stats().counters["gated_pages"] > 0
    assert generate(store) == [len(TOKENS)]  # 29 + 1 tokens were kept, the same again
    nothing_is_held(store)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_layer_computes_while_later_layers_are_read(reopen, disk, spec):
    store = reopen(spec)
    disk.hold()
    sequence = begin(store)
    assert sequence.found.disk == sequence.length == len(TOKENS)
    parts = parts_of(store)
    assert [part.layers for part in parts] == [(layer,) for layer in sorted(spec.layer_to_group)]
    for layer, part in enumerate(parts):
        assert not sequence.gate.arrived(layer)
        disk.step(len(part.rows))
        assert part.wait(20)
        with sequence.gate.layer(layer) as view:
            expect_state(spec, layer, TOKENS, len(TOKENS), view.read())
            view.append(*states(spec, layer, [*TOKENS, 7], len(TOKENS), len(TOKENS) + 1))
        store.check()
    sequence.finish([*TOKENS, 7])
    assert turn(store, [*TOKENS, 7, 8]).device == len(TOKENS) + 1
    nothing_is_held(store)


def test_verified_pages_become_ordinary_host_and_device_copies(reopen):
    store = reopen(FULL)
    sequence = begin(store)
    assert store.stats().tiers["device"].pages == 0  # nobody else counts on them yet
    feed(sequence, [*TOKENS, 7])
    sequence.commit([*TOKENS, 7])
    stats = store.stats()
    assert stats.tiers["host"].pages == 4  # the tail page as well
    assert stats.tiers["device"].pages == 3
    assert stats.counters["bytes_in"]["host"] == 4 * FULL.slot_bytes
    sequence.abandon()
    nothing_is_held(store)


def test_compressed_pages_are_read_whole(reopen):
    store = reopen(FULL, codec="zstd")
    assert generate(store) == [len(TOKENS)]


def test_a_tiny_host_tier_reads_in_batches(reopen):
    tokens = [(3 * i) % 61 for i in range(8 * 14 + 3)]
    store = reopen(FULL, tokens, host=8, device=40)
    assert generate(store, tokens) == [len(tokens)]
    assert 0 < store.stats().counters["gated_pages"] <= 4
    nothing_is_held(store)


def test_a_sequence_that_spills_is_verified_first(reopen):
    tokens = [(3 * i) % 61 for i in range(8 * 12)]
    store = reopen(FULL, tokens, host=32, device=10)
    assert generate(store, tokens) == [len(tokens)]
    assert store.stats().counters["gated_pages"] == 0
    nothing_is_held(store)


def test_a_fork_and_a_crop_wait_for_everything(reopen):
    store = reopen(MIXED)
    sequence = begin(store)
    other = sequence.fork()
    feed(other, [*TOKENS, 9, 9])
    sequence.crop(len(TOKENS))
    feed(sequence, [*TOKENS, 7])
    other.abandon()
    sequence.abandon()
    nothing_is_held(store)


def test_two_sequences_share_one_read(reopen, disk):
    store = reopen(MIXED)
    disk.hold()
    first, second = begin(store), begin(store)
    assert second.found.disk == len(TOKENS)
    assert store.stats().counters["delay_hits"] > 0
    disk.free()
    for sequence in (second, first):
        feed(sequence, [*TOKENS, 7])
        store.check()
    pages = store.stats().tiers["host"].pages
    assert store.stats().counters["bytes_in"]["host"] == pages * FULL.groups[0].layer_bytes * 3
    first.finish([*TOKENS, 7])
    second.finish([*TOKENS, 7])
    nothing_is_held(store)


def test_the_read_goes_on_for_those_who_stay(reopen, disk):
    store = reopen(FULL)
    disk.hold()
    first, second = begin(store), begin(store)
    first.abandon()
    store.check()
    disk.free()
    feed(second, [*TOKENS, 7])
    second.abandon()
    nothing_is_held(store)


def test_others_wait_until_the_pages_are_verified(reopen, disk):
    store = reopen(FULL)
    disk.hold()
    first, found = begin(store), []
    other = threading.Thread(target=lambda: found.append(turn(store, [*TOKENS, 8], finish=False)))
    other.start()
    other.join(0.1)
    assert other.is_alive()
    disk.free()
    other.join(30)
    assert found[0].total == len(TOKENS)
    first.abandon()
    nothing_is_held(store)


# -- trouble -----------------------------------------------------------------------------


READS = {"full": 16, "mixed": 12 + 9}  # pages times layers, one read each


@pytest.mark.parametrize("fault", ["flip", errno.EIO, errno.EAGAIN], ids=["flip", "eio", "eagain"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_fault_at_any_part_costs_a_restart_and_nothing_else(reopen, disk, spec, fault):
    for skip in range(0, READS[spec] + 2, 5):
        store = reopen(SPECS[spec])
        disk.inject("preadv", fault, skip=skip, times=2, match="slabs")
        found = generate(store)
        assert found[0] == len(TOKENS)
        if fault == "flip" and disk.fired("preadv") == 2 and len(found) > 1:
            assert found[1] < len(TOKENS)  # what proved bad is forgotten
        assert len(found) <= 3
        disk.clear()
        nothing_is_held(store)
        store.close()


@pytest.mark.parametrize("skip", [0, 5, 15])
def test_a_read_that_hangs_at_any_part_ends_at_its_deadline(reopen, disk, skip):
    store = reopen(FULL, io_timeout_s=0.3)
    gate = Gate()
    disk.inject("preadv", gate, skip=skip, match="slabs")
    found = generate(store)
    assert found[0] == len(TOKENS)
    assert len(found) == 2
    assert found[1] < len(TOKENS)  # the disk is not trusted again
    assert store.stats().counters["disk_timeouts"] > 0
    gate.opened.set()
    disk.clear()
    assert generate(store)[-1] >= len(TOKENS)
    nothing_is_held(store)


def test_a_disk_that_always_fails_is_trusted_once(reopen, disk):
    store = reopen(FULL)
    disk.inject("preadv", errno.EAGAIN, times=None, match="slabs")
    assert generate(store) == [len(TOKENS), 0]
    disk.clear()
    assert turn(store, [*TOKENS, 8], finish=False).total > 0
    nothing_is_held(store)


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_copies_that_fail_cost_a_restart(reopen, spec, after):
    faults = Faults()
    store = reopen(spec, torch_device=CpuDevice(faults=faults))
    faults.fail_copies("load", after=after)
    assert generate(store) in ([len(TOKENS)] * 2, [len(TOKENS)])
    assert faults.struck == 1
    nothing_is_held(store)


@pytest.mark.parametrize("after", [0, 2])
def test_copies_that_hang_cost_a_restart(reopen, after):
    faults = Faults()
    store = reopen(FULL, torch_device=CpuDevice(faults=faults), io_timeout_s=0.3)
    faults.hang("load", after=after)
    sequence = begin(store)
    with pytest.raises(DeviceError):
        feed(sequence, [*TOKENS, 7])
    sequence.abandon()
    store.check()
    assert held(store)["device"] > 0  # the copy may still write there
    faults.clear()
    store._loader._stream.record().wait(20)
    assert generate(store)[-1] == len(TOKENS)
    nothing_is_held(store)


@pytest.mark.parametrize("how", ["commit", "finish"])
def test_nothing_is_published_of_pages_that_did_not_arrive(reopen, disk, how):
    store = reopen(FULL)
    disk.inject("preadv", "flip", times=None, match="slabs")
    sequence = begin(store)
    before = store.stats().counters["committed_pages"]
    with pytest.raises(DeviceError):
        feed(sequence, [*TOKENS, 7])
    disk.clear()
    fresh = begin(store)
    if how == "commit":
        assert fresh.commit(TOKENS).pages == 0
        fresh.abandon()
    else:
        assert fresh.finish(TOKENS[: fresh.length]).pages == 0
    sequence.abandon()
    assert store.stats().counters["committed_pages"] == before
    nothing_is_held(store)


def test_no_room_in_the_pool_finds_less_and_gives_everything_back(reopen):
    store = reopen(FULL, device=5)
    with store.begin([91] * 16, max_new_tokens=1) as other:
        feed(other, [91] * 16)
        sequence = begin(store, TOKENS[:8])
        assert sequence.length <= 8
        sequence.abandon()
        store.check()
    nothing_is_held(store)


def test_the_gate_is_shut_after_the_end_though_reads_are_under_way(reopen, disk):
    store = reopen(FULL)
    disk.hold()
    sequence = begin(store)
    sequence.abandon()
    with pytest.raises(SequenceEndedError):
        sequence.gate.layer(0)
    store.check()
    disk.free()
    left = begin(store)
    disk.hold()
    disk.free()
    store.close()
    assert left.ended
    with pytest.raises(StoreClosedError):
        store.begin([1])


# -- every interleaving ------------------------------------------------------------------


def _enter(sequence, layer):
    with sequence.gate.layer(layer):
        pass


@pytest.mark.parametrize("spec", SPECS)
def test_it_can_end_after_any_read_and_any_layer(reopen, disk, spec):
    """Ended with k reads done and j layers entered, for every k and the js that they allow."""
    tokens = TOKENS[:13]  # two pages: one and a tail
    ends = ["abandon", "finish", "restart", "close"]
    total = 0
    for done in range(0, 9):
        for entered in range(0, 3):
            store = reopen(SPECS[spec], tokens)
            disk.hold()
            sequence = begin(store, tokens)
            parts = parts_of(store)
            disk.step(done)
            needed = 0
            for part in parts[:entered]:
                needed += len(part.rows)
                if done < needed:
                    break
                assert part.wait(20)
                _enter(sequence, part.layers[0])
            end = ends[total % len(ends)]
            total += 1
            store.check()
            if end == "close":
                disk.free()
                store.close()
                continue
            if end == "abandon":
                sequence.abandon()
            elif end == "restart":
                other = begin(store, tokens)
                sequence.abandon()
                store.check()
                disk.free()
                feed(other, [*tokens, 7])
                other.abandon()
            else:
                disk.free()
                assert sequence.finish(tokens).pages == 0
            disk.free()
            nothing_is_held(store)
            store.close()


# -- parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 4096, 4097, 8192, 3 * 4096, 1 << 30])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 30])
def test_parts_are_consecutive_layers_that_are_large_enough(layers, least):
    group = full_group(layers=tuple(range(3, 3 + layers)), page_tokens=8)
    parts = layer_parts(group, least)
    assert [layer for part in parts for layer in part] == list(group.layers)
    if len(parts) > 1:
        assert all(4 * len(part) * group.layer_bytes >= least for part in parts)
        assert all(len(part) * group.layer_bytes >= least for part in parts[1:-1])
    else:
        assert layers == 1 or group.page_bytes < 2 * (least + group.layer_bytes)


def test_layers_that_do_not_begin_at_a_disks_units_are_read_whole():
    assert layer_parts(full_group(layers=(0, 1, 2), page_tokens=4), 1) == [(0, 1, 2)]


def test_disk_traffic_is_measured(reopen):
    store = reopen(FULL)
    sequence = begin(store)
    feed(sequence, [*TOKENS, 7])
    traffic = store._transfers.reads.traffic()
    assert (traffic.batches, traffic.bytes) == (4, 4 * FULL.slot_bytes)
    assert traffic.seconds > 0
    sequence.abandon()


def test_what_nobody_waited_for_counts_as_hidden():
    now, carried = [0.0], {"disk": 0.0, "load": 0.0}
    core = SimpleNamespace(clock=lambda: now[0])
    meters = [lambda name=name: Traffic(1, 1, carried[name]) for name in carried]
    carried["disk"] = 5.0  # before, by others
    meter = LoadMeter(core, *meters)
    with meter.waiting():
        now[0] += 1.0
    carried["disk"], carried["load"] = 8.0, 1.0
    assert meter.result(waited_s=0.5) == LoadTime(exposed_s=1.5, hidden_s=2.5)
    meter.stop()
    carried["load"] = 100.0  # of others, later
    assert meter.result() == LoadTime(exposed_s=1.0, hidden_s=3.0)
