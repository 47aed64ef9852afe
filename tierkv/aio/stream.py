"""Tokens as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tierkv.aio.tokens import TokenChannel
from tierkv.devices.base import DeviceError

if TYPE_CHECKING:
    from tierkv.aio.cache import AsyncCache
    from tierkv.integrations.transformers.generating import Generation
    from tierkv.stats import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamParts:
    """How a stream does its work.

    Attributes:
        start: prepares a generation that gives its tokens to a channel.
        begin: finds and loads.
        run: computes and commits, on the model's thread.
        buffer: lists of tokens that may wait for the reader.
        stall_timeout_s: how long the model waits for the reader.
    """

    start: Callable[[TokenChannel], Generation]
    begin: Callable[[Generation], Awaitable[AsyncCache]]
    run: Callable[[Generation, AsyncCache], Any]
    buffer: int
    stall_timeout_s: float


@dataclass(slots=True)
class _Progress:
    """How far a stream is.  Apart from it, since the iterator must not refer to the stream:
    one that is left early is collected, and so stopped, at once only outside of any cycle.
    """

    found: Found | None = None
    output: Any = None
    cache: AsyncCache | None = None


class TokenStream:
    """The new tokens of one generation; made by :meth:`AsyncTierKV.stream`.

    Iterate over it once.  As a context manager it waits, on leaving, until the model's thread
    is done; without, a stream that is left early ends in the background.
    """

    def __init__(self, parts: StreamParts) -> None:
        """Use :meth:`AsyncTierKV.stream`."""
        self._progress = _Progress()
        self._tokens = _generate(parts, self._progress)

    @property
    def found(self) -> Found | None:
        """What was found in each tier, None until loaded."""
        return self._progress.found

    @property
    def output(self) -> Any:
        """What ``generate`` returned, None until the stream has ended."""
        return self._progress.output

    def __aiter__(self) -> AsyncGenerator[list[int], None]:
        """Return the iterator over lists of new ids."""
        return self._tokens

    async def aclose(self) -> None:
        """Stop the model at its next token, and wait until its thread is done."""
        await self._tokens.aclose()
        if self._progress.cache is not None:
            await self._progress.cache.over()

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the stream."""
        if kind is not GeneratorExit:  # else the coroutine is being destroyed and cannot wait
            await self.aclose()


async def _generate(parts: StreamParts, progress: _Progress) -> AsyncGenerator[list[int], None]:
    channel = TokenChannel(parts.buffer, parts.stall_timeout_s)
    generation = parts.start(channel)
    while True:
        async with await parts.begin(generation) as cache:
            progress.cache, progress.found = cache, cache.found
            channel.begin(cache.stopping)
            call = cache.start(partial(parts.run, generation, cache))
            call.on_woken(channel.finish)
            try:
                while (tokens := await channel.get()) is not None:
                    yield tokens
                progress.output = await cache.finish(call)
                if channel.stalled:
                    raise TimeoutError(f"stream: no token taken for {parts.stall_timeout_s} s")
                return
            except DeviceError:
                if not generation.can_start_over:
                    raise
                await cache.abandon()
            except BaseException:
                channel.close()
                raise
            finally:
                call.leave()  # harmless after its end
