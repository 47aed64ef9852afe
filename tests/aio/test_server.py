"""The example server with a tiny model: clients that vanish, bad lines, too many requests."""

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tierkv.aio.transformers import AsyncTierKV

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_server.py"


class Letters:
    """A tokenizer: one letter, one token."""

    eos_token_id = None

    def get_vocab(self):
        return {}

    def encode(self, text, add_special_tokens):
        return [ord(letter) % 90 + 3 for letter in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(33 + token) for token in ids)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("async_server_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tiny):
    return tiny()


@pytest.fixture
def serve(example, model, tmp_path, tools):
    """Run a conversation of clients with a server; check everything afterwards."""

    def serve(clients, *, model=model, device="2MiB", **options):
        async def main():
            budgets = {"device": device, "host": device, "disk": "64MiB", "page_tokens": 8}
            async with await AsyncTierKV.attach(
                model, tmp_path / "kv", self_check=False, **budgets
            ) as kv:
                server = example.Server(kv, Letters(), **options)
                port = await server.start()
                try:
                    await clients(port, kv, server)
                finally:
                    await server.stop()
                await kv.settled()
                await kv.check()
                assert kv.stats().sequences == 0
                assert kv.stats().tiers["device"].held == 0
                assert not server._connections

        tools.run(main())

    return serve


async def lines(stream):
    return [message async for message in stream]


async def raw(port, data):
    """Send bytes, and no more; return what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        answers = []
        with suppress(ConnectionError):
            while data and (line := await reader.readline()):
                answers.append(json.loads(line))
                if len(answers) == data.count(b"\n"):
                    break
        return answers
    finally:
        writer.close()


def test_answers_stream_and_later_turns_find_what_came_before(serve, example, model):
    async def clients(port, kv, server):
        async def talk(name):
            sizes = []
            for question in ("who are you?" * 3, "and who am I?", "well"):
                *pieces, done = await lines(example.ask(port, name, question))
                assert len(pieces) == 8
                assert all(piece["text"] for piece in pieces)
                sizes.append((done["prompt"], done["found"]))
            assert sizes == [(36, 0), (36 + 8 + 13, 43), (57 + 8 + 4, 64)]

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(talk(name))

    serve(clients, new_tokens=8)


def test_the_demonstration_runs(serve, example, capsys, tiny):
    async def clients(port, kv, server):
        await example.demonstrate(port)
        rows = capsys.readouterr().out.splitlines()
        assert sum("vanished" in row for row in rows) == 1
        found = [int(row[31:39]) for row in rows[1:-1] if "vanished" not in row]
        assert len(found) == 12
        assert sorted(found)[4] > 900  # all turns but the first

    serve(clients, model=tiny(max_position_embeddings=2048), device="16MiB")


def test_a_client_that_vanishes_stops_the_model(serve, example, tools, model):
    async def clients(port, kv, server):
        brake = tools.Brake(model, hold_at=4)
        stream = example.ask(port, "a", "hello there")
        await anext(stream)
        await brake.reached()
        waiting = example.ask(port, "b", "hello")
        waits = asyncio.create_task(anext(waiting))
        while kv._compute.stats().waiting < 1:
            await asyncio.sleep(0)
        waits.cancel()  # this one vanishes while it waits for its turn
        await asyncio.gather(waits, return_exceptions=True)
        await stream.aclose()
        while server._connections:
            if kv._compute.stats().left == 2:
                brake.gate.opened.set()
            await asyncio.sleep(0)
        brake.release()
        assert brake.forwards == 4
        assert not server._talking
        assert (await lines(example.ask(port, "a", "hello there")))[-1]["done"]

    serve(clients, new_tokens=100)


def test_bad_lines_get_an_error_and_the_connection_lives_on(serve, example):
    good = b'{"conversation": "a", "text": "hi"}\n'

    async def clients(port, kv, server):
        for bad in (b"nonsense\n", b"[1]\n", b'{"text": 3}\n', b"\xff\xfe\n", b"null\n", b"\n"):
            (answer,) = await raw(port, bad)
            assert "expected a line like" in answer["error"]
        answers = await raw(port, b"nonsense\n" + good + b"\n")
        assert [list(answer) for answer in answers] == [["error"], ["text"], ["text"]]
        for flood in (b"x" * (example.LINE_BYTES + 10), b"{}\n" * 1000 + b"x" * 100_000):
            answers = await raw(port, flood)
            assert answers
            assert all("error" in answer for answer in answers)
        (answer,) = await raw(
            port, json.dumps({"conversation": "a", "text": "x" * 600}).encode() + b"\n"
        )
        assert "512" in answer["error"]  # the model has no more positions
        await raw(port, b"")

    serve(clients, new_tokens=2)


def test_beyond_its_bounds_the_server_is_busy(serve, example, tools, model):
    async def clients(port, kv, server):
        brake = tools.Brake(model, hold_at=2)
        running = asyncio.create_task(lines(example.ask(port, "a", "hello, hello, hello")))
        await brake.reached()
        waiting = asyncio.create_task(lines(example.ask(port, "b", "hello, hello, hello")))
        while len(server._talking) < 2:
            await asyncio.sleep(0)
        assert await lines(example.ask(port, "c", "hello, hello, hello")) == [example.BUSY]
        assert await lines(example.ask(port, "a", "hello, hello, hello")) == [example.BUSY]
        brake.gate.opened.set()
        assert (await running)[-1]["done"]
        assert (await waiting)[-1]["done"]
        brake.release()
        (*_, done) = await lines(example.ask(port, "c", "hello, hello, hello"))
        assert done["prompt"] == 19
        (*_, done) = await lines(example.ask(port, "a", "hello, hello, hello"))
        assert done["prompt"] == 19  # the conversation was forgotten, its pages were not
        assert done["found"] == 16

    serve(clients, new_tokens=3, max_requests=2, max_conversations=2)


def test_stopping_lets_turns_end(serve, example, tools, model):
    async def clients(port, kv, server):
        brake = tools.Brake(model, hold_at=2)
        running = asyncio.create_task(lines(example.ask(port, "a", "hello")))
        await brake.reached()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        brake.gate.opened.set()
        assert (await running)[-1]["done"]
        await stopping
        brake.release()
        with pytest.raises(ConnectionError):
            await lines(example.ask(port, "a", "hello"))

    serve(clients, new_tokens=3)


def test_stopping_hangs_up_when_turns_do_not_end(serve, example, tools, model):
    async def clients(port, kv, server):
        brake = tools.Brake(model, hold_at=2)
        running = asyncio.create_task(lines(example.ask(port, "a", "hello")))
        await brake.reached()
        stopping = asyncio.create_task(server.stop(grace_s=0.01))
        await asyncio.wait({running})
        brake.gate.opened.set()
        await stopping
        brake.release()
        assert brake.forwards == 2
        with suppress(ConnectionError):
            assert "done" not in (await running)[-1]

    serve(clients, new_tokens=50)


@pytest.mark.slow
def test_a_signal_ends_the_program(tmp_path, tiny):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "m")
    tiny(vocab_size=len(letters), max_position_embeddings=4096).save_pretrained(tmp_path / "m")
    options = ["--serve", "0", "--model", str(tmp_path / "m"), "--store", str(tmp_path / "kv")]
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE), *options], stdout=subprocess.PIPE, text=True
    ) as served:
        assert "serving on" in served.stdout.readline()
        served.send_signal(signal.SIGTERM)
        assert "store checked" in served.communicate(timeout=60)[0]
        assert served.returncode == 0
