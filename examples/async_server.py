"""A small chat server over the store.  Run: python examples/async_server.py

Starts a server and several clients that talk to it at once, one of which vanishes in mid-turn;
prints what each turn found and how soon its first token came; takes about a minute.  With
`--serve PORT` it only serves, on 127.0.0.1, one JSON object a line:

    {"conversation": "any name", "text": "a question"}
    {"text": "a piece of the answer"} ... {"done": true, "found": 512, "prompt": 530, "ttft_s": 0.2}

or {"error": "..."} instead.  Who closes the connection wants no more answer.  `--model NAME` takes
another model than smollm2; make demo installs what is needed.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import aclosing, suppress

from tierkv import PoolExhaustedError, TierKVError
from tierkv.aio.transformers import AsyncTierKV
from tierkv.integrations.models import load_model

BUDGETS = {"device": "64MiB", "host": "64MiB", "disk": "1GiB"}
LINE_BYTES = 64 << 10
SEND_TIMEOUT_S = 10.0
GRACE_S = 20.0
BUSY = {"error": "busy"}


class Conversations:
    """Token ids of the conversations used last; the store holds their state, in its own bounds."""

    def __init__(self, limit):
        self._limit = limit
        self._ids = OrderedDict()

    def get(self, name):
        return self._ids.get(name, [])

    def put(self, name, ids):
        self._ids[name] = ids
        self._ids.move_to_end(name)
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)  # if it comes back, it begins anew


class Server:
    """Answers lines of JSON; every bound on memory and waiting is an argument."""

    def __init__(self, kv, tokenizer, *, new_tokens=12, max_requests=8, max_conversations=100):
        self.kv = kv
        self._tokenizer = tokenizer
        self._new_tokens = new_tokens
        self._max_requests = max_requests
        self._conversations = Conversations(max_conversations)
        self._talking = set()  # conversations with a turn that runs or waits
        self._quiet = asyncio.Event()
        self._connections = {}
        self._server = None

    async def start(self, port=0):
        """Begin to listen; return the port."""
        self._quiet.set()
        listen = asyncio.start_server(self._connection, "127.0.0.1", port, limit=LINE_BYTES)
        self._server = await listen
        return self._server.sockets[0].getsockname()[1]

    async def stop(self, grace_s=GRACE_S):
        """Take no more questions, let turns that run or wait end, within a grace; hang up."""
        self._server.close()
        self._max_requests = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections)

    async def _connection(self, reader, writer):
        """Read lines, so that a client that goes away is noticed, while another task answers."""
        self._connections[asyncio.current_task()] = writer
        lines = asyncio.Queue(4)
        answering = asyncio.create_task(self._answer_lines(lines, writer))
        answering.add_done_callback(lambda _: writer.close())
        try:
            while line := await reader.readline():
                lines.put_nowait(line)
        except (ValueError, asyncio.QueueFull):
            with suppress(ConnectionError, TimeoutError):
                await send(writer, {"error": "a line is too long, or too many are sent ahead"})
        except ConnectionError:
            pass
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            del self._connections[asyncio.current_task()]

    async def _answer_lines(self, lines, writer):
        with suppress(ConnectionError, TimeoutError):  # it has gone, or reads too slowly
            while True:
                await self._answer(await lines.get(), writer)

    async def _answer(self, line, writer):
        try:
            request = json.loads(line)
            name, text = request["conversation"], request["text"]
            if not (isinstance(name, str) and isinstance(text, str) and text and len(name) < 200):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            example = '{"conversation": "name", "text": "question"}'
            await send(writer, {"error": f"expected a line like {example}"})
            return
        if len(self._talking) >= self._max_requests or name in self._talking:
            await send(writer, BUSY)
            return
        self._talking.add(name)
        self._quiet.clear()
        try:
            await self._turn(name, text, writer)
        except PoolExhaustedError:  # the others hold the pool; later there will be room
            await send(writer, BUSY)
        except TierKVError as error:  # such as a prompt beyond the model's positions
            await send(writer, {"error": str(error)})
        finally:
            self._talking.discard(name)
            if not self._talking:
                self._quiet.set()

    async def _turn(self, name, text, writer):
        """Answer one question, piece by piece.

        Cancelled when the client vanishes: the model then stops at its next token, and what it
        was fed so far is kept, since the client may come back and ask again.
        """
        start, first, answer, sent = time.perf_counter(), None, [], ""
        prompt = self._prompt(self._conversations.get(name), text)
        stream = self.kv.stream(
            prompt,
            max_new_tokens=self._new_tokens,
            do_sample=False,
            buffer=self._new_tokens,  # a slow client holds nobody up
            keep_partial=True,
        )
        async with stream:
            async for ids in stream:
                first = first or time.perf_counter()
                answer += ids
                whole = self._tokenizer.decode(answer, skip_special_tokens=True)
                if len(whole) > len(sent) and not whole.endswith("\ufffd"):  # half a character
                    await send(writer, {"text": whole[len(sent) :]})
                    sent = whole
        if answer[-1:] == [self._tokenizer.eos_token_id]:
            del answer[-1]  # the next prompt ends the answer itself
        self._conversations.put(name, prompt + answer)
        ttft_s = round((first or time.perf_counter()) - start, 3)
        done = {"done": True, "found": stream.found.total, "prompt": len(prompt), "ttft_s": ttft_s}
        await send(writer, done)

    def _prompt(self, before, text):
        """Return the ids of the conversation so far and the next question."""
        if "<|im_start|>" in self._tokenizer.get_vocab():
            text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            text = f"<|im_end|>\n{text}" if before else text
        return before + self._tokenizer.encode(text, add_special_tokens=False)


async def send(writer, message):
    """Send a line; a client that does not read for long loses its connection."""
    writer.write(json.dumps(message).encode() + b"\n")
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await writer.drain()


async def ask(port, conversation, text):
    """Yield the lines of an answer; leaving early closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await send(writer, {"conversation": conversation, "text": text})
        while line := await reader.readline():
            message = json.loads(line)
            yield message
            if message.keys() & {"done", "error"}:
                return
    finally:
        writer.close()


PLACES = ("a lighthouse", "a railway station", "an observatory", "a paper mill")
STORY = "The keeper of {} writes down who comes, who goes, and what the weather does. "
QUESTIONS = ("Who comes to the place?", "And what is the weather like?", "Who reads the book?")
ROW = "{:<18} {:>4}  {:>6}  {:>6}  {:>11}  {}"


async def whole_answer(port, conversation, text):
    """Return the answer and the last line, asking again while the server is busy."""
    while True:
        answer, last = "", {"error": "the server hung up"}
        async for last in ask(port, conversation, text):
            answer += last.get("text", "")
        if last != BUSY:
            return answer, last
        await asyncio.sleep(0.1)


async def demonstrate(port):
    """Hold several conversations at once; the last client vanishes once, and comes back."""
    print(ROW.format("conversation", "turn", "prompt", "found", "first token", "answer"))

    async def talk(place, vanishes):
        for turn, question in enumerate(QUESTIONS, 1):
            text = STORY.format(place) * 12 + question if turn == 1 else question
            if vanishes and turn == 2:
                async with aclosing(ask(port, place, text)) as lines:
                    piece = await anext(lines)
                print(ROW.format(place, turn, "", "", "", f"{piece['text']!r}, and vanished"))
            answer, last = await whole_answer(port, place, text)
            if "error" in last:
                raise SystemExit(f"{place}, turn {turn}: {last['error']}")
            seconds = f"{last['ttft_s']:.2f} s"
            print(ROW.format(place, turn, last["prompt"], last["found"], seconds, repr(answer)))

    async with asyncio.TaskGroup() as group:
        for place in PLACES:
            group.create_task(talk(place, vanishes=place == PLACES[-1]))
    print("times include waiting: the model computes one answer at a time, others load meanwhile")


async def main(args):
    """Serve until asked to stop, or until the demonstration is over."""
    model, tokenizer = load_model(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        async with await AsyncTierKV.attach(model, args.store or scratch, **BUDGETS) as kv:
            server = Server(kv, tokenizer)
            port = await server.start(args.serve or 0)
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            print(f"serving on 127.0.0.1:{port}", flush=True)
            tasks = [asyncio.create_task(stop.wait())]
            if args.serve is None:
                tasks.append(asyncio.create_task(demonstrate(port)))
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await server.stop()
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.gather(*done)
            await kv.check()
            flushed = await kv.store.flush()
            print(f"store checked; {flushed.durable_pages} pages are durable")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, metavar="PORT", help="only serve")
    parser.add_argument("--store", metavar="DIRECTORY", help="keep the store here")
    parser.add_argument("--model", default="smollm2")
    sys.exit(asyncio.run(main(parser.parse_args())))
