"""A disk that fails, hangs or is full under a store at work: hits are lost, nothing else."""

import errno
import time
from functools import partial

import pytest
from toy_model import FULL, MIXED, turn

from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import FaultyBackend, Gate


@pytest.fixture
def disk(monkeypatch):
    """The backend of every SSD tier opened in the test."""
    backend = FaultyBackend()
    monkeypatch.setattr(
        "tierkv.data_plane.opening.SsdTier.open", partial(SsdTier.open, backend=backend)
    )
    return backend


def talks(count, length=20):
    return [[1000 * number + i for i in range(length)] for number in range(count)]


def fill(open_store, path, count=3, spec=FULL, **options):
    store = open_store(spec, path=path, **options)
    for talk in talks(count):
        turn(store, talk)
    assert store.flush().ok
    store.close()
    return open_store(spec, path=path, **options)


@pytest.mark.parametrize("spec", [FULL, MIXED], ids=["full", "mixed"])
def test_reads_that_fail_are_misses_and_come_back(open_store, tmp_path, disk, spec):
    store = fill(open_store, tmp_path / "s", spec=spec, device=200)
    disk.inject("preadv", errno.EIO, times=None, match="slabs")
    found = turn(store, [*talks(1)[0], 7], finish=False)
    assert found.total == 0
    assert store.stats().counters["disk_errors"] > 0
    disk.clear()
    # After so many errors the tier may be out of service; it is tried again now and then.
    again = (turn(store, [*talks(2)[1], 7], finish=False).total for _ in range(100))
    assert 20 in again


def test_a_page_that_cannot_be_read_shortens_the_prefix_to_what_is_in_memory(
    open_store, tmp_path, disk
):
    store = fill(open_store, tmp_path / "s", count=1)
    assert turn(store, talks(1)[0][:9], finish=False).total == 8  # two pages are in memory now
    disk.inject("preadv", errno.EIO, times=None, match="slabs")
    assert turn(store, [*talks(1)[0], 7], finish=False).total == 8


def test_a_flipped_bit_is_read_again_and_then_a_miss(open_store, tmp_path, disk):
    store = fill(open_store, tmp_path / "s", count=2)
    disk.inject("preadv", "flip", times=1, match="slabs")
    assert turn(store, [*talks(1)[0], 7]).total == 20  # the second look was right
    disk.inject("preadv", "flip", times=None, match="slabs")
    assert turn(store, [*talks(2)[1], 7], finish=False).total == 0
    assert store.stats().counters["disk_corrupt"] > 0


def test_a_read_that_hangs_is_a_miss_at_its_deadline(open_store, tmp_path, disk):
    store = fill(open_store, tmp_path / "s", io_timeout_s=0.3)
    gate = Gate()
    disk.inject("preadv", gate, times=None, match="slabs")
    assert turn(store, [*talks(1)[0], 7], finish=False).total == 0
    assert store.stats().counters["disk_timeouts"] == 5
    assert store.stats().tiers["host"].held == 5  # the device may still write there
    store.check()
    gate.opened.set()
    disk.clear()


def test_writes_that_fail_lose_pages_and_nothing_else(open_store, tmp_path, disk):
    store = open_store(path=tmp_path / "s", device=8, host=8)
    disk.inject("pwritev", errno.EIO, times=None, match="slabs")
    for talk in talks(8):
        assert turn(store, talk).total == 0
    report = store.flush()
    assert not report.ok
    assert report.failed_pages > 0
    assert store.stats().counters["write_failures"] > 0
    disk.clear()
    assert turn(store, [*talks(8)[7], 7]).total == 20  # still in memory


def test_a_full_disk_is_a_smaller_disk(open_store, tmp_path, disk):
    store = open_store(path=tmp_path / "s", device=8, host=8, disk=64)
    for talk in talks(4):
        turn(store, talk)
    store.flush()
    disk.inject("fallocate", errno.ENOSPC, times=None)
    disk.inject("pwritev", errno.ENOSPC, times=None, match="slabs")
    for talk in talks(12)[4:]:
        turn(store, talk)
    disk.clear()
    assert turn(store, [*talks(12)[11], 7]).total == 20


@pytest.mark.parametrize("op", ["fdatasync", "commit_index", "sync_index"])
def test_a_sync_that_fails_is_reported_by_flush(open_store, tmp_path, disk, op):
    store = open_store(path=tmp_path / "s")
    turn(store, talks(1)[0])
    disk.inject(op, errno.EIO, times=None)
    assert not store.flush().ok
    assert turn(store, [*talks(1)[0], 7]).total == 20
    disk.clear()


def test_a_flush_over_a_hanging_disk_ends(open_store, tmp_path, disk):
    store = open_store(path=tmp_path / "s", device=60, host=8, io_timeout_s=0.2)
    gate = Gate()
    disk.inject("pwritev", gate, times=None, match="slabs")
    turn(store, list(range(200)))
    started = time.monotonic()
    assert not store.flush().ok
    assert time.monotonic() - started < 5
    gate.opened.set()
    disk.clear()
    assert store.flush().ok


def test_writes_that_hang_cost_pages_and_no_exception(open_store, tmp_path, disk):
    store = open_store(path=tmp_path / "s", device=8, host=8, io_timeout_s=0.2)
    gate = Gate()
    disk.inject("pwritev", gate, times=None, match="slabs")
    for talk in talks(6):
        turn(store, talk)
    assert store.stats().counters["dropped_pages"] > 0
    gate.opened.set()
    disk.clear()
    assert turn(store, [*talks(6)[5], 7]).total == 20
