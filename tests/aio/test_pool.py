"""Attached pools, awaited."""

import asyncio

import pytest
from engine_pools import BY_NAME, Bench

from tierkv import SaveResult, StoreClosedError
from tierkv.aio.pool import AsyncPool
from tierkv.storage.testing import Gate

CASES = ["kv-apart", "hybrid"]


@pytest.fixture
def bench(tmp_path):
    benches = []

    def make(name="kv-apart", **options):
        benches.append(Bench(BY_NAME[name], tmp_path / "store", **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


async def save(bench, pool, keys):
    pages = bench.all_pages(keys)
    blocks = bench.take_for(pages)
    bench.compute(pages, blocks)
    results = await pool.saved(await pool.save(pages, blocks))
    bench.give(blocks)
    return results


@pytest.mark.parametrize("name", CASES)
def test_pages_go_out_and_come_back(bench, tools, name):
    one = bench(name)

    async def main():
        async with tools.AsyncStore(one.store) as store:
            pool = AsyncPool(one.pool, store._workers)
            keys = one.keys("a", 3)
            assert set(await save(one, pool, keys)) == {SaveResult.STORED}
            assert set(await save(one, pool, keys)) == {SaveResult.DUPLICATE}
            for layerwise, wait in ((False, {}), (True, {"wait_s": 0})):
                with await pool.match(keys, **wait) as lease:
                    assert lease.tokens == 3 * one.unit
                    blocks = one.take_lease(lease)
                    one.wipe()
                    ticket = pool.load(lease, blocks, layerwise=layerwise)
                    for layer in sorted(one.spec.layer_to_group):
                        async with pool.layer(ticket, layer) as whole:
                            assert whole
                            one.expect_loaded(lease, keys, blocks, layers=(layer,))
                    results = await pool.loaded(ticket)
                    assert {str(r) for group in results for r in group} == {"loaded"}
                    one.give(blocks)
            pages = one.all_pages(one.keys("b", 1))
            blocks = one.take_for(pages)
            begun = await pool.begin_save(pages, blocks)
            for layer in sorted(one.spec.layer_to_group):
                one.compute(pages, blocks, layers=(layer,))
                begun.layer(layer)
            assert set(await pool.saved(begun.commit())) == {SaveResult.STORED}
            await pool.close()
            await pool.close()
            with pytest.raises(StoreClosedError):
                await pool.match(keys)
            await store.check()

    tools.run(main())


def test_a_match_cancelled_while_a_disk_read_hangs_leaves_no_lease(bench, tools, disk):
    first = bench()
    first.save(first.keys("a", 4))
    assert first.store.flush().ok
    first.close()
    one = bench(io_timeout_s=20)

    async def main():
        async with tools.AsyncStore(one.store) as store:
            pool = AsyncPool(one.pool, store._workers)
            gate = Gate()
            disk.inject("preadv", gate, times=1, match="slabs")
            task = asyncio.create_task(pool.match(one.keys("a", 4)))
            assert await asyncio.to_thread(gate.reached.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.opened.set()
            await store.settled()
            assert one.pool.stats().leases == 0
            assert store.workers().undone == 1
            await store.check()

    tools.run(main())


@pytest.mark.parametrize("moment", ["waiting", "running", "arrived"])
def test_cancelled_at_every_await(bench, tools, moment):
    async def scenario(one, store):
        pool = store.attach_pool(one.case.make(one.blocks), layout=one.spec.layout)
        async with pool:
            keys = one.keys("a", 2)
            pages = one.all_pages(keys)
            await pool.saved(await pool.save(pages, one.take_for(pages)))
            pages = one.all_pages(one.keys("b", 1))
            (await pool.begin_save(pages, one.take_for(pages))).cancel()
            with await pool.match(keys) as lease:
                ticket = pool.load(lease, one.take_lease(lease), layerwise=True)
                async with pool.layer(ticket, 0):
                    pass
                await pool.loaded(ticket)

    cut = 0
    while True:
        one = bench()
        with pytest.MonkeyPatch.context() as patch:
            interrupter = tools.Interrupter(patch, cut, moment)

            async def main(one=one, at=interrupter):
                async with tools.AsyncStore(one.store) as store:
                    at.task = asyncio.create_task(scenario(one, store))
                    (outcome,) = await asyncio.gather(at.task, return_exceptions=True)
                    await store.settled()
                    await store.check()
                    assert store.workers().failed_unseen == 0
                    (pool,) = store._pools
                    assert pool.stats().leases == 0
                    return outcome

            outcome = tools.run(main())
        one.close()
        if not interrupter.fired:
            assert outcome is None
            break
        assert isinstance(outcome, asyncio.CancelledError), (cut, outcome)
        cut += 1
    assert cut >= 4
