"""The store for asyncio: the same store, awaited."""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from tierkv.aio.pool import AsyncPool
from tierkv.aio.sequence import AsyncSequence
from tierkv.aio.workers import Workers, WorkersStats, first_call
from tierkv.data_plane.announcing import Announcement
from tierkv.errors import StoreClosedError
from tierkv.sequence import Sequence
from tierkv.store import Store

if TYPE_CHECKING:
    from tierkv.attached.pool import AttachedPool
    from tierkv.attached.views import PoolTensors
    from tierkv.identity.keys import Extras, Namespace
    from tierkv.identity.spec import CacheSpec
    from tierkv.stats import FlushReport, StoreStats


class AsyncStore:
    """A :class:`tierkv.Store` whose waiting calls are awaited.

    What may wait, or hash a long prompt, is a coroutine and runs on worker threads; what only
    looks something up is an ordinary method.  Every await may be cancelled: a call that has
    not started never runs, one that runs is allowed to end and its result is given back.

    It may be used from one event loop at a time.  Make it with :meth:`open`, which owns the
    store, or around an open store, which then stays open when this is closed.
    """

    def __init__(self, store: Store, *, workers: int | Workers = 4) -> None:
        """Wrap an open store.

        Args:
            store: the store; closing this one leaves it open.
            workers: threads for waiting calls, or a set of threads that somebody else owns.
        """
        self._store = store
        self._owns_store = False
        self._owns_workers = not isinstance(workers, Workers)
        self._workers = (
            workers if isinstance(workers, Workers) else Workers(workers, name="tierkv-aio")
        )
        self._closed = False
        self._running: set[Sequence] = set()
        self._pools: WeakSet[AttachedPool] = WeakSet()
        # Sequences whose AsyncSequence was dropped without an end; abandoned at the next
        # call, since a finaliser may run at any moment, in any thread.
        self._dropped: deque[Sequence] = deque()

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str] | None,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        workers: int = 4,
        **options: Any,
    ) -> AsyncStore:
        """Open or create a store; arguments and errors as for :meth:`tierkv.Store.open`.

        Args:
            path: directory of the disk tier, or None.
            spec: the model's layer groups.
            namespace: the identity of the pages.
            workers: threads for waiting calls, so the number of disk reads, flushes and
                commits under way at once.
            options: passed on to :meth:`tierkv.Store.open`.
        """
        threads = Workers(workers, name="tierkv-aio")
        call = partial(Store.open, path, spec, namespace, **options)
        store = await first_call(threads, call, undo=Store.close)
        made = cls(store, workers=threads)
        made._owns_store = made._owns_workers = True
        return made

    @property
    def sync(self) -> Store:
        """The store behind this one."""
        return self._store

    @property
    def spec(self) -> CacheSpec:
        """The layer groups of the pages."""
        return self._store.spec

    @property
    def namespace(self) -> Namespace:
        """The identity of the pages."""
        return self._store.namespace

    @property
    def closed(self) -> bool:
        """Whether closing has begun, of this object or of the store behind it."""
        return self._closed or self._store.closed

    async def begin(
        self,
        token_ids: Any,
        *,
        extras: Extras = (),
        max_new_tokens: int = 0,
        limit: int | None = None,
        restartable: bool = False,
    ) -> AsyncSequence:
        """Begin a sequence; arguments and errors as for :meth:`tierkv.Store.begin`.

        Cancelling returns at once.  A disk read under way ends in the background, within the
        store's ``io_timeout_s``, and what was begun is abandoned.
        """
        self._must_be_open()
        self._release_dropped()
        call = partial(
            self._store.begin,
            token_ids,
            extras=extras,
            max_new_tokens=max_new_tokens,
            limit=limit,
            restartable=restartable,
        )
        return self._adopt(await self._workers.run(call, undo=Sequence.abandon))

    async def announce(self, token_ids: Any, *, extras: Extras = ()) -> Announcement:
        """Start reading what lies on disk of a prompt; see :meth:`tierkv.Store.announce`.

        Of what it returns, only ``wait`` blocks; awaiting :meth:`begin` serves instead.
        """
        self._must_be_open()
        call = partial(self._store.announce, token_ids, extras=extras)
        return await self._workers.run(call, undo=Announcement.cancel)

    def attach_pool(self, tensors: PoolTensors, *, layout: str) -> AsyncPool:
        """Put the host and disk tiers behind an engine's pool; see :meth:`Store.attach_pool`.

        Does not wait.  Closing this object closes the pool.
        """
        self._must_be_open()
        pool = self._store.attach_pool(tensors, layout=layout)
        self._pools.add(pool)
        return AsyncPool(pool, self._workers)

    async def hint(
        self,
        token_ids: Any,
        *,
        extras: Extras = (),
        end_of_session: bool = False,
        ttl_s: float | None = None,
    ) -> int:
        """Say what is known of a sequence's future; see :meth:`tierkv.Store.hint`.

        Cancelled while it runs, it has its effect.
        """
        self._must_be_open()
        call = partial(
            self._store.hint, token_ids, extras=extras, end_of_session=end_of_session, ttl_s=ttl_s
        )
        return await self._workers.run(call)

    async def pin(
        self, token_ids: Any, *, owner: str, ttl_s: float | None = None, extras: Extras = ()
    ) -> int:
        """Keep a sequence's pages where they are; see :meth:`tierkv.Store.pin`.

        Cancelled while it runs, the pin holds: end it with :meth:`unpin`, which ends all pins
        of an owner and so cannot be done here.
        """
        self._must_be_open()
        call = partial(self._store.pin, token_ids, owner=owner, ttl_s=ttl_s, extras=extras)
        return await self._workers.run(call)

    def unpin(self, owner: str) -> int:
        """End all pins of an owner; does not wait."""
        self._must_be_open()
        return self._store.unpin(owner)

    async def flush(self) -> FlushReport:
        """Make every committed page durable; see :meth:`tierkv.Store.flush`.

        Cancelled while it runs, it goes on in the background.
        """
        self._must_be_open()
        return await self._workers.run(self._store.flush)

    def stats(self) -> StoreStats:
        """Return a snapshot of tiers and counters; does not wait."""
        return self._store.stats()

    def workers(self) -> WorkersStats:
        """Return what the threads do and did; does not wait."""
        return self._workers.stats()

    async def check(self) -> None:
        """Prove that every page, slot and call is accounted for.

        Raises:
            AssertionError: an invariant is broken.
        """
        self._must_be_open()
        self._workers.check()
        await self._workers.run(self._store.check)

    async def settled(self) -> None:
        """Wait until the calls that cancelled callers left behind have ended."""
        self._release_dropped()
        await self._workers.settled()

    async def close(self) -> None:
        """Abandon the sequences begun here, and close the store if it was opened here.

        Calls that wait for a thread are refused, calls that run are waited for.  Idempotent.
        Cancelling ends the waiting, not the closing; closing again waits for it.
        """
        self._closed = True
        if self._owns_workers:
            await self._workers.close(self._shut)
        elif not self._workers.closing:
            await self._workers.run(self._shut, keep=True)

    async def __aenter__(self) -> Self:
        """Return the store."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close."""
        if kind is GeneratorExit and self._owns_workers:  # being destroyed: it cannot wait
            self._closed = True
            self._workers.begin_close(self._shut)
            return
        await self.close()

    def _adopt(self, sequence: Sequence) -> AsyncSequence:
        self._running.add(sequence)
        return AsyncSequence(
            sequence, self._workers, adopt=self._adopt, ended=self._ended, dropped=self._dropped
        )

    def _ended(self, sequence: Sequence) -> None:
        self._running.discard(sequence)

    def _release_dropped(self) -> None:
        while self._dropped:
            sequence = self._dropped.popleft()
            self._running.discard(sequence)
            if not sequence.ended:
                self._workers.later(sequence.abandon)

    def _shut(self) -> None:
        """The last act, on a thread, when no call is left."""
        if not self._store.closed:
            for sequence in list(self._running):
                sequence.abandon()
            for pool in list(self._pools):
                pool.close()
        self._running.clear()
        if self._owns_store:
            self._store.close()

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed; open it again")
