"""The store, awaited: the same results as the plain one, and nothing that blocks the loop."""

import asyncio
import gc
import re
from pathlib import Path

import pytest
import torch
from toy_model import FULL, MIXED, namespace, states, turn

import tierkv
from tierkv import (
    InvalidInputError,
    PoolExhaustedError,
    SequenceEndedError,
    SequenceTooLongError,
    Store,
    StoreClosedError,
    StoreLockedError,
)
from tierkv.devices.cpu import CpuEvent
from tierkv.storage.testing import Gate

TOKENS = list(range(30))


async def reached(gate):
    assert await asyncio.to_thread(gate.reached.wait, 20)


@pytest.mark.parametrize("spec", [FULL, MIXED], ids=["full", "mixed"])
def test_turns_find_what_they_find_without_await(tmp_path, tools, spec):
    options = tools.options(spec, device=200, host=40, disk=200)
    talks = [[n, *range(20 + n)] for n in range(3)]
    with Store.open(tmp_path / "plain", **options) as store:
        plain = [turn(store, [*talk, 99] * k) for k in (1, 2) for talk in talks]
        reports = [store.flush()]
        counters = store.stats().counters

    async def main():
        async with await tools.AsyncStore.open(tmp_path / "awaited", **options) as store:
            found = [await tools.turn(store, [*talk, 99] * k) for k in (1, 2) for talk in talks]
            assert found == plain
            assert [await store.flush()] == reports
            assert store.stats().counters == counters
            await tools.whole(store)
        async with await tools.AsyncStore.open(tmp_path / "awaited", **options) as store:
            assert (await tools.turn(store, [*talks[0], 99] * 2)).disk > 0

    tools.run(main())


def test_what_was_announced_is_in_host_memory_when_it_is_begun(tmp_path, tools):
    options = tools.options(device=200, host=40, disk=200)
    with Store.open(tmp_path / "s", **options) as store:
        turn(store, TOKENS)

    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **options) as store:
            announcement = await store.announce([*TOKENS, 7])
            assert announcement.tokens == len(TOKENS)
            assert await asyncio.to_thread(announcement.wait, 20)
            async with await store.begin([*TOKENS, 7], restartable=True) as sequence:
                assert sequence.found.host == len(TOKENS)
                await tools.feed(sequence, [*TOKENS, 7])
            assert store.stats().counters["prefetched_pages"] == announcement.pages == 8
            await tools.whole(store)

    tools.run(main())


def test_every_call_has_its_twin(tmp_path, tools):
    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **tools.options()) as store:
            assert (store.spec, store.closed) == (FULL, False)
            assert store.namespace is store.sync.namespace
            async with await store.begin(TOKENS, max_new_tokens=2) as sequence:
                assert (sequence.length, sequence.found.total, sequence.ended) == (0, 0, False)
                assert sequence.prompt.tolist() == TOKENS
                await sequence.reserve(5)
                await tools.feed(sequence, TOKENS[:10])
                assert (await sequence.commit(TOKENS)).pages == 2
                await tools.feed(sequence, TOKENS)
                fork = await sequence.fork()
                await sequence.crop(21)
                assert (sequence.length, fork.length) == (21, 30)
                await tools.feed(sequence, [*TOKENS[:21], 70])
                async with fork:
                    await tools.feed(fork, [*TOKENS, 80])
                    await fork.finish([*TOKENS, 80])
                await sequence.finish([*TOKENS[:21], 70])
            assert (await tools.turn(store, [*TOKENS, 80, 81])).total == 31
            assert (await tools.turn(store, [*TOKENS[:21], 70, 71])).total == 22
            assert await store.hint(TOKENS, ttl_s=5) == 7
            assert await store.pin(TOKENS, owner="me") == 7
            assert store.unpin("me") == 7
            assert (await store.flush()).ok
            await tools.whole(store)

    tools.run(main())


def test_a_layer_that_has_arrived_is_entered_without_a_thread(tmp_path, tools, monkeypatch):
    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **tools.options()) as store:
            async with await store.begin(TOKENS) as sequence:
                await sequence.reserve(30)
                before = store.workers().finished
                async with sequence.layer(0) as view:
                    assert view.read()[0].shape[1] == 0
                assert store.workers().finished == before
                arriving = CpuEvent()
                sequence.sync.gate.expect(0, arriving)
                waits = asyncio.create_task(tools.feed(sequence, TOKENS))
                while not store.workers().running:
                    await asyncio.sleep(0)  # the loop goes on while the layer is awaited
                assert not waits.done()
                arriving.finish(None)
                await waits
                assert sequence.length == 30
                assert store.workers().finished == before + 2  # the wait, and room for the tokens
            await tools.whole(store)

    tools.run(main())


def test_conversations_run_at_once(tmp_path, tools):
    options = tools.options(MIXED, device=160, host=16, disk=300)

    async def converse(store, number):
        tokens, before = [number, *range(9)], 0
        for step in range(5):
            found = await tools.turn(store, tokens)
            assert found.total >= before
            before = len(tokens)
            tokens = [*tokens, step, number, step]

    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **options) as store:
            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(converse(store, number))
            await tools.whole(store)

    tools.run(main())


def test_a_sequence_that_is_dropped_is_abandoned_at_the_next_begin(tmp_path, tools):
    async def main():
        async with await tools.AsyncStore.open(tmp_path / "s", **tools.options()) as store:
            await store.begin(TOKENS)  # nobody keeps it
            gc.collect()
            assert store.stats().sequences == 1
            await tools.turn(store, TOKENS)
            await tools.whole(store)

    tools.run(main())


def test_errors_are_those_of_the_store(tmp_path, tools):
    async def main():
        options = tools.options(device=8)
        async with await tools.AsyncStore.open(tmp_path / "s", **options) as store:
            with pytest.raises(InvalidInputError, match="token_ids is empty"):
                await store.begin([])
            with pytest.raises(SequenceTooLongError):
                await store.begin(range(1000))
            with pytest.raises(StoreLockedError):
                await tools.AsyncStore.open(tmp_path / "s", **options)
            async with await store.begin(range(24)) as sequence:
                with pytest.raises(PoolExhaustedError):
                    await store.begin(range(50, 70))
                with pytest.raises(InvalidInputError, match="the spec holds layers"):
                    sequence.layer(9)
                with pytest.raises(InvalidInputError, match="crop"):
                    await sequence.crop(99)
                layer = sequence.layer(0)
                async with layer as view:
                    with pytest.raises(InvalidInputError, match="expected 2 tensors"):
                        await view.append()
                    with pytest.raises(InvalidInputError, match="expected shape"):
                        await view.append(torch.zeros(3), torch.zeros(3))
                    new = states(FULL, 0, range(24), 0, 2)
                    await view.append(*new)
                    with pytest.raises(InvalidInputError, match="each step appends"):
                        await view.append(*new)
                with pytest.raises(StoreClosedError, match="used outside"):
                    view.read()
                with pytest.raises(InvalidInputError, match="or abandon the sequence"):
                    await sequence.fork()
            with pytest.raises(SequenceEndedError):
                async with layer:
                    pass
            with pytest.raises(SequenceEndedError):
                view.read()
            with pytest.raises(SequenceEndedError):
                await sequence.reserve(1)
            await tools.whole(store)

    tools.run(main())


def test_closing_ends_sequences_and_refuses_everything_after(tmp_path, tools):
    async def main():
        store = await tools.AsyncStore.open(tmp_path / "s", **tools.options())
        sequence = await store.begin(TOKENS)

        async def close_in_a_layer():
            async with sequence.layer(0) as view:
                await asyncio.gather(store.close(), store.close())
                with pytest.raises(SequenceEndedError):
                    view.read()

        with pytest.raises(SequenceEndedError, match="while it was in use"):
            await close_in_a_layer()
        await sequence.abandon()
        assert store.closed
        assert store.sync.closed
        for call in (store.flush, store.check, lambda: store.begin(TOKENS)):
            with pytest.raises(StoreClosedError):
                await call()
        with pytest.raises(StoreClosedError):
            store.unpin("me")
        await store.close()

    tools.run(main())


def test_closing_waits_for_calls_that_run(tmp_path, tools, disk):
    options = tools.options(io_timeout_s=20, workers=1)
    with Store.open(tmp_path / "s", **tools.options()) as store:
        turn(store, TOKENS)

    async def main():
        store = await tools.AsyncStore.open(tmp_path / "s", **options)
        gate = Gate()
        disk.inject("preadv", gate, times=1, match="slabs")
        running = asyncio.create_task(store.begin([*TOKENS, 1]))
        await reached(gate)
        waiting = asyncio.create_task(store.begin([5]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        with pytest.raises(StoreClosedError):
            await waiting
        assert not closing.done()
        gate.opened.set()
        sequence = await running
        await closing
        assert sequence.ended

    tools.run(main())


def test_a_wrapped_store_stays_open(tmp_path, tools):
    with Store.open(tmp_path / "s", **tools.options()) as plain:

        async def main():
            async with tools.AsyncStore(plain, workers=2) as store:
                await tools.turn(store, TOKENS)
                await store.begin(TOKENS)
            assert plain.stats().sequences == 0

        tools.run(main())
        tools.run(main())  # in another loop
        assert turn(plain, TOKENS).total == 29


def test_a_store_outlives_a_loop(tmp_path, tools):
    store = tools.run(tools.AsyncStore.open(tmp_path / "s", **tools.options()))
    tools.run(tools.turn(store, TOKENS))
    assert tools.run(tools.turn(store, TOKENS)).total == 29
    tools.run(store.close())


def test_what_the_document_shows_runs(tmp_path, tools):
    document = (Path(__file__).parents[2] / "docs" / "async.md").read_text()
    code = re.search(r"```python\n(.*?)```", document, re.DOTALL)[1]
    for word, value in {"2GiB": "4MiB", "8GiB": "4MiB", "kv-store": str(tmp_path / "s")}.items():
        code = code.replace(word, value)
    code = code.replace("append(k, v)", "append(*new(layer, sequence))")
    body = "".join(f"    {line}\n" for line in code.splitlines())
    scope = {
        "spec": FULL,
        "namespace": namespace(FULL),
        "token_ids": TOKENS,
        "num_layers": 2,
        "new": lambda layer, at: states(FULL, layer, TOKENS, at.length, 30),
    }
    for found in (0, 29):
        exec(f"async def shown():\n{body}    return sequence, keys", scope)
        sequence, keys = tools.run(scope["shown"]())
        assert sequence.found.total == found
        assert torch.equal(keys, states(FULL, 1, TOKENS, 0, 30)[0])


def test_public_names_need_no_event_loop():
    assert tierkv.AsyncStore.open is not None
    assert tierkv.AsyncSequence is not None
