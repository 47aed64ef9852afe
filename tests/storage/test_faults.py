"""Storage faults while serving: each is a counted miss or a status, never wrong bytes."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading

import pytest
from small_tier import CORRUPT, ERROR, FAILED, HIT, MISS, NO_SPACE, SIZE, SLOT, WRITTEN, put, read

from tierkv.errors import StoreError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus
from tierkv.storage.testing import (
    FaultyBackend,
    Gate,
    ManualClock,
    kill_image,
    page_key,
)


def slot_of(tier, number):
    location, _ = tier._core.catalog.pin(page_key(number), None)
    tier._core.catalog.unpin(location)
    return location.slab, location.slot


def overwrite(tier, number, offset, data):
    """Change bytes of a page at rest, behind the tier's back."""
    slab, slot = slot_of(tier, number)
    with open(tier._core.layout.slab(slab), "r+b") as file:
        file.seek(slot * SLOT + offset)
        file.write(data)


def slot_bytes_at(tier, number):
    slab, slot = slot_of(tier, number)
    with open(tier._core.layout.slab(slab), "rb") as file:
        file.seek(slot * SLOT)
        return file.read(SLOT)


# -- damaged bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 40, 100, 300, 4095, 4096, 4096 + SIZE // 2, SLOT - 1])
def test_a_flipped_bit_is_a_miss_and_drops_the_page(tier, offset):
    put(tier, 1, 2)
    byte = slot_bytes_at(tier, 1)[offset]
    overwrite(tier, 1, offset, bytes([byte ^ 4]))
    assert read(tier, 1, 2) == [CORRUPT, HIT]
    assert read(tier, 1) == [MISS]
    stats = tier.stats()
    assert stats.corrupt == 1
    assert (stats.checksum_header, stats.checksum_payload) == ((1, 0) if offset < 4096 else (0, 1))
    assert tier.take_removed() == [page_key(1)]
    assert tier.take_removed() == []
    assert put(tier, 1) == [WRITTEN]
    assert read(tier, 1) == [HIT]


def test_every_flipped_byte_of_a_slot_is_noticed(open_tier, fast_dir):
    writer = open_tier()
    put(writer, 1, layer_bytes=4096)
    writer.close()
    tier = open_tier(read_only=True)  # it drops nothing, so that each byte can be tried
    out = aligned_empty(SIZE)
    with open(fast_dir / "store" / "slabs" / "0000", "r+b", buffering=0) as file:
        slot = file.read(SLOT)
        for offset in [*range(0, 4096, 3), *range(4096, SLOT, 41), SLOT - 1]:
            os.pwrite(file.fileno(), bytes([slot[offset] ^ 64]), offset)
            assert tier.read([page_key(1)], [out]) != [HIT], f"byte {offset}"
            os.pwrite(file.fileno(), slot[offset : offset + 1], offset)
    assert read(tier, 1) == [HIT]


@pytest.mark.parametrize("kept", range(4096, SLOT, 4096))
def test_a_torn_page_is_a_miss(tier, kept):
    put(tier, 1)
    overwrite(tier, 1, kept, bytes(SLOT - kept))
    assert read(tier, 1) == [CORRUPT]
    assert tier.stats().torn_pages == 1


def test_a_bit_flipped_on_the_way_is_read_again(tier, backend):
    put(tier, 1)
    backend.inject("preadv", "flip")
    assert read(tier, 1) == [HIT]
    assert tier.stats().retry_reads == 1
    assert tier.stats().corrupt == 0


def test_a_write_damaged_on_the_way_is_never_served(tier, backend):
    backend.inject("pwritev", "flip")
    assert put(tier, 1) == [WRITTEN]
    assert read(tier, 1) == [CORRUPT]


def test_a_stale_slot_is_a_miss(tier):
    put(tier, 1, 2)
    overwrite(tier, 1, 0, slot_bytes_at(tier, 2))
    assert read(tier, 1, 2) == [CORRUPT, HIT]
    assert tier.stats().stale_slots == 1


def test_swapped_slots_are_misses(tier):
    put(tier, 1, 2)
    first, second = slot_bytes_at(tier, 1), slot_bytes_at(tier, 2)
    overwrite(tier, 1, 0, second)
    overwrite(tier, 2, 0, first)
    assert read(tier, 1, 2) == [CORRUPT, CORRUPT]
    assert tier.stats().stale_slots == 2


def test_an_older_write_of_the_same_page_is_a_miss(tier):
    put(tier, 1)
    old = slot_bytes_at(tier, 1)
    tier.delete([page_key(1)])
    tier.flush()
    put(tier, 1)
    overwrite(tier, 1, 0, old)
    assert read(tier, 1) == [CORRUPT]
    assert tier.stats().stale_slots == 1


def test_verify_finds_and_repairs_what_is_bad(tier, fast_dir):
    put(tier, *range(6))
    tier.flush()
    (fast_dir / "store" / "notes.txt").write_text("not ours")
    assert tier.verify().ok
    overwrite(tier, 2, 5000, b"damage")
    overwrite(tier, 4, 10, b"damage")
    seen = []
    report = tier.verify(progress=lambda done, total: seen.append((done, total)))
    assert (report.pages, report.bad, report.repaired) == (6, 2, 0)
    assert sorted(report.bad_keys) == sorted([page_key(2), page_key(4)])
    assert report.unknown_files == ["notes.txt"]
    assert not report.ok
    assert seen[-1] == (6, 6)
    assert tier.verify(repair=True).repaired == 2
    assert tier.verify().ok
    assert tier.stats().pages == 4
    tier.flush()
    tier.check()


# -- reading -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES]
)
def test_a_transient_read_error_is_a_miss_and_keeps_the_page(tier, backend, number):
    put(tier, 1)
    backend.inject("preadv", number)
    assert read(tier, 1) == [ERROR]
    assert read(tier, 1) == [HIT]
    assert tier.stats().errors_by_kind == {f"read_{errno.errorcode[number]}": 1}


def test_a_read_error_is_tried_again_once(tier, backend):
    put(tier, 1)
    backend.inject("preadv", errno.EIO)
    assert read(tier, 1) == [HIT]
    assert tier.stats().retry_reads == 1


def test_a_page_that_cannot_be_read_is_quarantined(tier, backend):
    put(tier, 1, 2)
    backend.inject("preadv", errno.EIO, times=6)
    assert [read(tier, 1)[0] for _ in range(4)] == [ERROR, ERROR, ERROR, MISS]
    assert tier.stats().quarantined == 1
    assert tier.take_removed() == [page_key(1)]
    assert read(tier, 2) == [HIT]


def test_a_failing_device_is_taken_out_of_service_and_probed(open_tier, backend):
    tier = open_tier(backend=backend, breaker_threshold=3)
    put(tier, *range(10))
    backend.inject("preadv", errno.EIO, times=None)
    for number in range(3):
        assert read(tier, number) == [ERROR]
    assert tier.stats().breaker == "open"
    calls = backend.calls["preadv"]
    assert read(tier, *range(9)) == [ERROR] * 9
    assert backend.calls["preadv"] == calls
    assert put(tier, 20) == [FAILED]
    assert tier.stats().throttled == 10
    backend.clear()
    results = [read(tier, 9)[0] for _ in range(16)]
    assert results.count(HIT) > 0
    assert tier.stats().breaker == "closed"
    assert put(tier, 21) == [WRITTEN]


def test_short_reads_are_completed(tier, backend):
    put(tier, 1, 2, 3)
    backend.inject("preadv", "short", times=3)
    assert read(tier, 1, 2, 3) == [HIT] * 3


def test_a_hung_read_is_a_miss_and_its_memory_stays_busy(open_tier, backend):
    tier = open_tier(backend=backend, io_threads=1, pages=2)
    put(tier, 1, 2)
    gate = Gate()
    backend.inject("preadv", gate)
    out = aligned_empty(SIZE)
    other = aligned_empty(SIZE)
    ticket = tier.submit_read([page_key(1)], [out])
    assert gate.reached.wait(20)
    assert ticket.wait(0.001) == [ReadStatus.TIMEOUT]
    assert not ticket.settled()
    settled = threading.Event()
    ticket.add_settled_callback(settled.set)
    late = tier.submit_read([page_key(2)], [other])
    assert late.wait(0.001) == [ReadStatus.TIMEOUT]
    tier.delete([page_key(1)])
    tier.flush()
    assert put(tier, 3) == [NO_SPACE], "the slot being read must not be reused"
    gate.opened.set()
    assert settled.wait(20)
    assert ticket.settled()
    late.wait(20)
    assert late.settled()
    assert (other == 0).all(), "a read nobody waits for is not begun"
    assert put(tier, 3) == [WRITTEN]
    assert tier.stats().timeouts == 2


def test_hangs_take_the_tier_out_of_service(open_tier, backend):
    tier = open_tier(backend=backend, io_threads=1, io_timeout_s=0.001, breaker_threshold=2)
    put(tier, 1, 2)
    gate = Gate()
    backend.inject("preadv", gate)
    for number in (1, 2):
        assert read(tier, number) == [ReadStatus.TIMEOUT]
    assert tier.stats().breaker == "open"
    assert read(tier, 1) == [ERROR]
    gate.opened.set()


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), MemoryError(), ValueError()])
def test_a_read_that_blows_up_is_a_miss(tier, backend, error):
    put(tier, 1, 2)
    backend.inject("preadv", error)
    assert read(tier, 1) == [ERROR]
    assert read(tier, 1, 2) == [HIT, HIT]


# -- opening files, alignment ------------------------------------------------------------


def test_too_many_open_files_is_a_miss(open_tier, backend):
    tier = open_tier()
    put(tier, 1)
    tier.close()
    tier = open_tier(backend=backend)
    backend.inject("open", errno.EMFILE, match="slabs/0000")
    assert read(tier, 1) == [ERROR]
    assert read(tier, 1) == [HIT]


def test_direct_io_refused_is_noted_once(open_tier, backend, caplog):
    backend.inject("open", errno.EINVAL, match=".probe")
    with caplog.at_level(logging.WARNING):
        tier = open_tier(backend=backend)
        put(tier, *range(5))
    assert caplog.text.count("O_DIRECT") == 1
    assert not tier.stats().direct
    assert read(tier, *range(5)) == [HIT] * 5


def test_direct_io_can_be_turned_off(open_tier, caplog):
    with caplog.at_level(logging.WARNING):
        tier = open_tier(direct=False)
    assert "O_DIRECT" not in caplog.text
    put(tier, 1)
    assert read(tier, 1) == [HIT]


def test_signals_do_no_harm(tier):
    def handler(number, frame):
        pass

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in range(16):
            assert put(tier, number) == [WRITTEN]
            assert read(tier, number) == [HIT]
        assert tier.flush().ok
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_clock_jumps_do_no_harm(open_tier):
    clock = ManualClock()
    tier = open_tier(clock=clock)
    put(tier, 1)
    for years in (10, -20):
        clock.jump(years * 365 * 86400)
        assert read(tier, 1) == [HIT]
        assert put(tier, 30 + years) == [WRITTEN]
        assert tier.flush().ok


def test_slab_file_unlinked_while_open(open_tier, backend):
    tier = open_tier()
    put(tier, 1, 2)
    tier.close()
    tier = open_tier()
    os.unlink(tier._core.layout.slab(0))
    assert read(tier, 1) == [CORRUPT]
    assert read(tier, 1, 2) == [MISS, CORRUPT]
    assert put(tier, 3) == [FAILED]
    assert sorted(tier.take_removed()) == sorted([page_key(1), page_key(2)])


def test_slab_file_cut_while_open(tier):
    put(tier, 1, 2)
    os.truncate(tier._core.layout.slab(0), SLOT)
    assert read(tier, 1, 2) == [HIT, CORRUPT]
    assert not tier.verify().ok


def test_the_figures_are_true(open_tier, fast_dir):
    tier = open_tier(pages=12, slab_bytes=4 * SLOT)
    put(tier, *range(6))
    stats = tier.stats()
    sizes = [p.stat().st_size for p in (fast_dir / "store" / "slabs").iterdir()]
    assert stats.slab_bytes == sum(sizes) == 2 * 4 * SLOT
    assert stats.slabs == 2
    assert stats.device_bytes_written == 6 * SLOT
    assert read(tier, *range(7)) == [HIT] * 6 + [MISS]
    stats = tier.stats()
    assert stats.device_bytes_read == 6 * SLOT
    assert (stats.lookups, stats.hits, stats.misses) == (7, 6, 1)


def test_trouble_upon_trouble(open_tier, backend, fast_dir):
    """A crash while the disk is full, then a fault while recovering, then damage."""
    tier = open_tier(backend=backend, pages=8, slab_bytes=4 * SLOT)
    put(tier, *range(4))
    assert tier.flush().ok
    backend.inject("fallocate", errno.ENOSPC, times=None)
    assert put(tier, 4) == [NO_SPACE]
    kill_image(str(fast_dir / "store"), str(fast_dir / "image"))
    failing = FaultyBackend()
    failing.inject("sync_index", errno.EIO)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_tier(fast_dir / "image", pages=8, slab_bytes=4 * SLOT, backend=failing)
    again = open_tier(fast_dir / "image", pages=8, slab_bytes=4 * SLOT)
    overwrite(again, 2, 5000, b"damage")
    assert read(again, *range(5)) == [HIT, HIT, CORRUPT, HIT, MISS]
    assert put(again, 2, 4) == [WRITTEN] * 2
    assert again.verify().ok
