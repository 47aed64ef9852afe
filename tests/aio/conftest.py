"""Event loops, stores and cancellations at chosen moments."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from functools import partial

import pytest
from toy_model import FULL, expect_state, namespace, states

from tierkv.aio import AsyncStore, Workers
from tierkv.aio.pending import State
from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import FaultyBackend, Gate

OURS = ("tierkv-aio", "tierkv-io", "tierkv-compute", "test-workers")


def run(coroutine, timeout_s=60):
    """Run a coroutine on a loop of its own, which must not be told of any forgotten error."""
    told = []

    async def bounded():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with asyncio.timeout(timeout_s):
            return await coroutine

    result = asyncio.run(bounded(), debug=True)
    gc.collect(1)  # what was just made; tells of tasks and futures that were forgotten
    assert not told, told
    return result


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # in debug mode it tells of slow steps
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(OURS):
            thread.join(20)
    left = [t.name for t in threading.enumerate() if t.name.startswith(OURS)]
    assert not left


@pytest.fixture
def disk(monkeypatch):
    """The backend of every SSD tier opened in the test."""
    backend = FaultyBackend()
    monkeypatch.setattr(
        "tierkv.data_plane.opening.SsdTier.open", partial(SsdTier.open, backend=backend)
    )
    return backend


def options(spec=FULL, *, device=64, host=16, disk=64, **more):
    """Return the arguments of ``open`` for the toy model, budgets in pages."""
    slot = spec.slot_bytes
    return {
        "spec": spec,
        "namespace": namespace(spec),
        "device": device * slot,
        "host": host * slot,
        "disk": disk * (slot + 4096),
        **more,
    }


async def feed(sequence, tokens):
    """Append what a model would, checking what each layer holds before."""
    spec, start, stop = sequence.spec, sequence.length, len(tokens)
    for layer in sorted(spec.layer_to_group):
        async with sequence.layer(layer) as view:
            expect_state(spec, layer, tokens, start, view.read())
            await view.append(*states(spec, layer, tokens, start, stop))


async def turn(store, tokens):
    """Run one turn; return what was found."""
    async with await store.begin(tokens) as sequence:
        await feed(sequence, tokens)
        await sequence.finish()
        return sequence.found


async def whole(store):
    """Prove that nothing is held or lost, once what was cancelled has ended."""
    await store.settled()
    await store.check()
    stats = store.stats()
    assert stats.sequences == 0
    assert stats.tiers["device"].held == 0
    workers = store.workers()
    assert (workers.waiting, workers.running) == (0, 0)


class Interrupter:
    """Cancels a task at one exact moment of its n-th call on a worker thread.

    The moments: ``waiting`` (no thread has taken the call yet), ``running`` (the work is done,
    the result not yet handed over), ``arrived`` (the result and the cancellation reach the
    task in the same iteration of the loop).
    """

    MOMENTS = ("waiting", "running", "arrived")

    def __init__(self, monkeypatch, number, moment):
        self.task = None
        self.fired = False
        self._number, self._moment, self._left = number, moment, threading.Event()
        execute, leave = Workers._execute, Workers.leave
        lock = threading.Lock()

        def executing(workers, call):
            with lock:
                running = self.task is not None and not self.task.done()
                mine = running and call.state is State.WAITED_FOR
                self._number -= mine
                hit = mine and self._number == -1
            if hit:
                self.fired = True
                getattr(self, "_" + moment)(call)
            execute(workers, call)

        def leaving(workers, call):
            leave(workers, call)
            self._left.set()

        monkeypatch.setattr(Workers, "_execute", executing)
        monkeypatch.setattr(Workers, "leave", leaving)

    def _cancel(self, call):
        self._left.clear()
        call.loop.call_soon_threadsafe(self.task.cancel)
        assert self._left.wait(20), "the cancellation did not arrive"

    def _waiting(self, call):
        self._cancel(call)

    def _running(self, call):
        work = call._work

        def interrupted():
            value = work()
            self._cancel(call)
            return value

        call._work = interrupted

    def _arrived(self, call):
        def both():
            call._wake()
            self.task.cancel()

        def wake():
            call.loop.call_soon_threadsafe(both)
            return True

        call.wake = wake


@pytest.fixture(scope="session")
def tiny():
    """Return the maker of tiny random models that compute on one thread."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(**given):
        fields = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("llama", **{**fields, **given})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # large enough to make logits differ
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
        model.generation_config.pad_token_id = 0
        return model.eval()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


class Brake:
    """Counts a model's forwards and holds one of them at a gate."""

    def __init__(self, model, hold_at=None):
        self.forwards = 0
        self.gate = Gate()
        self.error = None
        self._hold_at = hold_at
        self._handle = model.register_forward_pre_hook(self._before)

    def release(self):
        self._handle.remove()
        self.gate.opened.set()

    async def reached(self):
        assert await asyncio.to_thread(self.gate.reached.wait, 20)

    def _before(self, *_):
        self.forwards += 1
        if self.forwards == self._hold_at:
            self.gate.hold()
            if self.error is not None:
                raise self.error


@pytest.fixture
def tools():
    """Return the helpers of this folder's tests."""

    class Tools:
        pass

    for helper in (run, options, feed, turn, whole, Interrupter, Brake, AsyncStore):
        setattr(Tools, helper.__name__, staticmethod(helper))
    return Tools


@pytest.fixture(autouse=True)
def nothing_is_left_to_timing(monkeypatch):
    """Load what is found: whether computing a tiny model is quicker depends on the moment."""
    monkeypatch.setattr(
        "tierkv.integrations.transformers.attach.compute_cost", lambda model, spec: None
    )
