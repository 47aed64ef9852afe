"""Disks that lie or hang, copies that fail, full host memory: less is found, never wrong."""

import os
import threading
import time
from functools import partial

import pytest
from engine_pools import BY_NAME, Bench

from tierkv import ForkError, LoadResult, PinError, SaveResult
from tierkv.devices.base import DeviceError
from tierkv.devices.cpu import CpuStream
from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import FaultyBackend, Gate

PLAIN, HYBRID = BY_NAME["kv-apart"], BY_NAME["hybrid"]


@pytest.fixture
def disk(monkeypatch):
    """The backend of every SSD tier opened in the test."""
    backend = FaultyBackend()
    monkeypatch.setattr(
        "tierkv.data_plane.opening.SsdTier.open", partial(SsdTier.open, backend=backend)
    )
    return backend


@pytest.fixture
def open_bench(benches, tmp_path):
    def make(case=PLAIN, path=tmp_path / "store", **options):
        benches.append(Bench(case, path, **options))
        return benches[-1]

    return make


@pytest.fixture
def failing(monkeypatch):
    """Make copies of a stream fail: ``failing(name, skip)`` fails all batches after the first."""
    real = CpuStream._copy_now

    def arm(name, skip):
        left = [skip]

        def copy(self, ops):
            if self.name == name:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError("the copy engine is on fire")
            real(self, ops)

        monkeypatch.setattr(CpuStream, "_copy_now", copy)
        return lambda: monkeypatch.setattr(CpuStream, "_copy_now", real)

    return arm


def refill(open_bench, units=6, case=PLAIN, **options):
    """Save a talk and reopen the store, so that it is on disk only."""
    bench = open_bench(case, **options)
    bench.save(bench.keys("a", units))
    assert bench.store.flush().ok
    bench.close()
    return open_bench(case, **options)


def flip_on_disk(bench, path, page):
    """Flip one bit of a page's bytes in the slab file that holds them."""
    layer = bench.spec.groups[page.group].layers[-1]
    content = bench.content(page, layer, 0)
    for slab in path.rglob("*"):
        data = slab.read_bytes() if slab.is_file() else b""
        at = data.find(content)
        if at >= 0:
            with slab.open("r+b") as file:
                file.seek(at + len(content) // 2)
                file.write(bytes([data[at + len(content) // 2] ^ 4]))
            return
    raise AssertionError("the page is not on disk")


@pytest.mark.parametrize("group", [0, 1])
def test_a_flipped_bit_on_disk_shortens_the_prefix(open_bench, tmp_path, group):
    bench = open_bench(HYBRID)
    keys = bench.keys("a", 6)
    bench.save(keys)
    bench.store.flush()
    bench.close()
    per_unit = bench.unit // bench.spec.groups[group].page_tokens
    flip_on_disk(bench, tmp_path / "store", keys.pages(group)[4 * per_unit - 1])
    bench = open_bench(HYBRID)
    # The page ends at unit 4: the full group stops before it.  The sliding group needs it to
    # resume at 4 only, since its window is shorter than a unit.
    expected = 3 if group == 0 else 6
    assert bench.resume(bench.keys("a", 6)) == expected * bench.unit
    assert bench.resume(bench.keys("a", 6), limit=4 * bench.unit) == 3 * bench.unit
    assert bench.store.stats().counters["disk_corrupt"] == 1
    assert SaveResult.STORED in bench.save(bench.keys("a", 6))  # computed anew, kept anew
    assert bench.resume(bench.keys("a", 6)) == 6 * bench.unit


def test_a_disk_that_hangs_shortens_the_prefix_within_the_deadline(open_bench, disk):
    bench = refill(open_bench, 12)
    assert bench.resume(bench.keys("a", 2)) == 2 * bench.unit
    gate = Gate()
    disk.inject("preadv", gate, times=None, match="slabs", skip=2)
    started = time.monotonic()
    tokens = bench.resume(bench.keys("a", 12), wait_s=0.3)
    assert time.monotonic() - started < 5
    assert 2 * bench.unit < tokens < 12 * bench.unit  # what was in memory, and what arrived
    assert bench.store.stats().counters["disk_timeouts"] > 0
    gate.opened.set()
    disk.clear()
    assert bench.resume(bench.keys("a", 12)) == 12 * bench.unit


def test_with_no_time_to_wait_the_disk_is_not_touched(open_bench, disk):
    bench = refill(open_bench)
    bench.resume(bench.keys("a", 2))
    reads = disk.calls["preadv"]
    assert bench.resume(bench.keys("a", 6), wait_s=0) == 2 * bench.unit
    assert disk.calls["preadv"] == reads


def test_two_that_want_the_same_pages_read_them_once(open_bench, disk):
    bench = refill(open_bench)
    gate, found = Gate(), []
    disk.inject("preadv", gate, match="slabs")
    ask = lambda: found.append(bench.resume_tokens(bench.keys("a", 6)))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert gate.reached.wait(10)
    for thread in threads[1:]:
        thread.start()
    while bench.store.stats().counters["delay_hits"] < 2 * 6:
        assert all(thread.is_alive() for thread in threads)
    gate.opened.set()
    for thread in threads:
        thread.join(30)
    assert found == [6 * bench.unit] * 3
    assert bench.store.stats().tiers["disk"].bytes_out == 6 * bench.spec.groups[0].page_bytes


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_that_fails_midway_says_so_and_raises_nothing(open_bench, failing, layerwise):
    bench = open_bench(HYBRID)
    keys = bench.keys("a", 3)
    bench.save(keys)
    repair = failing("engine-load", 1)
    with bench.pool.match(keys) as lease:
        ticket = bench.pool.load(lease, bench.take_lease(lease), layerwise=layerwise)
        arrived = {}
        for layer in sorted(bench.spec.layer_to_group):
            with ticket.layer(layer) as ok:
                arrived[layer] = ok
        results = ticket.wait()
    assert LoadResult.FAILED in results[1]
    assert not all(arrived.values())
    assert arrived[0]
    assert bench.pool.stats().load_failures > 0
    bench.store.check()
    repair()
    assert bench.resume(keys) == 3 * bench.unit


def test_a_save_that_fails_midway_keeps_no_page_of_the_group(open_bench, failing):
    bench = open_bench(HYBRID)
    keys = bench.keys("a", 3)
    repair = failing("engine-save", 1)
    results = {0: set(), 1: set()}
    for page, result in zip(bench.all_pages(keys), bench.save(keys), strict=True):
        results[page.group] = results[page.group] | {result}
    assert results == {0: {SaveResult.STORED}, 1: {SaveResult.FAILED}}
    assert bench.pool.match(keys).tokens == 0
    bench.store.check()
    repair()
    assert set(bench.save(keys)) == {SaveResult.STORED, SaveResult.DUPLICATE}
    assert bench.resume(keys) == 3 * bench.unit


@pytest.mark.parametrize("layerwise", [False, True])
def test_copies_that_cannot_begin_are_failures(open_bench, monkeypatch, layerwise):
    bench = open_bench(HYBRID)
    keys = bench.keys("a", 2)
    bench.save(keys)

    def wait(self, event, timeout_s):
        raise DeviceError("the compute stream is broken")

    with monkeypatch.context() as patch, bench.pool.match(keys) as lease:
        patch.setattr(CpuStream, "wait", wait)
        ticket = bench.pool.load(lease, bench.take_lease(lease), layerwise=layerwise)
        with ticket.layer(0) as arrived:
            assert not arrived
        assert {result for group in ticket.wait() for result in group} == {LoadResult.FAILED}
        assert set(bench.save(bench.keys("b", 2))) == {SaveResult.FAILED}
    bench.store.check()
    assert bench.resume(keys) == 2 * bench.unit
    assert bench.resume(bench.keys("b", 2)) == 0


def test_nothing_to_move_is_no_error(open_bench):
    bench = open_bench(HYBRID)
    with bench.pool.match(bench.keys("a", 0)) as lease:
        assert bench.pool.load(lease, [[], []]).wait() == ((), ())
    save = bench.pool.save([], [])
    assert (save.wait(), save.blocks_free.is_set()) == ((), True)


def test_a_late_copy_is_late_and_then_over(open_bench, monkeypatch):
    bench = open_bench()
    keys = bench.keys("a", 2)
    bench.save(keys)
    gate, real = Gate(), CpuStream._copy_now

    def slow(self, ops):
        gate.hold()
        real(self, ops)

    monkeypatch.setattr(CpuStream, "_copy_now", slow)
    lease = bench.pool.match(keys)
    blocks = bench.take_lease(lease)
    load = bench.pool.load(lease, blocks)
    lease.release()
    pages = bench.all_pages(bench.keys("b", 1))
    own = bench.take_for(pages)
    bench.compute(pages, own)
    save = bench.pool.save(pages, own)
    assert set(load.wait(0.01)[0]) == {LoadResult.LATE}
    assert set(save.wait(0.01)) == {SaveResult.LATE}
    assert not save.blocks_free.wait(0.01)
    assert bench.pool.stats().running == 2
    bench.store.check()
    save.cancel()  # the copy goes on, but nothing will come of it
    assert not save.blocks_free.is_set()
    bench.store.check()
    gate.opened.set()
    assert set(load.wait()[0]) == {LoadResult.LOADED}
    assert save.blocks_free.wait(10)
    assert set(save.results()) == {SaveResult.FAILED}
    bench.expect_loaded(lease, keys, blocks)
    assert bench.pool.stats().running == 0
    bench.store.check()


def test_pages_on_their_way_to_the_engine_make_no_room(open_bench, monkeypatch):
    bench = open_bench(host=8, disk=None)
    keys = bench.keys("a", 6)
    bench.save(keys)
    gate, real = Gate(), CpuStream._copy_now

    def slow(self, ops):
        if self.name == "engine-load":
            gate.hold()
        real(self, ops)

    monkeypatch.setattr(CpuStream, "_copy_now", slow)
    lease = bench.pool.match(keys)
    blocks = bench.take_lease(lease)
    load = bench.pool.load(lease, blocks)
    lease.release()
    for talk in range(3):  # nobody has promised anything any more, but the copies still read
        assert SaveResult.NO_ROOM in bench.save(bench.keys(talk, 6))
    gate.opened.set()
    assert set(load.wait()[0]) == {LoadResult.LOADED}
    bench.expect_loaded(lease, keys, blocks)
    assert set(bench.save(bench.keys("b", 6))) == {SaveResult.STORED}


@pytest.mark.parametrize("disk_pages", [None, 64])
def test_host_memory_full_of_leases_has_no_room_and_does_not_hang(open_bench, disk_pages):
    bench = open_bench(host=8, disk=disk_pages)
    keys = bench.keys("a", 8)
    assert set(bench.save(keys)) == {SaveResult.STORED}
    lease = bench.pool.match(keys)
    assert lease.tokens == 8 * bench.unit
    started = time.monotonic()
    assert set(bench.save(bench.keys("b", 2))) == {SaveResult.NO_ROOM}
    assert time.monotonic() - started < 5
    lease.release()
    assert set(bench.save(bench.keys("b", 2))) == {SaveResult.STORED}
    assert bench.resume(bench.keys("b", 2)) == 2 * bench.unit


def test_a_save_larger_than_host_memory_keeps_its_beginning(open_bench):
    bench = open_bench(host=8, disk=None)
    bench.save(bench.keys("old", 4))
    keys = bench.keys("a", 12)
    results = bench.save(keys)
    assert results == (SaveResult.STORED,) * 8 + (SaveResult.NO_ROOM,) * 4
    assert bench.resume(keys) == 8 * bench.unit
    # What a save continues does not make room for it.
    assert set(bench.save(keys)) == {SaveResult.DUPLICATE, SaveResult.NO_ROOM}
    assert bench.resume(keys) == 8 * bench.unit


def test_more_than_host_memory_holds_is_promised_only_as_far_as_it_fits(open_bench):
    bench = open_bench(host=8, disk=64)
    for start in range(0, 20, 5):
        keys = bench.keys("a", 20)
        bench.save(keys, keys.pages(0, start, start + 5))
    lease = bench.pool.match(keys)
    assert lease.tokens == 8 * bench.unit
    # All of host memory is promised: nothing more can be, and nothing hangs.
    with bench.pool.match(bench.keys("a", 20), computed=8 * bench.unit) as more:
        assert more.found.total == 0
    lease.release()
    with bench.pool.match(keys, computed=8 * bench.unit) as rest:
        assert rest.tokens == 16 * bench.unit
    bench.store.check()


def test_full_tiers_demote_and_the_deepest_pages_leave_first(open_bench):
    bench = open_bench(HYBRID, host=16, disk=24)
    for talk in range(8):
        bench.save(bench.keys(talk, 2))
    lengths = [bench.resume_tokens(bench.keys(talk, 2)) // bench.unit for talk in range(8)]
    assert lengths[-1] == 2  # the last one is there, and the first has made room
    assert lengths[0] == 0
    assert sum(lengths) * 3 >= (16 + 24) * 0.6  # a unit is one full and two sliding pages
    assert bench.store.stats().counters["demoted_to_disk"] > 0


def test_pins_keep_pages_in_memory_under_pressure(open_bench):
    bench = open_bench(host=16, disk=None)
    keys = bench.keys("pinned", 4)
    bench.save(keys)
    assert bench.pool.pin(keys, owner="me", ttl_s=1000) == 4
    for talk in range(8):
        bench.save(bench.keys(talk, 4))
    assert bench.resume(keys, wait_s=0) == 4 * bench.unit
    with pytest.raises(PinError):
        bench.pool.pin(bench.keys(7, 4), owner="you") + bench.pool.pin(keys, owner="you")
    assert bench.pool.unpin("me") == 4
    for talk in range(8):
        bench.save(bench.keys(-talk, 4))
    assert bench.resume(keys) == 0


def test_writes_go_through_when_asked(open_bench, disk):
    bench = open_bench(write_through=True)
    bench.save(bench.keys("a", 6))
    before = time.monotonic()
    while bench.store.stats().tiers["disk"].pages < 6:
        bench.pool.poll()
        assert time.monotonic() < before + 20
    bench.store.check()
    gate = Gate()
    disk.inject("pwritev", gate, times=None, match="slabs")
    pages = bench.all_pages(bench.keys("b", 40))
    blocks = [bench.take_for(pages[at : at + 8]) for at in range(0, 40, 8)]
    tickets = []
    for at, ids in zip(range(0, 40, 8), blocks, strict=True):
        bench.compute(pages[at : at + 8], ids)
        tickets.append(bench.pool.save(pages[at : at + 8], ids))
        assert tickets[-1].wait() == (SaveResult.STORED,) * 8  # a slow disk holds nobody up
    assert bench.store.stats().tiers["disk"].pages == 6
    gate.opened.set()
    disk.clear()
    bench.close()
    assert tickets[-1].results() == (SaveResult.STORED,) * 8  # even now
    bench = open_bench(write_through=True)
    assert bench.resume(bench.keys("b", 40)) == 40 * bench.unit


def test_a_forked_child_is_refused_and_the_parent_unharmed(open_bench):
    bench = open_bench()
    keys = bench.keys("a", 2)
    bench.save(keys)
    child = os.fork()
    if not child:
        try:
            bench.pool.match(keys)
        except ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert bench.resume(keys) == 2 * bench.unit


def test_counters_say_what_was_done(open_bench):
    bench = refill(open_bench, 4)
    size = bench.spec.groups[0].page_bytes
    bench.resume(bench.keys("a", 6))
    bench.resume(bench.keys("a", 6), limit=2 * bench.unit)
    bench.save(bench.keys("a", 6))
    stats = bench.pool.stats()
    assert (stats.queries, stats.query_tokens) == (2, 8 * bench.unit)
    assert (stats.hits.disk, stats.hits.host) == (4 * bench.unit, 2 * bench.unit)
    assert (stats.pages_loaded, stats.bytes_loaded) == (6, 6 * size)
    assert (stats.pages_saved, stats.pages_duplicate, stats.bytes_saved) == (2, 4, 2 * size)
    assert stats.as_dict()["hits"]["disk"] == 4 * bench.unit
    tiers = bench.store.stats().tiers
    assert tiers["host"].bytes_out == tiers["device"].bytes_in == 6 * size
    assert tiers["disk"].hit_tokens == 4 * bench.unit


def test_threads_save_and_resume_at_once(open_bench):
    bench = open_bench(HYBRID, host=24, disk=64, blocks=800)
    lock, errors = threading.Lock(), []
    real_take, real_give = bench.take, bench.give

    def take(count, **how):
        with lock:
            return real_take(count, **how)

    def give(blocks):
        with lock:
            real_give(blocks)

    bench.take, bench.give, bench.wipe = take, give, lambda: None

    def talk(number):
        try:
            for turn in range(12):
                keys = bench.keys((number + turn) % 5, 1 + turn % 4, shared=1)
                bench.save(keys, wait_s=0.5)
                bench.resume(keys, wait_s=0.2, layerwise=bool(turn % 2))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert bench.pool.stats().running == 0
    bench.store.check()
