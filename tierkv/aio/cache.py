"""The sequences of one call of an attached model, for asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tierkv.aio.strand import Strand
from tierkv.aio.tokens import StopFlag, Stopped
from tierkv.errors import InvalidInputError, StoreClosedError

if TYPE_CHECKING:
    from tierkv.aio.pending import Pending
    from tierkv.aio.workers import Workers
    from tierkv.integrations.transformers.cache import TierKVCache
    from tierkv.stats import CommitReport, Found

T = TypeVar("T")


class AsyncCache:
    """A :class:`TierKVCache` whose waiting calls are awaited.

    Made by :meth:`AsyncTierKV.cache`.  Use it as a context manager: leaving commits; leaving
    by an exception or a cancellation stops the model at its next token and abandons the
    cache (or commits what was fed, with ``keep_partial``).  When the block has been left, the
    thread is done with the cache.  One task at a time.

    Attributes:
        raw: the cache to hand to the model, in a call given to :meth:`compute`.
        stopping: a stopping criterion for a ``generate`` of your own, so that it ends soon
            after the task was cancelled.
    """

    def __init__(
        self,
        raw: TierKVCache,
        *,
        io: Workers,
        compute: Workers,
        keep_partial: bool,
        ended: Callable[[AsyncCache], object],
    ) -> None:
        """Use :meth:`AsyncTierKV.cache`."""
        self.raw = raw
        self.stopping = StopFlag(keep_partial=keep_partial)
        self._io = io
        self._compute = compute
        self._keep_partial = keep_partial
        self._ended = ended
        self._strand = Strand()
        self._aborted = False

    @property
    def found(self) -> Found:
        """Tokens found in each tier when the cache was begun."""
        return self.raw.found

    async def compute(self, work: Callable[[], T]) -> T:
        """Run a call of your own, such as a forward, on the model's thread, in its turn.

        Cancelled before its turn, it never runs; afterwards it goes on until it ends or
        notices :attr:`stopping`.

        Raises:
            StoreClosedError: closed meanwhile; what was computed may be incomplete.
        """
        return await self.finish(self.start(work))

    def start(self, work: Callable[[], T]) -> Pending[T | None]:
        """Start what :meth:`compute` runs; give the call to :meth:`finish`, or leave it."""

        def until_stopped() -> T | None:
            try:
                return work()
            except Stopped:  # raised by our own criterion: nobody waits for a result
                return None

        return self._compute.start(until_stopped, strand=self._strand)

    async def finish(self, call: Pending[T | None]) -> T:
        """Return the result of a call that was started."""
        try:
            value = await call.result()
        except BaseException:
            self.stopping.set()
            raise
        if self._aborted:
            raise StoreClosedError("closed while computing; attach to the model again")
        return value  # type: ignore[return-value]  # None only where nobody waits, or T has it

    def abort(self) -> None:
        """Make a running generation end at its next token, with an error; does not wait."""
        self._aborted = True
        self.stopping.set()

    async def commit(self, outputs: Any = None) -> CommitReport:
        """Make all pages visible and release the cache; see :meth:`TierKVCache.commit`.

        Cancelled while it runs, it has its effect.
        """
        report = await self._io.run(lambda: self.raw.commit(outputs), strand=self._strand)
        self._ended(self)
        return report

    async def abandon(self) -> None:
        """Release the cache without committing, after a call that still runs.  Idempotent.

        Even if this is cancelled, the cache is abandoned.
        """
        await self._end(self.raw.abandon)

    async def over(self) -> None:
        """Wait until no call uses the cache any more."""
        if not self._strand.idle:
            await self._end(lambda: None)

    async def __aenter__(self) -> Self:
        """Return the cache."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, or end in another way when an exception is on its way."""
        if self.raw.batch.spent and self._strand.idle:
            self._ended(self)
        elif kind is None:
            try:
                await self.commit()
            except BaseException:
                await self._end(self._give_up)
                raise
        else:
            self.stopping.set()
            if kind is GeneratorExit:  # the coroutine is being destroyed and cannot wait
                self._io.later(self._give_up, strand=self._strand)
            else:
                await self._end(self._give_up)

    async def _end(self, work: Callable[[], None]) -> None:
        try:
            await self._io.run(work, strand=self._strand, keep=True)
        except StoreClosedError:
            return  # closing ends every cache
        if self.raw.batch.spent:
            self._ended(self)

    def _give_up(self) -> None:
        """End the cache after an error; on a thread, when nothing uses it any more."""
        try:
            if self._keep_partial and not self.raw.batch.spent:
                self.raw.commit()
        except InvalidInputError:  # a forward ended inside the model: nothing is whole
            return
        finally:
            self.raw.abandon()
            self._ended(self)
