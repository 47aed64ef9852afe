"""From the thread that computes tokens to the coroutine that sends them on, and back: stop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any, Self

import torch
from transformers import StoppingCriteria

from tierkv.errors import InvalidInputError


class Stopped(Exception):
    """Ends a ``generate`` that was asked to stop and whose tokens nobody wants."""


class StopFlag(StoppingCriteria):  # type: ignore[misc]
    """Ends a running ``generate`` at its next token.  Thread-safe."""

    def __init__(self, *, keep_partial: bool) -> None:
        """Make a flag; with ``keep_partial`` generate returns normally, else by ``Stopped``."""
        self._keep_partial = keep_partial
        self._flag = threading.Event()

    def set(self) -> None:
        """Ask to stop."""
        self._flag.set()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return, for each row, whether it is done.

        Raises:
            Stopped: asked to stop, and what was computed is not to be kept.
        """
        stops = self.check()
        return torch.full((input_ids.shape[0],), stops, dtype=torch.bool, device=input_ids.device)

    def check(self) -> bool:
        """Return whether to stop, or raise ``Stopped`` when nothing is to be kept."""
        stops = self._flag.is_set()
        if stops and not self._keep_partial:
            raise Stopped
        return stops

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: some releases copy the criteria, and the flag must stay the same."""
        return self


class TokenChannel:
    """A bounded queue of new tokens, from one thread to one coroutine.

    It is the ``streamer`` that ``generate`` is given.  A full queue makes the model wait, for
    a while: a reader that takes nothing for ``stall_timeout_s`` ends the generation.

    Attributes:
        stalled: the reader took nothing for too long.
    """

    def __init__(self, limit: int, stall_timeout_s: float) -> None:
        """Make a channel to the running loop.

        Raises:
            InvalidInputError: no room for a token.
        """
        if not isinstance(limit, int) or limit < 1:
            raise InvalidInputError(f"stream: buffer must be 1 or more, got {limit!r}")
        self.stalled = False
        self._limit = limit
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Condition()
        self._items: deque[list[int]] = deque()
        self._stop: StopFlag | None = None
        self._prompt_seen = False
        self._closed = False
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    # -- on the thread: what a streamer does ---------------------------------------------

    def put(self, value: Any) -> None:
        """Hand over what ``generate`` has: first the prompt, then new ids.

        Raises:
            Stopped: nobody takes them, and what was computed is not to be kept.
        """
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        tokens = value.reshape(-1).tolist()
        with self._lock:
            room = self._lock.wait_for(self._may_put, self._stall_timeout_s)
            self.stalled = self.stalled or not room
            taken = room and not self._closed
            if taken:
                self._items.append(tokens)
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed: nobody reads any more
            taken = False
        if not taken and self._stop is not None:
            self._stop.set()
            self._stop.check()

    def end(self) -> None:
        """Do nothing: the end of the call counts, which comes after the last token."""

    # -- on the loop ---------------------------------------------------------------------

    def begin(self, stop: StopFlag) -> None:
        """Say who will compute: the flag that ends it."""
        self._stop = stop
        self._ended = False
        if self._closed:
            stop.set()

    async def get(self) -> list[int] | None:
        """Return the next new ids, None after the last."""
        while True:
            with self._lock:
                if self._items:
                    self._lock.notify()
                    return self._items.popleft()
                if self._ended:
                    return None
            self._waiter = self._loop.create_future()
            await self._waiter

    def finish(self) -> None:
        """Say that no more tokens will come."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Say that nobody reads any more: the model stops at its next token."""
        with self._lock:
            self._closed = True
            self._items.clear()
            self._lock.notify()
        if self._stop is not None:
            self._stop.set()

    def _may_put(self) -> bool:
        return self._closed or len(self._items) < self._limit

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
