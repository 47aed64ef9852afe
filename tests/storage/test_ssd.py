"""The SSD tier used as intended: what goes in comes out, now and after reopening."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tierkv.errors import InvalidInputError, StoreClosedError, StoreReadOnlyError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import PAGE_TAIL, PageWrite, ReadStatus, WriteStatus
from tierkv.storage.testing import (
    TEST_NAMESPACE,
    FaultyBackend,
    ManualClock,
    make_page,
    page_bytes,
    page_key,
)

SIZE = 16 << 10
HIT, MISS = ReadStatus.HIT, ReadStatus.MISS
WRITTEN, DUPLICATE = WriteStatus.WRITTEN, WriteStatus.DUPLICATE


def put(tier, *numbers, size=SIZE, version=0, **kwargs):
    pages = [make_page(n, size, version=version, **kwargs) for n in numbers]
    return tier.put(pages).wait(20)


def read(tier, *numbers, size=SIZE):
    """Return (statuses, arrays), reading with the right namespace."""
    outs = [aligned_empty(size) for _ in numbers]
    statuses = tier.read([page_key(n) for n in numbers], outs, namespace=TEST_NAMESPACE)
    return statuses, outs


def holds(tier, *numbers, size=SIZE, version=0):
    statuses, outs = read(tier, *numbers, size=size)
    return statuses == [HIT] * len(numbers) and all(
        np.array_equal(out, page_bytes(n, size, version))
        for n, out in zip(numbers, outs, strict=True)
    )


def test_pages_come_back_as_they_were(open_tier):
    tier = open_tier()
    assert put(tier, 1, 2, 3) == [WRITTEN] * 3
    assert holds(tier, 3, 1, 2)
    assert tier.contains([page_key(1), page_key(9)]) == [True, False]
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.written_pages) == (3, 0, 3)
    assert stats.logical_bytes_read == 3 * SIZE
    assert stats.device_bytes_written == 3 * (SIZE + 4096)


def test_unknown_pages_are_misses_and_leave_the_destination_alone(open_tier):
    tier = open_tier()
    out = aligned_empty(SIZE)
    out[:] = 7
    assert tier.read([page_key(1)], [out]) == [MISS]
    assert (out == 7).all()


def test_pages_survive_reopening(open_tier):
    tier = open_tier()
    put(tier, *range(10))
    assert tier.close()
    again = open_tier()
    assert again.stats().clean_open
    assert holds(again, *range(10))


def test_info_survives_close_and_scan(open_tier, fast_dir):
    tier = open_tier(namespaces={TEST_NAMESPACE: '{"model": "x"}'})
    info = {
        "parent": page_key(0),
        "group": 2,
        "num_tokens": 100,
        "flags": PAGE_TAIL,
        "created_s": 5,
    }
    page = make_page(1, SIZE, **info)
    tier.put([page]).wait(20)
    tier.record_usage({page_key(1): (3, 77), page_key(8): (1, 1)})
    tier.flush()
    assert list(tier.pages()) == [(page.info, 3, 77)]
    tier.close()
    for clean in (True, False):
        if not clean:
            (fast_dir / "store" / "clean").unlink()
        again = open_tier()
        assert again.stats().clean_open is clean
        usage = (3, 77) if clean else (0, 0)  # hits are known to the index alone
        assert list(again.pages()) == [(page.info, *usage)]
        assert again.namespaces == {TEST_NAMESPACE: '{"model": "x"}'}
        again.close()


def test_a_page_present_is_not_written_again(open_tier):
    tier = open_tier()
    assert put(tier, 1, 1) == [WRITTEN, DUPLICATE]
    assert put(tier, 1, version=5) == [DUPLICATE]
    assert holds(tier, 1)
    assert tier.stats().written_pages == 1


def test_delete_then_put_again(open_tier):
    tier = open_tier()
    put(tier, 1, 2)
    assert tier.delete([page_key(1), page_key(1), page_key(9)]) == 1
    assert read(tier, 1, 2)[0] == [MISS, HIT]
    assert put(tier, 1, version=4) == [WRITTEN]
    assert holds(tier, 1, version=4)
    tier.close()
    assert holds(open_tier(), 1, version=4)


def test_delete_follows_puts_still_on_their_way(open_tier):
    tier = open_tier()
    ticket = tier.put([make_page(n, SIZE) for n in range(8)])
    assert tier.delete([page_key(n) for n in range(8)]) == 8
    second = tier.put([make_page(3, SIZE, version=1)])
    assert ticket.wait(20) == [WRITTEN] * 8
    assert second.wait(20) == [WRITTEN]
    assert tier.contains([page_key(n) for n in range(8)]) == [n == 3 for n in range(8)]
    assert holds(tier, 3, version=1)


def test_deleted_slots_are_used_again(open_tier):
    tier = open_tier(pages=4)
    for round_ in range(5):
        numbers = range(round_ * 4, round_ * 4 + 4)
        assert put(tier, *numbers) == [WRITTEN] * 4
        assert holds(tier, *numbers)
        tier.delete([page_key(n) for n in numbers])
        tier.check()


def test_a_slot_is_not_reused_before_the_index_is_durable(open_tier):
    backend = FaultyBackend()
    tier = open_tier(pages=2, backend=backend, clock=ManualClock())
    put(tier, 1, 2)
    tier.flush()
    syncs = backend.calls["sync_index"]
    tier.delete([page_key(1)])
    assert put(tier, 3) == [WRITTEN]
    assert backend.calls["sync_index"] == syncs + 1


def test_a_full_tier_says_so(open_tier):
    tier = open_tier(pages=3)
    assert tier.capacity_pages == 3
    assert put(tier, *range(5)) == [WRITTEN] * 3 + [WriteStatus.NO_SPACE] * 2
    report = tier.flush()
    assert report.ok
    assert (report.pages, report.bytes) == (3, 3 * SIZE)
    assert report.failed == [page_key(3), page_key(4)]
    assert tier.flush().failed == []


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, SIZE - 1, SIZE])
def test_pages_shorter_than_a_slot(open_tier, size):
    tier = open_tier()
    assert put(tier, 1, 2, 3, size=size) == [WRITTEN] * 3
    assert holds(tier, 1, 2, 3, size=size)


@pytest.mark.parametrize("size", [0, SIZE + 1, 10 * SIZE])
def test_pages_that_do_not_fit_are_refused(open_tier, size):
    tier = open_tier()
    with pytest.raises(InvalidInputError, match="payload"):
        tier.put([make_page(1, size)])
    assert tier.stats().put_pages == 0


def test_unaligned_memory_works_too(open_tier):
    tier = open_tier()
    memory = np.empty(SIZE + 1, np.uint8)
    odd = memory[1:]
    odd[:] = page_bytes(1, SIZE)
    assert tier.put([PageWrite(make_page(1, SIZE).info, odd)]).wait(20) == [WRITTEN]
    out = np.empty(SIZE + 1, np.uint8)[1:]
    assert tier.read([page_key(1)], [out]) == [HIT]
    assert np.array_equal(out, page_bytes(1, SIZE))


def test_read_only_payload_memory_can_be_written(open_tier):
    tier = open_tier()
    page = make_page(1, SIZE)
    page.payload.flags.writeable = False
    assert tier.put([page]).wait(20) == [WRITTEN]
    assert holds(tier, 1)


@pytest.mark.parametrize(
    "array",
    [np.zeros(SIZE, np.int8), np.zeros((2, 8), np.uint8), np.zeros(2 * SIZE, np.uint8)[::2], b"x"],
)
def test_wrong_arrays_are_refused_before_any_io(open_tier, array):
    tier = open_tier()
    with pytest.raises(InvalidInputError, match="uint8"):
        tier.put([PageWrite(make_page(1, SIZE).info, array)])
    with pytest.raises(InvalidInputError, match="uint8"):
        tier.read([page_key(1)], [array])
    with pytest.raises(InvalidInputError, match="destinations"):
        tier.read([page_key(1)], [])


def test_layer_bytes_must_divide_the_page(open_tier):
    tier = open_tier()
    assert put(tier, 1, layer_bytes=4096) == [WRITTEN]
    assert holds(tier, 1)
    for bad in (5000, -1, 8):
        with pytest.raises(InvalidInputError, match="layer_bytes"):
            tier.put([make_page(2, SIZE, layer_bytes=bad)])


def test_another_namespace_or_size_is_a_miss(open_tier):
    tier = open_tier()
    put(tier, 1)
    out = aligned_empty(SIZE)
    out[:] = 9
    assert tier.read([page_key(1)], [out], namespace=bytes(32)) == [MISS]
    assert tier.read([page_key(1)], [out[:4096]], namespace=TEST_NAMESPACE) == [MISS]
    assert (out == 9).all()
    assert tier.stats().fingerprint_mismatch == 2
    assert tier.read([page_key(1)], [out]) == [HIT]


def test_misuse_after_close(open_tier):
    tier = open_tier()
    put(tier, 1)
    assert tier.close()
    assert tier.close()
    assert read(tier, 1)[0] == [ReadStatus.CLOSED]
    for call in (lambda: put(tier, 2), tier.flush, lambda: tier.delete([page_key(1)])):
        with pytest.raises(StoreClosedError, match="closed"):
            call()


def test_read_only_reads_and_writes_nothing(open_tier, fast_dir):
    tier = open_tier()
    put(tier, 1, 2)
    tier.close()
    before = {p: p.stat().st_mtime_ns for p in (fast_dir / "store").rglob("*") if p.is_file()}
    reader = open_tier(read_only=True)
    assert holds(reader, 1, 2)
    assert put(reader, 3) == [WriteStatus.READ_ONLY]
    assert reader.flush().ok
    assert reader.verify().ok
    assert len(list(reader.pages())) == 2
    with pytest.raises(StoreReadOnlyError):
        reader.delete([page_key(1)])
    with pytest.raises(StoreReadOnlyError):
        reader.verify(repair=True)
    reader.check()
    reader.close()
    after = {p: p.stat().st_mtime_ns for p in (fast_dir / "store").rglob("*") if p.is_file()}
    changed = [p.name for p in before if before[p] != after.get(p) and p.name != "lock.mdb"]
    assert changed == []
    assert open_tier().stats().clean_open


def test_many_pages_over_several_slabs(open_tier):
    tier = open_tier(pages=40, slab_bytes=8 * (SIZE + 4096))
    assert put(tier, *range(40)) == [WRITTEN] * 40
    assert tier.stats().slabs == 5
    tier.close()
    again = open_tier(pages=40, slab_bytes=8 * (SIZE + 4096))
    assert holds(again, *reversed(range(40)))


def test_larger_and_smaller_capacity(open_tier, caplog):
    options = {"slab_bytes": 4 * (SIZE + 4096)}
    tier = open_tier(pages=8, **options)
    put(tier, *range(8))
    tier.close()
    tier = open_tier(pages=12, **options)
    assert put(tier, *range(8, 12)) == [WRITTEN] * 4
    tier.delete([page_key(n) for n in range(3)])
    tier.close()
    with caplog.at_level(logging.WARNING):
        tier = open_tier(pages=8, **options)
    assert "dropped" in caplog.text
    assert tier.take_removed() == [page_key(3)]
    assert holds(tier, *range(4, 12))
    tier.close()
    assert open_tier(pages=8, **options).stats().pages == 8


def test_pages_of_another_size_stay_until_room_is_needed(open_tier):
    tier = open_tier(pages=4)
    put(tier, 1, 2, 3, 4)
    tier.close()
    tier = open_tier(slot_payload_bytes=2 * SIZE, capacity_bytes=4 * (SIZE + 4096))
    assert holds(tier, 1, 2, 3, 4)
    assert tier.capacity_pages == 2
    assert put(tier, 10, 11, size=2 * SIZE) == [WRITTEN] * 2
    assert holds(tier, 10, 11, size=2 * SIZE)
    assert sorted(tier.take_removed()) == sorted(page_key(n) for n in (1, 2, 3, 4))
    assert read(tier, 1)[0] == [MISS]
    tier.check()


def test_callbacks_come_after_the_pages_are_found(open_tier):
    tier = open_tier()
    seen = []

    def done(statuses):
        seen.append((statuses, tier.contains([page_key(1)])))

    ticket = tier.put([make_page(1, SIZE)], done=done)
    assert ticket.wait(20) == [WRITTEN]
    assert seen == [([WRITTEN], [True])]
    ticket.add_done_callback(lambda statuses: seen.append(statuses))
    assert seen[1] == [WRITTEN]


def test_a_failing_callback_stops_nothing(open_tier):
    tier = open_tier()

    def done(statuses):
        raise RuntimeError("of no concern to the tier")

    tier.put([make_page(1, SIZE)], done=done).wait(20)
    assert put(tier, 2) == [WRITTEN]
    assert tier.stats().callback_errors == 1


def test_empty_batches(open_tier):
    tier = open_tier()
    assert tier.put([]).wait(1) == []
    assert tier.read([], []) == []
    assert tier.contains([]) == []
    assert tier.delete([]) == 0
    assert list(tier.pages()) == []
    report = tier.flush()
    assert (report.pages, report.bytes, report.ok) == (0, 0, True)


def test_the_queue_is_bounded(open_tier):
    tier = open_tier(max_queue_bytes=SIZE)
    assert put(tier, 1, 2, 3) == [WRITTEN] + [WriteStatus.QUEUE_FULL] * 2
    assert tier.stats().rejected_queue_full == 2
    assert tier.stats().queue_bytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_bytes": 0},
        {"capacity_bytes": -5},
        {"slot_payload_bytes": 0},
        {"io_threads": 0},
        {"io_timeout_s": 0},
        {"sync_interval_s": -1},
        {"codec": "lzma"},
        {"slab_bytes": 4096},
        {"capacity_bytes": True},
    ],
)
def test_bad_options_are_refused(open_tier, fast_dir, options):
    with pytest.raises(InvalidInputError):
        open_tier(**options)
    assert not (fast_dir / "store").exists()


def test_timed_sync_makes_pages_durable_without_flush(open_tier):
    backend = FaultyBackend()
    tier = open_tier(backend=backend, sync_interval_s=0.01)
    put(tier, 1)
    ticket = tier.put([make_page(2, SIZE)])
    ticket.wait(20)
    deadline = tier._core.clock.monotonic() + 20
    while not backend.calls["sync_index"] and tier._core.clock.monotonic() < deadline:
        tier.contains([page_key(1)])
    assert backend.calls["sync_index"]


def test_stats_add_up(open_tier):
    tier = open_tier(pages=8)
    put(tier, *range(5))
    read(tier, *range(10))
    tier.delete([page_key(0)])
    tier.flush()
    stats = tier.stats()
    assert stats.lookups == stats.hits + stats.misses == 10
    assert stats.pages == 4
    assert stats.used_bytes == 4 * (SIZE + 4096)
    assert stats.page_bytes == 4 * SIZE
    assert stats.free_slots == 4
    assert stats.capacity_bytes == 8 * (SIZE + 4096)
    assert stats.put_pages == stats.written_pages == 5
