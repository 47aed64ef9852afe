"""The store, awaited and cancelled: at every await, behind busy threads, with hanging disks."""

import asyncio
import threading

import pytest
from toy_model import MIXED, turn

from tierkv import InvalidInputError, Store
from tierkv.storage.testing import Gate

TOKENS = list(range(30))


async def reached(gate):
    assert await asyncio.to_thread(gate.reached.wait, 20)


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_begin_is_cancelled_while_a_disk_read_hangs(tmp_path, tools, disk):
    options = tools.options(io_timeout_s=20)
    with Store.open(tmp_path / "s", **options) as store:
        turn(store, TOKENS)

    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **options) as store:
            gate = Gate()
            disk.inject("preadv", gate, times=1, match="slabs")
            task = asyncio.create_task(store.begin([*TOKENS, 1]))
            await reached(gate)
            await cancelled(task)  # while the read hangs
            await store.check()
            gate.opened.set()
            await tools.whole(store)
            assert store.workers().undone == 1
            assert (await tools.turn(store, [*TOKENS, 1])).total == 30

    tools.run(main())


def test_begins_queue_behind_busy_workers_and_are_cancelled_there(tmp_path, tools, disk):
    options = tools.options(io_timeout_s=20, workers=1)
    with Store.open(tmp_path / "s", **tools.options()) as store:
        turn(store, TOKENS)

    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **options) as store:
            gate = Gate()
            disk.inject("preadv", gate, times=1, match="slabs")
            first = asyncio.create_task(store.begin([*TOKENS, 1]))
            await reached(gate)
            begins = store.stats().counters["begins"]
            queued = [asyncio.create_task(store.begin([n, 2])) for n in range(5)]
            await asyncio.sleep(0)
            assert store.workers().waiting == 5
            for task in queued[1:]:
                await cancelled(task)
            gate.opened.set()
            for task in (first, queued[0]):
                async with await task:
                    pass
            await tools.whole(store)
            assert store.stats().counters["begins"] == begins + 2

    tools.run(main())


@pytest.mark.parametrize("cancellations", [1, 2])
def test_leaving_waits_for_a_call_that_a_cancellation_left_running(tmp_path, tools, cancellations):
    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **tools.options()) as store:
            gate, left = Gate(), asyncio.Event()
            sequence = await store.begin(TOKENS)
            commit = sequence.sync.commit
            sequence.sync.commit = lambda *a, **k: (gate.hold(), commit(*a, **k))[1]

            async def talk():
                async with sequence:
                    await tools.feed(sequence, TOKENS)
                    try:
                        await sequence.commit(TOKENS)
                    finally:
                        left.set()

            task = asyncio.create_task(talk())
            await reached(gate)
            task.cancel()
            await left.wait()
            with pytest.raises(InvalidInputError, match="still runs"):
                sequence.keep_from(None)
            with pytest.raises(TimeoutError):  # it waits for its turn behind the commit
                async with asyncio.timeout(0.01):
                    await sequence.reserve(1)
            assert not task.done()
            assert not sequence.ended
            if cancellations == 2:  # ends the waiting, not the abandoning
                await cancelled(task)
            gate.opened.set()
            await store.settled()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert sequence.ended
            await tools.whole(store)
            assert (await tools.turn(store, TOKENS)).total == 28  # the commit had its effect

    tools.run(main())


def test_a_loop_that_is_closed_early_loses_nothing(tmp_path, tools, disk):
    options = tools.options(io_timeout_s=20)
    with Store.open(tmp_path / "s", **options) as store:
        turn(store, TOKENS)
    store = tools.run(tools.AsyncStore.open(tmp_path / "s", **options))
    gate, loop = Gate(), asyncio.new_event_loop()
    disk.inject("preadv", gate, times=1, match="slabs")
    begin = store.begin([*TOKENS, 1])

    async def step():
        begin.send(None)

    loop.run_until_complete(step())
    assert gate.reached.wait(20)
    loop.close()
    gate.opened.set()
    begin.close()
    tools.run(tools.whole(store))
    tools.run(store.close())


async def scenario(tools, path, options):
    """Every awaited call once, each a moment at which the task may be cancelled."""
    async with await tools.AsyncStore.open(path, **options) as store:
        scenario.store = store
        async with await store.begin(TOKENS) as sequence:
            await sequence.reserve(20)
            sequence.keep_from(18)
            await tools.feed(sequence, TOKENS[:20])
            await sequence.commit(TOKENS[:20], turn_end=True)
            async with await sequence.fork() as fork:
                await sequence.crop(18)
                await tools.feed(fork, TOKENS)
                await fork.finish(TOKENS)
            await sequence.abandon()
        await store.hint(TOKENS, ttl_s=1)
        await store.pin(TOKENS, owner="me")
        store.unpin("me")
        await store.flush()
        await store.check()


@pytest.mark.parametrize("moment", ["waiting", "running", "arrived"])
def test_cancelled_at_every_await(tmp_path, tools, moment):
    cut = 0
    while True:
        options = tools.options(MIXED, device=100, workers=2)
        with pytest.MonkeyPatch.context() as patch:
            interrupter = tools.Interrupter(patch, cut, moment)

            async def main(at=interrupter, options=options, path=tmp_path / f"s{cut}"):
                scenario.store = None
                at.task = asyncio.create_task(scenario(tools, path, options))
                (outcome,) = await asyncio.gather(at.task, return_exceptions=True)
                store = scenario.store
                if store is not None:
                    await store.close()
                    stats = store.workers()
                    assert (stats.waiting, stats.running, stats.failed_unseen) == (0, 0, 0)
                return outcome

            outcome = tools.run(main())
        for thread in threading.enumerate():
            if thread.name.startswith("tierkv-aio"):
                thread.join(20)
        # The directory is free, every page that was committed is whole, nothing is held.
        with Store.open(tmp_path / f"s{cut}", **tools.options(MIXED, device=100)) as store:
            turn(store, TOKENS)
            store.check()
            assert store.stats().tiers["device"].held == 0
        if not interrupter.fired:
            assert outcome is None
            break
        assert isinstance(outcome, asyncio.CancelledError), (cut, outcome)
        cut += 1
    assert cut >= 14
