"""Several threads at one tier: exact bytes of some version, or a miss; nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus, WriteStatus
from tierkv.storage.testing import (
    TEST_NAMESPACE,
    FaultyBackend,
    Gate,
    make_page,
    page_bytes,
    page_key,
)

SIZE = 8 << 10
SLOT = SIZE + 4096
HIT, MISS = ReadStatus.HIT, ReadStatus.MISS


def read_one(tier, number):
    out = aligned_empty(SIZE)
    return tier.read([page_key(number)], [out], namespace=TEST_NAMESPACE)[0], out


def test_threads_put_read_and_delete_the_same_pages(open_tier):
    tier = open_tier(slot_payload_bytes=SIZE, capacity_bytes=20 * SLOT, slab_bytes=5 * SLOT)
    versions: dict[int, list[np.ndarray]] = {
        n: [page_bytes(n, SIZE, v) for v in range(4)] for n in range(16)
    }

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            numbers = rng.sample(range(16), 4)
            action = rng.random()
            if action < 0.4:
                version = rng.randrange(4)
                pages = [make_page(n, SIZE, version=version) for n in numbers]
                statuses = tier.put(pages).wait(60)
                assert statuses is not None
                assert {*statuses} <= {WriteStatus.WRITTEN, WriteStatus.DUPLICATE}
            elif action < 0.6:
                tier.delete([page_key(n) for n in numbers])
            elif action < 0.65:
                assert tier.flush(60).ok
            else:
                for n in numbers:
                    status, out = read_one(tier, n)
                    assert status in (HIT, MISS)
                    if status is HIT:
                        assert any(np.array_equal(out, v) for v in versions[n])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    stats = tier.stats()
    assert stats.queue_bytes == stats.writing_slots == stats.reads_in_flight == 0
    assert stats.corrupt == 0
    tier.check()


def test_a_page_deleted_while_it_is_read_is_served_exactly(open_tier):
    backend = FaultyBackend()
    tier = open_tier(
        slot_payload_bytes=SIZE, capacity_bytes=2 * SLOT, backend=backend, io_threads=1
    )
    tier.put([make_page(1, SIZE), make_page(2, SIZE)]).wait(20)
    gate = Gate()
    backend.inject("preadv", gate)
    out = aligned_empty(SIZE)
    ticket = tier.submit_read([page_key(1)], [out])
    assert gate.reached.wait(20)
    tier.delete([page_key(1), page_key(2)])
    assert tier.put([make_page(3, SIZE)]).wait(20) == [WriteStatus.WRITTEN]
    assert tier.put([make_page(4, SIZE)]).wait(20) == [WriteStatus.NO_SPACE]
    gate.opened.set()
    assert ticket.wait(20) == [HIT]
    assert np.array_equal(out, page_bytes(1, SIZE))
    assert tier.put([make_page(4, SIZE)]).wait(20) == [WriteStatus.WRITTEN]


def test_a_page_being_written_is_a_miss_until_it_is_published(open_tier):
    backend = FaultyBackend()
    tier = open_tier(slot_payload_bytes=SIZE, backend=backend)
    gate = Gate()
    backend.inject("fdatasync", gate)
    ticket = tier.put([make_page(1, SIZE)])
    assert gate.reached.wait(20)
    assert read_one(tier, 1)[0] is MISS
    assert not tier.contains([page_key(1)])[0]
    second = tier.put([make_page(1, SIZE)])
    gate.opened.set()
    assert ticket.wait(20) == [WriteStatus.WRITTEN]
    assert second.wait(20) == [WriteStatus.DUPLICATE]
    assert read_one(tier, 1)[0] is HIT


def test_a_put_that_joined_a_failing_one_fails_with_it(open_tier):
    backend = FaultyBackend()
    tier = open_tier(slot_payload_bytes=SIZE, backend=backend)
    gate = Gate()
    backend.inject("pwritev", gate)
    backend.inject("fdatasync", 5)
    first = tier.put([make_page(1, SIZE)])
    assert gate.reached.wait(20)
    second = tier.put([make_page(1, SIZE)])
    gate.opened.set()
    assert first.wait(20) == second.wait(20) == [WriteStatus.FAILED]


def test_the_next_group_is_written_while_one_is_synced(open_tier):
    backend = FaultyBackend()
    tier = open_tier(slot_payload_bytes=SIZE, backend=backend)
    gate = Gate()
    backend.inject("fdatasync", gate)
    first = tier.put([make_page(1, SIZE)])
    assert gate.reached.wait(20)
    second = tier.put([make_page(2, SIZE), make_page(3, SIZE)])
    written = tier.put([make_page(4, SIZE)])
    seen = threading.Event()
    while backend.calls["pwritev"] < 3 and not seen.wait(0.001):
        pass
    assert not first.done()
    gate.opened.set()
    assert first.wait(20) == [WriteStatus.WRITTEN]
    assert second.wait(20) == [WriteStatus.WRITTEN] * 2
    assert written.wait(20) == [WriteStatus.WRITTEN]
    assert tier.stats().slab_syncs == 2, "what was written meanwhile shares one sync"


def test_close_while_others_use_the_tier(open_tier):
    tier = open_tier(slot_payload_bytes=SIZE)
    tier.put([make_page(n, SIZE) for n in range(8)]).wait(20)
    started = threading.Barrier(5)

    def use() -> None:
        from tierkv.errors import StoreClosedError

        started.wait()
        for n in range(200):
            status, out = read_one(tier, n % 8)
            assert status in (HIT, ReadStatus.CLOSED)
            if status is HIT:
                assert np.array_equal(out, page_bytes(n % 8, SIZE))
            try:
                statuses = tier.put([make_page(100 + n, SIZE)]).wait(20)
            except StoreClosedError:
                continue
            assert statuses is not None

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(use) for _ in range(4)]
        started.wait()
        assert tier.close()
        for future in futures:
            future.result(60)
    again = open_tier(slot_payload_bytes=SIZE)
    assert again.stats().clean_open
    assert all(read_one(again, n)[0] is HIT for n in range(8))


def test_flushes_from_many_threads(open_tier):
    tier = open_tier(slot_payload_bytes=SIZE, capacity_bytes=64 * SLOT)

    def put_and_flush(n: int) -> bool:
        tier.put([make_page(n, SIZE)])
        report = tier.flush(60)
        return report.ok and tier.contains([page_key(n)])[0]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(put_and_flush, range(40)))


def test_async_callers_that_are_cancelled_leave_nothing_behind(open_tier):
    backend = FaultyBackend()
    tier = open_tier(slot_payload_bytes=SIZE, backend=backend, io_threads=1)
    tier.put([make_page(1, SIZE)]).wait(20)
    gate = Gate()
    backend.inject("preadv", gate)
    out = aligned_empty(SIZE)

    async def ask() -> None:
        ticket = tier.submit_read([page_key(1)], [out])
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        ticket.add_settled_callback(
            lambda: loop.is_closed() or loop.call_soon_threadsafe(future.cancel)
        )
        await future

    async def main() -> None:
        task = asyncio.create_task(ask())
        await asyncio.to_thread(gate.reached.wait, 20)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gate.opened.set()
    assert read_one(tier, 1)[0] is HIT
    tier.check()
