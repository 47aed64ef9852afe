"""Page events: which page came to which tier, and which one left it.

For routers and indexers that must know what a store could give back.  A consumer begins with
``snapshot``, then takes events; when it was too slow, ``lost`` says so and it begins again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from tierkv.tiers import Tier


class EventKind(StrEnum):
    """What happened to a page."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEvent:
    """One page that came to a tier, or left it.

    Attributes:
        kind: stored or removed.
        tier: the tier; the page may be in others as well.
        key: the page's key.
        parent: key of the page it hangs below; zeros when there is none.
        group: index of its layer group.
        end_token: tokens of the prefix up to its end.
        num_tokens: tokens it holds.
        engine_hash: the engine's own hash of it, if it was saved under one.
        parent_hash: the engine's own hash of the prefix before it, likewise.
        token_ids: the ids of its tokens, if a subscriber asked for them before it was stored.
    """

    kind: EventKind
    tier: Tier
    key: bytes
    parent: bytes
    group: int
    end_token: int
    num_tokens: int
    engine_hash: bytes | None = None
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] | None = None


class EventQueue:
    """The events of one subscriber, bounded.  Thread-safe.

    Made by :meth:`tierkv.Store.subscribe`.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        limit: int,
        *,
        token_ids: bool,
        snapshot: Callable[[], list[PageEvent]],
        on_close: Callable[[EventQueue], None],
    ) -> None:
        self.wants_token_ids = token_ids
        self._lock = lock
        self._limit = limit
        self._events: deque[PageEvent] = deque()
        self._lost = 0
        self._snapshot = snapshot
        self._on_close = on_close

    @property
    def lost(self) -> int:
        """Events dropped since the last snapshot because nobody took them in time."""
        return self._lost

    def take(self, limit: int | None = None) -> list[PageEvent]:
        """Return the oldest events and forget them; never blocks.

        Args:
            limit: how many at most; all when None.
        """
        with self._lock:
            count = len(self._events) if limit is None else min(limit, len(self._events))
            return [self._events.popleft() for _ in range(count)]

    def snapshot(self) -> list[PageEvent]:
        """Return a stored event for every copy there is now; later ``take`` goes on from here.

        Events not taken yet are forgotten, and ``lost`` becomes 0.  A page's parent comes
        before it.  Pages of other namespaces that share the store's directory are named too.
        """
        with self._lock:
            self._events.clear()
            self._lost = 0
            return self._snapshot()

    def put(self, event: PageEvent) -> None:
        """Add an event, dropping the oldest if there are too many.  For the store."""
        if len(self._events) == self._limit:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)

    def close(self) -> None:
        """End the subscription; idempotent."""
        with self._lock:
            self._on_close(self)

    def __enter__(self) -> EventQueue:
        """Return the queue."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the subscription."""
        self.close()
