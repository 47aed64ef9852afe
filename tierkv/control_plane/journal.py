"""Tells subscribers which pages come to tiers and leave them.

The planner calls it wherever residency changes, and has none while nobody subscribes.  What
the index does not know of a page (an engine's hash, token ids) is noted when the page is
committed and forgotten when its last copy goes.  Call with the store's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.events import EventKind, EventQueue, PageEvent
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.index import PrefixIndex
    from tierkv.identity.keys import TokenArray

Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Note:
    """What only whoever commits a page knows of it.

    Attributes:
        engine_hash: the engine's hash of the page, None without one.
        parent_hash: the engine's hash of the prefix before it.
        token_ids: its tokens.
    """

    engine_hash: bytes | None = None
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] | None = None


_NOTHING = Note()


class Journal:
    """Events of one store, given to every subscriber."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._queues: list[EventQueue] = []
        self._notes: dict[bytes, Note] = {}

    @property
    def wants_token_ids(self) -> bool:
        """Whether a subscriber asked for token ids."""
        return any(queue.wants_token_ids for queue in self._queues)

    def add(self, queue: EventQueue) -> None:
        """Begin to give events to a subscriber."""
        self._queues.append(queue)

    def remove(self, queue: EventQueue) -> bool:
        """End a subscription; return whether it was the last one."""
        if queue in self._queues:
            self._queues.remove(queue)
        if not self.wants_token_ids:
            self._notes = {k: replace(note, token_ids=None) for k, note in self._notes.items()}
        return not self._queues

    def note(self, rows: Iterable[int], notes: Iterable[Note]) -> None:
        """Learn of pages that are resident or about to become so (-1 for no page)."""
        for row, note in zip(rows, notes, strict=True):
            if row >= 0 and note != _NOTHING:
                self._notes[self._index.key(row)] = note

    def note_tokens(self, rows: Sequence[int], tokens: TokenArray) -> None:
        """Learn the tokens of pages from the sequence that commits them (-1 for no page)."""
        if not self.wants_token_ids:
            return
        for row in rows:
            if row >= 0:
                end = int(self._index.end_token([row])[0])
                start = end - int(self._index.num_tokens([row])[0])
                known = self._notes.get(self._index.key(row), _NOTHING)
                ids = tuple(tokens[start:end].tolist())
                self._notes[self._index.key(row)] = replace(known, token_ids=ids)

    def stored(self, tier: Tier, rows: Rows) -> None:
        """Tell that a tier holds these pages now and did not before."""
        self._tell(EventKind.STORED, tier, rows)

    def removed(self, tier: Tier, rows: Rows) -> None:
        """Tell that a tier is about to give these pages up."""
        here = rows[(self._index.residency(rows) >> tier & 1) != 0]
        self._tell(EventKind.REMOVED, tier, here)
        alone = here[self._index.residency(here) == 1 << tier]
        for row in alone.tolist():
            self._notes.pop(self._index.key(row), None)

    def snapshot(self) -> list[PageEvent]:
        """Return a stored event for every copy, parents before children."""
        events: list[PageEvent] = []
        for tier in Tier:
            rows = self._index.select(within=(tier,))
            rows = rows[np.argsort(self._index.end_token(rows), kind="stable")]
            events += self._events(EventKind.STORED, tier, rows)
        return events

    def _tell(self, kind: EventKind, tier: Tier, rows: Rows) -> None:
        for event in self._events(kind, tier, rows):
            for queue in self._queues:
                queue.put(event)

    def _events(self, kind: EventKind, tier: Tier, rows: Rows) -> list[PageEvent]:
        index = self._index
        columns = (index.group(rows), index.end_token(rows), index.num_tokens(rows))
        events = []
        for row, *meta in zip(rows.tolist(), *(c.tolist() for c in columns), strict=True):
            key, (group, end, count) = index.key(row), meta
            note = self._notes.get(key, _NOTHING)
            events.append(
                PageEvent(
                    kind=kind,
                    tier=tier,
                    key=key,
                    parent=index.parent_key(row),
                    group=group,
                    end_token=end,
                    num_tokens=count,
                    engine_hash=note.engine_hash,
                    parent_hash=note.parent_hash,
                    token_ids=note.token_ids,
                )
            )
        return events
