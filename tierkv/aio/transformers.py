"""Generation with Transformers for asyncio.

Loading runs on I/O threads, the model on a thread of its own, one generation at a time: the
next request's pages come in while this one computes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from transformers import StoppingCriteriaList

from tierkv.aio.cache import AsyncCache
from tierkv.aio.store import AsyncStore
from tierkv.aio.stream import StreamParts, TokenStream
from tierkv.aio.workers import Workers, first_call, nothing
from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError, StoreClosedError
from tierkv.integrations.transformers.attach import TierKV
from tierkv.integrations.transformers.generating import Generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.aio.tokens import TokenChannel
    from tierkv.integrations.transformers.cache import TierKVCache
    from tierkv.stats import StoreStats

_IO = "tierkv-io"


class AsyncTierKV:
    """A :class:`TierKV` whose waiting calls are awaited.

    Make it with :meth:`attach`, which owns what it attached, or around a :class:`TierKV`,
    which then stays open when this is closed.  One event loop at a time.

    Attributes:
        sync: the TierKV behind it.
        store: its store, awaited.
    """

    def __init__(
        self, kv: TierKV, *, io_workers: int | Workers = 4, compute_workers: int = 1
    ) -> None:
        """Wrap an attached model.

        Args:
            kv: the attached model; closing this one leaves it attached.
            io_workers: threads that load and commit; a set of threads given is taken over.
            compute_workers: generations at a time; the others wait their turn, in order.
        """
        if not isinstance(kv, TierKV):
            raise InvalidInputError(
                f"AsyncTierKV wraps a TierKV, got {type(kv).__name__}; for a model, "
                "await AsyncTierKV.attach(model, path)"
            )
        self.sync = kv
        self._owns_kv = False
        self._io = io_workers if isinstance(io_workers, Workers) else Workers(io_workers, name=_IO)
        self._compute = Workers(compute_workers, name="tierkv-compute")
        self.store = AsyncStore(kv.store, workers=self._io)
        self._caches: WeakSet[AsyncCache] = WeakSet()  # one that is dropped frees itself
        self._closed = False

    @classmethod
    async def attach(
        cls, model: Any, *args: Any, io_workers: int = 4, compute_workers: int = 1, **options: Any
    ) -> AsyncTierKV:
        """Attach a store to a model; arguments and errors as for :meth:`TierKV.attach`.

        Args:
            model: a causal language model of Transformers.
            args: as for :meth:`TierKV.attach`.
            io_workers: threads that load and commit.
            compute_workers: generations at a time.
            options: as for :meth:`TierKV.attach`.
        """
        threads = Workers(io_workers, name=_IO)
        call = partial(TierKV.attach, model, *args, **options)
        kv = await first_call(threads, call, undo=TierKV.close)
        made = cls(kv, io_workers=threads, compute_workers=compute_workers)
        made._owns_kv = True
        return made

    @property
    def model(self) -> Any:
        """The attached model."""
        return self.sync.model

    async def cache(
        self,
        input_ids: Any,
        max_new_tokens: int = 0,
        *,
        keep_partial: bool = False,
        **options: Any,
    ) -> AsyncCache:
        """Begin sequences; arguments and errors as for :meth:`TierKV.cache`.

        Args:
            input_ids: ids of one sequence, or of several rows.
            max_new_tokens: tokens that will be generated.
            keep_partial: when the block is left by an error or a cancellation, commit what
                the model was fed until then instead of abandoning it.
            options: as for :meth:`TierKV.cache`.
        """
        call = partial(self.sync.cache, input_ids, max_new_tokens, **options)
        computes = options.get("copies", 1) > 1 or _rows(input_ids) > 1
        return await self._begin(call, computes=computes, keep_partial=keep_partial)

    async def generate(
        self, input_ids: Any, *, keep_partial: bool = False, **generate_kwargs: Any
    ) -> Any:
        """Generate with what the store holds, commit, and return the output of ``generate``.

        Cancelled, the model stops at its next token (a prefill under way ends first), the
        cache is abandoned, and only then does this return.

        Args:
            input_ids: as for :meth:`TierKV.generate`.
            keep_partial: when cancelled, commit what the model was fed until then.
            generate_kwargs: as for :meth:`TierKV.generate`.
        """
        generation = Generation(self.sync, input_ids, generate_kwargs)
        while True:
            try:
                async with await self._begin_generation(generation, keep_partial) as cache:
                    try:
                        return await cache.compute(
                            partial(_run, generate_kwargs, generation, cache)
                        )
                    except DeviceError:
                        await cache.abandon()  # nothing of it is worth keeping
                        raise
            except DeviceError:
                if not generation.can_start_over:
                    raise

    def stream(
        self,
        input_ids: Any,
        *,
        keep_partial: bool = False,
        buffer: int = 64,
        stall_timeout_s: float = 30.0,
        **generate_kwargs: Any,
    ) -> TokenStream:
        """Generate, giving lists of new token ids as they come; commit at the end.

        ``async for ids in kv.stream(...)``.  Leaving the loop early stops the model at its
        next token.  Where that may happen, write ``async with kv.stream(...) as tokens``
        around the loop: then the thread is done when the block has been left.

        Args:
            input_ids: as for :meth:`TierKV.generate`, one sequence.
            keep_partial: when left early, commit what the model was fed until then.
            buffer: lists of tokens that may wait for the reader before the model waits.
            stall_timeout_s: a reader that takes nothing for so long, while the model waits,
                ends the generation by a TimeoutError.
            generate_kwargs: as for :meth:`TierKV.generate`.

        Raises:
            InvalidInputError: a ``streamer`` is given as well.
        """
        if generate_kwargs.get("streamer") is not None:
            raise InvalidInputError("stream: it has a streamer of its own; leave yours out")

        def start(channel: TokenChannel) -> Generation:
            return Generation(self.sync, input_ids, {**generate_kwargs, "streamer": channel})

        return TokenStream(
            StreamParts(
                start=start,
                begin=partial(self._begin_generation, keep_partial=keep_partial),
                run=partial(_run, generate_kwargs),
                buffer=buffer,
                stall_timeout_s=stall_timeout_s,
            )
        )

    def stats(self) -> StoreStats:
        """Return the store's statistics; does not wait."""
        return self.sync.stats()

    async def check(self) -> None:
        """Check the store's invariants and those of the threads."""
        self._compute.check()
        await self.store.check()

    async def settled(self) -> None:
        """Wait until no call is left, those that cancelled callers left behind included."""
        await self._compute.settled()
        await self.store.settled()

    async def close(self) -> None:
        """Stop running generations, end their caches, and detach what was attached here.

        Generations that run or wait end by a StoreClosedError.  Idempotent.  Cancelling ends
        the waiting, not the closing; closing again waits for it.
        """
        self._begin_close()
        await self._compute.close(nothing)
        await self._io.close(nothing)

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close."""
        self._begin_close()
        if kind is not GeneratorExit:  # else the coroutine is being destroyed and cannot wait
            await self.close()

    async def _begin_generation(self, generation: Generation, keep_partial: bool) -> AsyncCache:
        computes = generation.computes_to_begin
        return await self._begin(generation.begin, computes=computes, keep_partial=keep_partial)

    async def _begin(
        self, call: Callable[[], TierKVCache], *, computes: bool, keep_partial: bool
    ) -> AsyncCache:
        """Begin a cache; where that takes forwards, in turn on the model's thread."""
        if self._closed:
            raise StoreClosedError("this AsyncTierKV is closed; attach to the model again")
        raw = await (self._compute if computes else self._io).run(call, undo=_abandon)
        cache = AsyncCache(
            raw,
            io=self._io,
            compute=self._compute,
            keep_partial=keep_partial,
            ended=self._caches.discard,
        )
        self._caches.add(cache)
        return cache

    def _begin_close(self) -> None:
        """Computing ends, then loading and committing, then the rest; needs no event loop."""
        self._closed = True
        for cache in list(self._caches):
            cache.abort()
        self._compute.begin_close(partial(self._io.begin_close, self._shut))

    def _shut(self) -> None:
        """The last act, on a thread, when no call is left."""
        for cache in list(self._caches):
            cache.raw.abandon()
        self._caches.clear()
        self.store._shut()
        if self._owns_kv:
            self.sync.close()


def _run(kwargs: dict[str, Any], generation: Generation, cache: AsyncCache) -> Any:
    """Generate and commit, on the model's thread, until done or told to stop."""
    criteria = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), cache.stopping])
    return generation.run(cache.raw, stopping_criteria=criteria)


def _abandon(cache: TierKVCache) -> None:
    cache.abandon()


def _rows(input_ids: Any) -> int:
    """Return how many rows there are."""
    if hasattr(input_ids, "ndim"):
        return len(input_ids) if input_ids.ndim > 1 else 1
    nested = input_ids and isinstance(input_ids[0], list | tuple)
    return len(input_ids) if nested else 1
