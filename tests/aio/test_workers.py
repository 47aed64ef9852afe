"""Calls on threads: they reach their caller or are given back, whatever the timing."""

import asyncio
import threading
import traceback

import pytest

from tierkv import InvalidInputError, StoreClosedError
from tierkv.aio.pending import State
from tierkv.aio.strand import Strand
from tierkv.aio.workers import Workers, nothing
from tierkv.storage.testing import Gate


class Lease:
    """Something that must be given back, once."""

    def __init__(self):
        self.taken = self.returned = 0

    def take(self):
        self.taken += 1
        return self

    def give_back(self, lease):
        assert lease is self
        self.returned += 1


def held(gate, lease):
    def work():
        gate.hold()
        return lease.take()

    return work


async def reached(gate):
    assert await asyncio.to_thread(gate.reached.wait, 20)


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def workers():
    return Workers(1, name="test-workers")


def test_a_call_returns_what_it_returns_and_raises_what_it_raises(workers, tools):
    def wrong():
        raise KeyError("from the thread")

    async def main():
        assert await workers.run(lambda: threading.current_thread().name) == "test-workers_0"
        with pytest.raises(KeyError, match="from the thread") as caught:
            await workers.run(wrong)
        assert "wrong" in [f.name for f in traceback.extract_tb(caught.tb)]
        workers.check()
        await workers.close(nothing)
        assert workers.stats().failed_unseen == 0

    tools.run(main())


def test_a_call_cancelled_before_it_starts_never_runs(workers, tools):
    async def main():
        gate, lease = Gate(), Lease()
        first = asyncio.create_task(workers.run(held(gate, Lease())))
        await reached(gate)
        second = asyncio.create_task(workers.run(lease.take, undo=lease.give_back))
        await asyncio.sleep(0)
        assert workers.stats().waiting == 1
        await cancelled(second)  # returns while the only thread is still busy
        assert workers.stats().waiting == 0
        gate.opened.set()
        await first
        await workers.close(nothing)
        assert lease.taken == 0

    tools.run(main())


def test_a_call_cancelled_while_it_runs_is_undone(workers, tools):
    async def main():
        gate, lease = Gate(), Lease()
        task = asyncio.create_task(workers.run(held(gate, lease), undo=lease.give_back))
        await reached(gate)
        await cancelled(task)  # at once, not when the thread is done
        assert workers.stats().running == 1
        gate.opened.set()
        await workers.settled()
        assert (lease.taken, lease.returned, workers.stats().undone) == (1, 1, 1)
        await workers.close(nothing)

    tools.run(main())


def test_a_result_that_arrives_together_with_the_cancellation_is_undone(workers, tools):
    async def main():
        gate, lease = Gate(), Lease()
        task = asyncio.create_task(workers.run(held(gate, lease), undo=lease.give_back))
        await reached(gate)
        (call,) = workers._calls
        wake = call._wake
        call._wake = lambda: (wake(), task.cancel())  # both before the task goes on
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await workers.settled()
        assert (lease.taken, lease.returned) == (1, 1)
        await workers.close(nothing)

    tools.run(main())


def test_a_timeout_is_a_cancellation(workers, tools):
    async def main():
        gate, lease = Gate(), Lease()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await workers.run(held(gate, lease), undo=lease.give_back)
        gate.opened.set()
        await workers.close(nothing)
        assert lease.returned == 1

    tools.run(main())


def test_errors_that_nobody_is_left_to_hear_are_counted(workers, tools):
    async def main():
        gate = Gate()

        def fails(*_):
            raise ValueError("unseen")

        def work():
            gate.hold()
            fails()

        task = asyncio.create_task(workers.run(work))
        await reached(gate)
        await cancelled(task)
        gate.opened.set()
        await workers.settled()
        assert workers.stats().failed_unseen == 1
        gate = Gate()
        task = asyncio.create_task(workers.run(gate.hold, undo=fails))
        await reached(gate)
        await cancelled(task)
        gate.opened.set()
        await workers.close(nothing)
        assert workers.stats().failed_unseen == 2

    tools.run(main())


def test_a_kept_call_runs_though_its_caller_left(workers, tools):
    async def main():
        gate, lease = Gate(), Lease()
        first = asyncio.create_task(workers.run(gate.hold))
        await reached(gate)
        second = asyncio.create_task(workers.run(lease.take, keep=True))
        await asyncio.sleep(0)
        await cancelled(second)
        gate.opened.set()
        await first
        await workers.settled()
        assert lease.taken == 1
        await workers.close(nothing)

    tools.run(main())


def test_calls_on_a_strand_do_not_overlap_though_one_was_cancelled(tools):
    workers, others = Workers(4, name="test-workers"), Workers(1, name="test-workers")

    async def main():
        strand = Strand()
        gate, order = Gate(), []

        def first():
            gate.hold()
            order.append("first")

        task = asyncio.create_task(workers.run(first, strand=strand))
        await reached(gate)
        await cancelled(task)
        rest = [
            asyncio.create_task(others.run(lambda: order.append("second"), strand=strand)),
            asyncio.create_task(workers.run(lambda: order.append("never"), strand=strand)),
            asyncio.create_task(workers.run(lambda: order.append("third"), strand=strand)),
        ]
        await asyncio.sleep(0)
        await cancelled(rest.pop(1))
        await workers.run(lambda: order.append("elsewhere"))  # the strand occupies no thread
        gate.opened.set()
        await asyncio.gather(*rest)
        assert order == ["elsewhere", "first", "second", "third"]
        assert strand.idle
        await workers.close(nothing)
        await others.close(nothing)

    tools.run(main())


@pytest.mark.parametrize("how", ["cancelled", "refused"])
def test_a_call_given_up_behind_busy_workers_holds_up_nothing(tools, how):
    busy, others = Workers(1, name="test-workers"), Workers(1, name="test-workers")

    async def main():
        gate, strand = Gate(), Strand()
        first = asyncio.create_task(busy.run(gate.hold))
        await reached(gate)
        second = asyncio.create_task(busy.run(nothing, strand=strand))
        third = asyncio.create_task(others.run(lambda: "third", strand=strand))
        await asyncio.sleep(0)
        if how == "cancelled":
            await cancelled(second)
        else:
            busy.begin_close(nothing)
            with pytest.raises(StoreClosedError):
                await second
        assert await third == "third"  # while the thread of the second is still busy
        assert strand.idle
        gate.opened.set()
        await first
        await busy.close(nothing)
        assert await others.run(lambda: "fourth", strand=strand) == "fourth"
        await others.close(nothing)

    tools.run(main())


def test_closing_refuses_what_waits_and_waits_for_what_runs(workers, tools):
    async def main():
        gate, lease, acts = Gate(), Lease(), []
        running = asyncio.create_task(workers.run(held(gate, lease)))
        await reached(gate)
        waiting = asyncio.create_task(workers.run(acts.append, undo=None))
        await asyncio.sleep(0)
        closing = asyncio.create_task(workers.close(lambda: acts.append(lease.taken)))
        with pytest.raises(StoreClosedError, match="before the call had started"):
            await waiting
        with pytest.raises(StoreClosedError):
            await workers.run(lease.take)
        await cancelled(closing)  # ends the waiting only
        gate.opened.set()
        assert await running is lease
        await asyncio.gather(workers.close(nothing), workers.close(nothing))
        assert acts == [1]
        workers.later(lease.take)  # too late, and harmless
        workers.check()
        assert workers.stats().finished == 1

    tools.run(main())


def test_closing_ends_a_strand_that_reaches_into_closed_workers(tools):
    compute, io = Workers(1, name="test-workers"), Workers(1, name="test-workers")

    async def main():
        gate, strand, acts = Gate(), Strand(), []
        running = asyncio.create_task(io.run(gate.hold, strand=strand))
        await reached(gate)
        refused = asyncio.create_task(compute.run(lambda: acts.append("never"), strand=strand))
        kept = asyncio.create_task(io.run(lambda: acts.append("kept"), strand=strand, keep=True))
        await asyncio.sleep(0)
        compute.begin_close(lambda: io.begin_close(lambda: acts.append("last")))
        with pytest.raises(StoreClosedError):
            await refused
        await compute.close(nothing)
        gate.opened.set()
        await asyncio.gather(running, kept)
        await io.close(nothing)
        assert acts == ["kept", "last"]

    tools.run(main())


def test_what_the_last_act_raises_is_told_once(workers, tools):
    def act():
        raise OSError("the disk is gone")

    async def main():
        with pytest.raises(OSError, match="the disk is gone"):
            await workers.close(act)
        await workers.close(act)

    tools.run(main())


def test_a_loop_that_is_closed_early_loses_nothing(workers, tools):
    gate, lease = Gate(), Lease()
    loop = asyncio.new_event_loop()

    async def begin():
        return workers.start(held(gate, lease), undo=lease.give_back)

    call = loop.run_until_complete(begin())
    assert gate.reached.wait(20)
    loop.close()
    gate.opened.set()  # the thread finds nobody to tell
    tools.run(workers.close(nothing))
    assert (lease.taken, lease.returned) == (1, 1)
    assert call.state is State.GONE


def test_a_result_on_its_way_to_a_loop_that_is_closed_is_undone(workers, tools):
    lease, loop = Lease(), asyncio.new_event_loop()

    async def begin():
        return workers.start(lease.take, undo=lease.give_back)

    call = loop.run_until_complete(begin())
    workers._executor.submit(nothing).result(20)  # the result was handed to the loop
    loop.close()
    tools.run(workers.close(nothing))
    assert (lease.taken, lease.returned) == (1, 1)
    assert call.state is State.GONE


@pytest.mark.parametrize("arrives", [False, True])
def test_a_coroutine_that_is_destroyed_loses_nothing(workers, tools, arrives):
    gate, lease = Gate(), Lease()
    loop = asyncio.new_event_loop()
    coroutine = workers.run(held(gate, lease), undo=lease.give_back)

    async def step():
        coroutine.send(None)

    loop.run_until_complete(step())
    assert gate.reached.wait(20)
    if arrives:
        gate.opened.set()
        workers._executor.submit(nothing).result(20)  # so the only thread is done with the call
    coroutine.close()
    gate.opened.set()
    tools.run(workers.close(nothing))
    assert (lease.taken, lease.returned) == (1, 1)
    loop.close()


def test_no_threads_is_refused():
    with pytest.raises(InvalidInputError, match="number of threads"):
        Workers(0, name="test-workers")
