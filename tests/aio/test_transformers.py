"""Generation, awaited: the same tokens, and a model that stops when nobody waits any more."""

import asyncio
import gc
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv import InvalidInputError, StoreClosedError  # noqa: E402
from tierkv.aio.transformers import AsyncTierKV  # noqa: E402
from tierkv.aio.workers import nothing  # noqa: E402
from tierkv.devices.base import DeviceError  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402

IDS = [(7 * i + 3) % 89 + 3 for i in range(40)]
OTHER = [(5 * i + 1) % 89 + 3 for i in range(24)]
BUDGETS = {"device": "4MiB", "host": "4MiB", "disk": "16MiB", "page_tokens": 8}
NAME = "past_key_values"  # of the cache, in every release
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny()


@pytest.fixture(scope="module")
def right(model):
    """The tokens of IDS and of OTHER without any cache of ours."""
    return {
        name: model.generate(torch.tensor([ids]), **GREEDY)[0].tolist()
        for name, ids in (("ids", IDS), ("other", OTHER))
    }


@pytest.fixture
def attach(model, tmp_path):
    def attach(**options):
        path = options.pop("path", tmp_path / "kv")
        return AsyncTierKV.attach(model, path, **{**BUDGETS, "self_check": False, **options})

    return attach


async def whole(kv):
    await kv.settled()
    await kv.check()
    assert kv.stats().sequences == 0
    assert kv.stats().tiers["device"].held == 0
    assert not set(kv._caches)


async def read_on(tokens, stream):
    async for ids in stream:
        tokens += ids


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_generation_gives_what_it_gives_without_await(model, attach, tmp_path, tools, right):
    def options(number):
        return [
            GREEDY,
            {"do_sample": True, "max_new_tokens": 8},
            {"num_beams": 3, "max_new_tokens": 6, "do_sample": False},
            {"prompt_lookup_num_tokens": 2, **GREEDY},
        ][number]

    prompts = [IDS, [*IDS, 5, 6], [OTHER, OTHER[:9]], OTHER]
    plain = []
    with TierKV.attach(model, tmp_path / "plain", **BUDGETS) as kv:
        for number in range(4):
            torch.manual_seed(number)
            plain.append(kv.generate(prompts[number], **options(number)).tolist())
        counters = kv.stats().counters

    async def main():
        async with await attach(self_check=True) as kv:
            for number in range(4):
                torch.manual_seed(number)
                output = await kv.generate(prompts[number], **options(number))
                assert output.tolist() == plain[number]
            assert kv.stats().counters["found_tokens"] == counters["found_tokens"]
            assert plain[0][0] == right["ids"]
            async with kv.stream(IDS, **GREEDY) as stream:
                assert stream.found is None
                tokens = [token async for ids in stream for token in ids]
            assert [*IDS, *tokens] == stream.output[0].tolist() == right["ids"]
            assert stream.found.total == 39
            async with await kv.cache(IDS, max_new_tokens=12) as cache:
                assert cache.found.total == 39
                output = await cache.compute(
                    lambda: model.generate(torch.tensor([IDS]), **{NAME: cache.raw}, **GREEDY)
                )
                assert output[0].tolist() == right["ids"]
            await whole(kv)

    tools.run(main())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("how", ["generate", "stream", "cache"])
def test_a_cancelled_generation_stops_at_its_next_token(model, attach, tools, how, keep):
    async def talk(kv):
        if how == "generate":
            await kv.generate(IDS, keep_partial=keep, **GREEDY)
        elif how == "stream":
            async with kv.stream(IDS, keep_partial=keep, **GREEDY) as stream:
                async for _ in stream:
                    pass
        else:
            async with await kv.cache(IDS, 12, keep_partial=keep) as cache:
                given = {**GREEDY, NAME: cache.raw, "stopping_criteria": [cache.stopping]}
                await cache.compute(lambda: model.generate(torch.tensor([IDS]), **given))

    async def main():
        async with await attach() as kv:
            brake = tools.Brake(model, hold_at=5)
            task = asyncio.create_task(talk(kv))
            await brake.reached()
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()  # it waits for the thread
            brake.gate.opened.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            brake.release()
            assert brake.forwards == 5
            await whole(kv)
            # Five forwards fed the prompt and four tokens.
            output = await kv.generate(IDS, **GREEDY)
            async with await kv.cache(output) as cache:
                assert cache.found.total == 51
            counters = kv.stats().counters["found_tokens"]
            assert counters["device"] == (39 if keep else 0) + 51
            await whole(kv)

    tools.run(main())


@pytest.mark.parametrize("block", [False, True])
def test_a_stream_left_midway_stops_the_model(model, attach, tools, right, block):
    async def some(stream):
        tokens = []
        async for ids in stream:
            tokens += ids
            if len(tokens) == 3:
                return tokens

    async def main():
        async with await attach() as kv:
            brake = tools.Brake(model)
            if block:
                async with kv.stream(IDS, max_new_tokens=400, do_sample=False, buffer=2) as stream:
                    tokens = await some(stream)
                assert kv.stats().sequences == 0
            else:
                tokens = await some(kv.stream(IDS, max_new_tokens=400, do_sample=False, buffer=2))
                await asyncio.sleep(0)  # the loop closes what was dropped
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert [*IDS, *tokens] == right["ids"][:43]
            await whole(kv)
            assert brake.forwards < 12
            brake.release()
            async with kv.stream(IDS, **GREEDY):
                pass  # not a token was wanted
            await whole(kv)

    tools.run(main())


def test_a_reader_that_takes_nothing_holds_the_model_up_and_then_ends_it(
    model, attach, tools, right
):
    async def main():
        async with await attach() as kv:
            tokens = [t async for ids in kv.stream(IDS, buffer=1, **GREEDY) for t in ids]
            assert [*IDS, *tokens] == right["ids"]
            brake = tools.Brake(model)
            async with kv.stream(IDS, buffer=2, stall_timeout_s=0.01, **GREEDY) as stream:
                iterator = aiter(stream)
                tokens = await anext(iterator)
                await kv._compute.run(nothing)  # the only thread is done with the generation
                assert brake.forwards == 4  # two more in the buffer, one that had no room
                with pytest.raises(TimeoutError, match="no token taken"):
                    await read_on(tokens, iterator)
            assert tokens == right["ids"][40:43]  # what was in the buffer is not lost
            brake.release()
            await whole(kv)

    tools.run(main())


def test_the_next_request_loads_while_this_one_computes(model, attach, tools, right):
    async def main():
        async with await attach() as kv:
            await kv.generate(OTHER, **GREEDY)
            brake = tools.Brake(model, hold_at=2)
            first = asyncio.create_task(kv.generate(IDS, **GREEDY))
            await brake.reached()
            second = asyncio.create_task(kv.generate(OTHER, **GREEDY))
            third = asyncio.create_task(kv.generate([9, 9, 9], **GREEDY))
            while kv._compute.stats().waiting < 2:
                await asyncio.sleep(0)
            assert kv.stats().sequences == 3
            assert kv.stats().counters["found_tokens"]["device"] == 23
            assert brake.forwards == 2  # one at a time
            await cancelled(third)
            assert kv.stats().sequences == 2
            brake.gate.opened.set()
            assert (await first)[0].tolist() == right["ids"]
            assert (await second)[0].tolist() == right["other"]
            brake.release()
            assert brake.forwards == 24
            await whole(kv)

    tools.run(main())


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_load_that_fails_late_is_started_over(model, attach, tools, right, how):
    async def main():
        async with await attach() as kv:
            brake = tools.Brake(model, hold_at=3)
            brake.error = DeviceError("a copy failed")
            brake.gate.opened.set()
            if how == "generate":
                assert (await kv.generate(IDS, **GREEDY))[0].tolist() == right["ids"]
            else:
                tokens = [token async for ids in kv.stream(IDS, **GREEDY) for token in ids]
                assert [*IDS, *tokens] == right["ids"]
            brake.release()
            await whole(kv)

    tools.run(main())


def test_closing_ends_what_runs_and_what_waits(model, attach, tools):
    async def read(kv):
        async for _ in kv.stream(OTHER, **GREEDY):
            pass

    async def main():
        kv = await attach()
        brake = tools.Brake(model, hold_at=3)
        running = asyncio.create_task(kv.generate(IDS, **GREEDY))
        await brake.reached()
        waiting = [asyncio.create_task(kv.generate(OTHER, **GREEDY)), asyncio.create_task(read(kv))]
        while kv._compute.stats().waiting < 2:
            await asyncio.sleep(0)
        closing = asyncio.create_task(kv.close())
        for task in waiting:
            with pytest.raises(StoreClosedError):
                await task
        assert not closing.done()
        brake.gate.opened.set()
        with pytest.raises(StoreClosedError, match="closed while computing"):
            await running
        await closing
        assert brake.forwards == 3
        brake.release()
        assert kv.sync.store.closed
        for late in (kv.generate(IDS), kv.cache(IDS), anext(aiter(kv.stream(IDS))), kv.check()):
            with pytest.raises(StoreClosedError):
                await late
        await kv.close()

    tools.run(main())


def test_errors_are_those_of_tierkv(model, attach, tools):
    async def main():
        async with await attach() as kv:
            with pytest.raises(InvalidInputError, match="512"):
                await kv.generate(IDS * 13, max_new_tokens=1)
            with pytest.raises(InvalidInputError, match="512"):
                async for _ in kv.stream(IDS, max_new_tokens=500):
                    pass
            with pytest.raises(InvalidInputError, match="streamer"):
                kv.stream(IDS, streamer=object())
            with pytest.raises(InvalidInputError, match="buffer"):
                await anext(aiter(kv.stream(IDS, buffer=0)))
            brake = tools.Brake(model, hold_at=2)
            brake.error = ZeroDivisionError("in the model")
            brake.gate.opened.set()
            with pytest.raises(ZeroDivisionError, match="in the model"):
                await kv.generate(IDS, **GREEDY)
            brake.release()
            await whole(kv)

    tools.run(main())


def test_a_wrapped_model_stays_attached(model, tmp_path, tools, right):
    with TierKV.attach(model, tmp_path / "kv", **BUDGETS) as plain:
        left = []

        async def main():
            async with AsyncTierKV(plain, io_workers=1) as kv:
                assert (await kv.generate(IDS, **GREEDY))[0].tolist() == right["ids"]
                left.append(await kv.cache(OTHER))

        tools.run(main())
        tools.run(main())
        plain.check()
        assert plain.stats().sequences == 0


def test_a_cache_that_is_dropped_is_abandoned_at_the_next(attach, tools):
    async def main():
        async with await attach() as kv:
            await kv.cache(IDS)  # nobody keeps it
            gc.collect()
            assert kv.stats().sequences == 1
            async with await kv.cache(OTHER):
                assert kv.stats().sequences == 1
            await whole(kv)

    tools.run(main())


async def scenario(attach, path):
    async with await attach(path=path) as kv:
        scenario.kv = kv
        await kv.generate(IDS, **GREEDY)
        async with kv.stream([*IDS, 4], **GREEDY) as stream:
            async for _ in stream:
                pass
        async with await kv.cache(OTHER) as cache:
            await cache.compute(lambda: kv.model(torch.tensor([OTHER]), **{NAME: cache.raw}))
            await cache.commit()
        async with await kv.cache(OTHER):
            pass
        await kv.store.flush()


@pytest.mark.parametrize("moment", ["waiting", "running", "arrived"])
def test_cancelled_at_every_await(model, attach, tmp_path, tools, right, moment):
    hooks = len(model._forward_pre_hooks)
    cut = 0
    while True:
        path = tmp_path / str(cut)
        with pytest.MonkeyPatch.context() as patch:
            interrupter = tools.Interrupter(patch, cut, moment)

            async def main(at=interrupter, path=path):
                scenario.kv = None
                at.task = asyncio.create_task(scenario(attach, path))
                (outcome,) = await asyncio.gather(at.task, return_exceptions=True)
                if scenario.kv is not None:
                    await scenario.kv.close()
                    assert not set(scenario.kv._caches)
                    assert scenario.kv.store.workers().failed_unseen == 0
                return outcome

            outcome = tools.run(main())
        for thread in threading.enumerate():
            if thread.name.startswith("tierkv-io"):
                thread.join(20)
        assert len(model._forward_pre_hooks) == hooks
        with TierKV.attach(model, path, self_check=False, **BUDGETS) as kv:  # nobody holds it
            assert kv.generate(IDS, **GREEDY)[0].tolist() == right["ids"]
            kv.check()
        if not interrupter.fired:
            assert outcome is None
            break
        assert isinstance(outcome, asyncio.CancelledError), (cut, outcome)
        cut += 1
    assert cut >= 10


def test_a_model_is_attached_not_wrapped(model):
    with pytest.raises(InvalidInputError, match=r"AsyncTierKV\.attach"):
        AsyncTierKV(model)
