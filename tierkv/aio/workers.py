"""Runs calls that wait on threads of its own, so that an event loop never does.

A call is a plain function.  Whoever awaits it may be cancelled at any moment:

* before the call has started, it never runs;
* while it runs, it is allowed to end, and its result is undone on the same thread;
* after it has ended but before its result was taken, the result is undone as well.

So a result either reaches the caller or is given back, whatever the timing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tierkv.aio.pending import Pending, State
from tierkv.aio.strand import Strand
from tierkv.errors import InvalidInputError, StoreClosedError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStats:
    """What a set of threads does and did.

    Attributes:
        size: threads at most.
        waiting: calls that wait for a thread, or for an earlier call on the same sequence.
        running: calls that run now.
        finished: calls that have run.
        left: calls whose caller went away before it had the result.
        undone: results given back because nobody was left to take them.
        failed_unseen: errors of calls, or of undoing, that nobody was left to be told.
    """

    size: int
    waiting: int
    running: int
    finished: int
    left: int
    undone: int
    failed_unseen: int


class Workers:
    """A bounded set of threads with one owner, who closes it.

    Thread-safe; not bound to an event loop.
    """

    def __init__(self, size: int, *, name: str) -> None:
        """Make a set of at most ``size`` threads, named ``name_0``, ..., started when needed.

        Raises:
            InvalidInputError: fewer than one thread.
        """
        if not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"{name}: the number of threads must be >= 1, got {size!r}")
        self._size = size
        self._name = name
        self._executor = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._calls: set[Pending[Any]] = set()  # those that are not over: gone and undone
        self._finished = self._left = self._undone = self._failed_unseen = 0
        self._closing = False
        self._last_act: Callable[[], object] | None = None
        self._last_error: BaseException | None = None
        self._over = False
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def closing(self) -> bool:
        """Whether closing has begun: new calls are refused."""
        return self._closing

    async def run(
        self,
        work: Callable[[], T],
        *,
        undo: Callable[[T], object] | None = None,
        strand: Strand | None = None,
        keep: bool = False,
    ) -> T:
        """Run ``work`` on a thread; return what it returns, or raise what it raises.

        Args:
            work: the call.
            undo: gives the result back when nobody is left to take it.
            strand: calls on the same strand run one after the other.
            keep: run it even if the caller goes away before it has started, and while
                closing as well.

        Raises:
            StoreClosedError: closing has begun; the call has not run and never will.
        """
        return await self.start(work, undo=undo, strand=strand, keep=keep).result()

    def start(
        self,
        work: Callable[[], T],
        *,
        undo: Callable[[T], object] | None = None,
        strand: Strand | None = None,
        keep: bool = False,
    ) -> Pending[T]:
        """Start a call as :meth:`run` does; its result must be awaited, or the call left."""
        loop = asyncio.get_running_loop()
        call = Pending(self, work, undo=undo, keep=keep, loop=loop, strand=strand)
        self._submit(call)
        return call

    def later(self, work: Callable[[], object], *, strand: Strand | None = None) -> None:
        """Run ``work`` some time, with nobody waiting; errors are logged and counted.

        Needs no event loop.  Does nothing once the last act of closing has begun.
        """
        try:
            self._submit(Pending(self, work, keep=True, strand=strand))
        except StoreClosedError:
            log.debug("%s: a late call came after closing", self._name)

    async def settled(self) -> None:
        """Wait until no call is left, those that cancelled callers left behind included."""
        while self._calls:
            await self._watch()

    def begin_close(self, last_act: Callable[[], object]) -> None:
        """Refuse what has not started, let the rest end, then run ``last_act`` and stop.

        Returns at once; needs no event loop.  Only the first call counts.
        """
        with self._lock:
            if self._closing:
                return
            self._closing, self._last_act = True, last_act
            refused = [c for c in self._calls if _may_be_refused(c)]
            for call in refused:
                call.state, call.error = State.ENDED, self._refusal()
            lost = [c for c in self._calls if c.loop is not None and c.loop.is_closed()]
        for call in refused:
            self._withdraw(call)
            call.wake()
        for call in lost:  # whoever awaited them will never come back
            call.leave()
        self._look_around()

    async def close(self, last_act: Callable[[], object]) -> None:
        """Close as :meth:`begin_close` does and wait for it; raise what ``last_act`` raised.

        Cancelling ends the waiting, not the closing; calling again waits again.
        """
        self.begin_close(last_act)
        while not self._over:
            await self._watch()
        self._executor.shutdown(wait=True)  # the threads have nothing left to do
        with self._lock:
            error, self._last_error = self._last_error, None
        if error is not None:
            raise error

    def stats(self) -> WorkersStats:
        """Return what the threads do and did."""
        with self._lock:
            running = sum(call.running for call in self._calls)
            return WorkersStats(
                size=self._size,
                waiting=sum(_waits(call) for call in self._calls),
                running=running,
                finished=self._finished,
                left=self._left,
                undone=self._undone,
                failed_unseen=self._failed_unseen,
            )

    def check(self) -> None:
        """Raise AssertionError when calls are not accounted for."""
        with self._lock:
            running = sum(call.running for call in self._calls)
            assert running <= self._size, f"{running} calls run on {self._size} threads"
            assert not (self._over and self._calls), "calls are left after closing"

    # -- the owner of calls --------------------------------------------------------------

    def take(self, call: Pending[Any]) -> None:
        """See :class:`tierkv.aio.pending.Owner`."""
        with self._lock:
            call.state = State.GONE
            self._calls.discard(call)
        self._look_around()

    def leave(self, call: Pending[Any]) -> None:
        """See :class:`tierkv.aio.pending.Owner`."""
        with self._lock:
            before = call.state
            if before not in (State.WAITED_FOR, State.ENDED):
                return
            self._left += 1
            will_run = call.keep and before is State.WAITED_FOR
            call.state = State.UNATTENDED if will_run else State.GONE
            if call.running or will_run:
                return  # the rest happens on its thread
            self._failed_unseen += call.error is not None
        if call.undo is not None and call.error is None and before is State.ENDED:
            self.later(partial(self._give_back, call))  # undoing may wait: not here
        else:
            self._withdraw(call)
            self._drop(call)

    # -- on the threads ------------------------------------------------------------------

    def _submit(self, call: Pending[Any]) -> None:
        with self._lock:
            if self._closing and (self._last_act is None or not call.keep):
                raise self._refusal()
            self._calls.add(call)
        post = partial(self._post, call)
        if call.strand is None:
            post()
        else:
            call.strand.add(post)

    def _post(self, call: Pending[Any]) -> bool:
        """Hand a call to a thread; False when it is not to run any more."""
        with self._lock:
            if not _waits(call):
                return False
            call.posted = True
        try:
            self._executor.submit(self._execute, call)
        except RuntimeError:  # shut down: Python is ending
            self._drop(call)
            return False
        return True

    def _withdraw(self, call: Pending[Any]) -> None:
        """A call will not run though a thread may still come upon it: whose turn is next?"""
        with self._lock:
            strand, call.strand = (call.strand, None) if call.posted else (None, call.strand)
        if strand is not None:
            strand.advance()

    def _execute(self, call: Pending[Any]) -> None:
        with self._lock:
            if not _waits(call):
                return
            call.running = True
        call.run()
        with self._lock:
            call.running = False
            self._finished += 1
            attended = call.state is State.WAITED_FOR
            call.state = State.ENDED if attended else State.GONE
            strand, call.strand = call.strand, None
        if not attended:
            self._give_back(call)
        if strand is not None:  # first: whoever hears of the result may make a call at once
            strand.advance()
        if attended and not call.wake():
            call.leave()

    def _give_back(self, call: Pending[Any]) -> None:
        """Undo what a call did whose caller has gone away."""
        undone, error = False, call.error
        try:
            undone = call.give_back()
        except Exception as caught:  # nobody is left to raise it to
            error = caught
        with self._lock:
            self._undone += undone
            self._failed_unseen += error is not None
        if error is not None:
            log.info("%s: a call failed whose caller had left", self._name, exc_info=error)
        self._drop(call)

    def _drop(self, call: Pending[Any]) -> None:
        call.forget()
        with self._lock:
            self._calls.discard(call)
        self._look_around()

    def _finish(self, last_act: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            last_act()
        except BaseException as caught:  # the thread's top frame: whoever closes gets it
            error = caught
        self._executor.shutdown(wait=False)
        with self._lock:
            self._over, self._last_error = True, error
        self._look_around()

    def _refusal(self) -> StoreClosedError:
        return StoreClosedError(
            f"{self._name}: closed before the call had started; open the store again"
        )

    # -- waiting for quiet ---------------------------------------------------------------

    def _look_around(self) -> None:
        """When no call is left: wake who waits for that; when closing, do the last act."""
        last_act = None
        watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        with self._lock:
            if not self._calls:
                watchers, self._watchers = self._watchers, []
                if self._closing:
                    last_act, self._last_act = self._last_act, None
        if last_act is not None:
            self._executor.submit(self._finish, last_act)
        for loop, future in watchers:
            try:
                loop.call_soon_threadsafe(_set, future)
            except RuntimeError:  # that loop is closed: nobody waits any more
                continue

    async def _watch(self) -> None:
        """Wait until it is worth looking again."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._watchers.append((loop, future))
            quiet = not self._calls and (self._over or not self._closing)
        if quiet:
            self._look_around()
        await future


async def first_call(workers: Workers, work: Callable[[], T], *, undo: Callable[[T], object]) -> T:
    """Run the call that opens what ``workers`` will serve; close them when it fails."""
    try:
        return await workers.run(work, undo=undo)
    except Exception:  # whatever it was: it is raised again once the threads have ended
        await workers.close(nothing)
        raise
    except BaseException:  # cancelled: not a moment longer
        workers.begin_close(nothing)
        raise


def nothing() -> None:
    """Do nothing: the last act of an owner that owns nothing else."""


def _waits(call: Pending[Any]) -> bool:
    return not call.running and call.state in (State.WAITED_FOR, State.UNATTENDED)


def _may_be_refused(call: Pending[Any]) -> bool:
    return call.state is State.WAITED_FOR and not call.running and not call.keep


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
