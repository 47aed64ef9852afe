"""An attached pool for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tierkv.aio.workers import Workers
from tierkv.attached.lease import Lease
from tierkv.errors import StoreClosedError

if TYPE_CHECKING:
    from tierkv.attached.keys import EnginePage, PageKeys
    from tierkv.attached.loads import LoadResults, LoadTicket
    from tierkv.attached.pool import AttachedPool
    from tierkv.attached.results import SaveResult
    from tierkv.attached.saves import SaveTicket


class AsyncPool:
    """An :class:`tierkv.attached.pool.AttachedPool` whose waiting calls are awaited.

    Made by :meth:`AsyncStore.attach_pool`.  Keys, pins, leases and statistics do not wait: use
    them at :attr:`sync`.  What :meth:`load` and :meth:`save` return are the pool's own tickets;
    :meth:`loaded` and :meth:`saved` wait for them off the event loop.

    Attributes:
        sync: the pool behind it.
    """

    def __init__(self, pool: AttachedPool, workers: Workers) -> None:
        """Use :meth:`AsyncStore.attach_pool`."""
        self.sync = pool
        self._workers = workers

    async def match(self, keys: PageKeys, **options: Any) -> Lease:
        """Lease the longest prefix; see :meth:`AttachedPool.match`.

        Cancelled while it reads, it ends in the background and the lease is released.  With
        ``wait_s=0`` nothing is waited for and no thread is used.
        """
        if options.get("wait_s") == 0:
            return self.sync.match(keys, **options)
        return await self._workers.run(
            partial(self.sync.match, keys, **options), undo=Lease.release
        )

    def load(
        self, lease: Lease, blocks: Sequence[Sequence[int | None]], *, layerwise: bool = False
    ) -> LoadTicket:
        """Start copying leased pages into the engine's blocks; see :meth:`AttachedPool.load`."""
        return self.sync.load(lease, blocks, layerwise=layerwise)

    @asynccontextmanager
    async def layer(self, ticket: LoadTicket, layer: int) -> AsyncIterator[bool]:
        """Reach a layer's blocks after its copies; see :meth:`LoadTicket.layer`."""
        if not ticket.done():
            await self._workers.run(partial(_enter, ticket, layer))
        with ticket.layer(layer) as whole:
            yield whole

    async def save(
        self, pages: Sequence[EnginePage], blocks: Sequence[Sequence[int]], **options: Any
    ) -> SaveTicket:
        """Copy whole pages out of the engine's blocks; see :meth:`AttachedPool.save`.

        Cancelled while room is made, the save is cancelled, and the blocks are free as soon as
        copies that run have ended: the pool refuses them until then.
        """
        call = partial(self.sync.save, pages, blocks, **options)
        return await self._workers.run(call, undo=_cancel)

    async def begin_save(
        self, pages: Sequence[EnginePage], blocks: Sequence[Sequence[int]], **options: Any
    ) -> SaveTicket:
        """Begin a save layer by layer; see :meth:`AttachedPool.begin_save`.

        The ticket's ``layer``, ``commit`` and ``cancel`` do not wait.
        """
        call = partial(self.sync.begin_save, pages, blocks, **options)
        return await self._workers.run(call, undo=_cancel)

    async def loaded(self, ticket: LoadTicket, timeout_s: float | None = None) -> LoadResults:
        """Wait for a load; see :meth:`LoadTicket.wait`.  Cancelling leaves it running."""
        if ticket.done():
            return ticket.results()
        return await self._workers.run(partial(ticket.wait, timeout_s))

    async def saved(
        self, ticket: SaveTicket, timeout_s: float | None = None
    ) -> tuple[SaveResult, ...]:
        """Wait for a save; see :meth:`SaveTicket.wait`.  Cancelling leaves it running."""
        if ticket.done():
            return ticket.results()
        return await self._workers.run(partial(ticket.wait, timeout_s))

    async def close(self) -> None:
        """Give everything back; see :meth:`AttachedPool.close`.  Idempotent.

        Cancelled, it goes on in the background; the engine must keep its tensors until a later
        call has returned.
        """
        try:
            await self._workers.run(self.sync.close, keep=True)
        except StoreClosedError:
            return  # closing the store closes its pools

    async def __aenter__(self) -> Self:
        """Return the pool."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close."""
        if kind is GeneratorExit:  # the coroutine is being destroyed and cannot wait
            self._workers.later(self.sync.close)
        else:
            await self.close()


def _enter(ticket: LoadTicket, layer: int) -> None:
    with ticket.layer(layer):
        pass  # entering waits; the use comes later


def _cancel(ticket: SaveTicket) -> None:
    ticket.cancel()
