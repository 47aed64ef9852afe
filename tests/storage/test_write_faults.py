"""Faults while writing: a page is published whole and synced, or its status says why not."""

from __future__ import annotations

import errno
import logging

import pytest
from small_tier import FAILED, HIT, MISS, NO_SPACE, SIZE, SLOT, WRITTEN, put, read

from tierkv.storage.ssd import WriteStatus
from tierkv.storage.testing import (
    Gate,
    make_page,
    page_key,
)


def slab_of(tier, number):
    location, _ = tier._core.catalog.pin(page_key(number), None)
    tier._core.catalog.unpin(location)
    return location.slab


def test_short_writes_are_completed(tier, backend):
    backend.inject("pwritev", "short", times=3)
    assert put(tier, 1, 2, 3) == [WRITTEN] * 3
    assert read(tier, 1, 2, 3) == [HIT] * 3


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_a_transient_write_error_fails_the_page_only(tier, backend, number):
    backend.inject("pwritev", number)
    assert put(tier, 1) == [FAILED]
    assert put(tier, 1) == [WRITTEN]
    assert tier.stats().retired_slabs == 0


def test_a_write_error_retires_the_slab(open_tier, backend, fast_dir):
    tier = open_tier(backend=backend, pages=8, slab_bytes=4 * SLOT)
    put(tier, 1)
    backend.inject("pwritev", errno.EIO)
    assert put(tier, 2) == [FAILED]
    assert not tier.contains([page_key(2)])[0]
    assert tier.stats().retired_slabs == 1
    assert put(tier, 3, 4) == [WRITTEN] * 2
    assert slab_of(tier, 3) == 1, "the retired slab is written no more"
    assert read(tier, 1, 3, 4) == [HIT] * 3
    report = tier.flush()
    assert report.ok
    assert report.failed == [page_key(2)]
    tier.check()
    tier.close()
    again = open_tier(pages=8, slab_bytes=4 * SLOT)
    assert read(again, 1, 3, 4) == [HIT] * 3
    assert put(again, 10, 11, 12, 13) == [WRITTEN] * 4, "a retired slab gives way when needed"
    assert again.take_removed() == [page_key(1)]


def test_a_failed_sync_publishes_nothing_and_is_not_repeated(open_tier, backend):
    tier = open_tier(backend=backend, pages=8, slab_bytes=4 * SLOT)
    put(tier, 1)
    before = backend.calls["fdatasync"]
    backend.inject("fdatasync", errno.EIO)
    assert put(tier, 2, 3) == [FAILED] * 2
    assert backend.calls["fdatasync"] == before + 1
    assert tier.contains([page_key(n) for n in (1, 2, 3)]) == [True, False, False]
    assert tier.stats().retired_slabs == 1
    assert put(tier, 2) == [WRITTEN]
    assert slab_of(tier, 2) == 1
    assert read(tier, 1, 2) == [HIT, HIT]


def test_pages_in_flight_to_a_slab_whose_sync_failed_are_not_published(open_tier, backend):
    tier = open_tier(backend=backend, pages=8, slab_bytes=4 * SLOT)
    gate = Gate()
    backend.inject("fdatasync", gate)
    first = tier.put([make_page(1, SIZE)])
    assert gate.reached.wait(20)
    second = tier.put([make_page(2, SIZE)])
    backend.inject("fdatasync", errno.EIO)
    gate.opened.set()
    assert first.wait(20) == [WRITTEN]
    assert second.wait(20) == [FAILED]
    third = put(tier, 3)
    assert third == [WRITTEN]
    assert slab_of(tier, 3) == 1


def test_no_space_for_a_slab(tier, backend):
    backend.inject("fallocate", errno.ENOSPC, times=2)
    assert put(tier, 1) == [NO_SPACE]
    assert put(tier, 2) == [NO_SPACE]
    assert put(tier, 3) == [WRITTEN], "it recovers when space returns"
    assert tier.stats().rejected_no_space == 2


def test_no_space_for_a_slab_leaves_the_others_in_use(open_tier, backend, fast_dir):
    tier = open_tier(backend=backend, pages=8, slab_bytes=4 * SLOT)
    put(tier, *range(4))
    backend.inject("fallocate", errno.ENOSPC, times=None)
    assert put(tier, 4) == [NO_SPACE]
    tier.delete([page_key(0)])
    assert put(tier, 4) == [WRITTEN]
    assert read(tier, *range(1, 5)) == [HIT] * 4
    assert sorted(p.name for p in (fast_dir / "store" / "slabs").iterdir()) == ["0000"]


def test_no_space_while_writing_a_page(tier, backend):
    backend.inject("pwritev", errno.ENOSPC)
    assert put(tier, 1) == [NO_SPACE]
    assert put(tier, 1) == [WRITTEN]


def test_no_space_for_the_index(tier, backend):
    put(tier, 1)
    backend.inject("commit_index", errno.ENOSPC)
    assert put(tier, 2) == [NO_SPACE]
    assert put(tier, 2) == [WRITTEN]
    assert tier.flush().ok
    assert read(tier, 1, 2) == [HIT, HIT]


def test_no_space_for_a_deletion_is_made_up_for(tier, backend):
    put(tier, 1, 2)
    tier.flush()
    tier.delete([page_key(1)])
    backend.inject("commit_index", errno.ENOSPC)
    assert not tier.flush().ok
    assert read(tier, 1, 2) == [MISS, HIT]
    assert tier.flush().ok
    tier.check()


@pytest.mark.parametrize("op", ["commit_index", "sync_index"])
def test_a_failing_index_stops_writing_but_not_reading(open_tier, backend, op, caplog):
    tier = open_tier(backend=backend)
    put(tier, 1)
    assert tier.flush().ok
    backend.inject(op, errno.EIO)
    with caplog.at_level(logging.ERROR):
        put(tier, 2)
        assert not tier.flush().ok
    assert "pages are still read" in caplog.text
    assert tier.stats().read_only
    assert tier.stats().write_fault
    assert put(tier, 3) == [WriteStatus.READ_ONLY]
    assert read(tier, 1) == [HIT]
    tier.close()
    again = open_tier()
    assert not again.stats().clean_open
    assert read(again, 1, 2) == [HIT, HIT], "the scan finds what was written"
    assert put(again, 3) == [WRITTEN]


@pytest.mark.parametrize("error", [SystemExit(), MemoryError(), ValueError()])
def test_a_write_that_blows_up_fails_the_page(tier, backend, error):
    backend.inject("pwritev", error)
    assert put(tier, 1) == [FAILED]
    assert put(tier, 1) == [WRITTEN]


def test_a_sync_that_blows_up_fails_the_group(tier, backend):
    backend.inject("fdatasync", ValueError("unexpected"))
    assert put(tier, 1) == [FAILED]
    assert tier.stats().worker_errors == 1


def test_the_writer_thread_outlives_its_own_failures(tier, backend):
    put(tier, 1)
    backend.inject("commit_index", ValueError("unexpected"))
    assert put(tier, 2) == [FAILED]
    assert put(tier, 3) == [WriteStatus.READ_ONLY]
    assert not tier.flush(20).ok
    assert read(tier, 1) == [HIT]


def test_a_hung_write_times_flush_and_close_out(open_tier, backend, fast_dir):
    tier = open_tier(backend=backend, io_timeout_s=0.01)
    gate = Gate()
    backend.inject("pwritev", gate)
    ticket = tier.put([make_page(1, SIZE)])
    assert gate.reached.wait(20)
    assert ticket.wait(0.001) is None
    assert not tier.flush(0.001).ok
    assert not tier.flush().ok, "without a deadline it waits while there is progress"
    assert tier.close(0.01) is False
    gate.opened.set()
    assert ticket.wait(20) == [WRITTEN]
    # The directory stays locked after such a close; let the threads end for the next test.
    tier._writer._thread.join(20)
    tier._writer._writes.stop()
    tier._writer._syncs.stop()
    assert tier._writer._writes.join(20)
    assert tier._writer._syncs.join(20)
    tier._core.release()
    assert read(open_tier(), 1) == [HIT]
