"""Subscriptions to page events: the planner has a journal while there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.control_plane.journal import Journal
from tierkv.errors import InvalidInputError
from tierkv.events import EventQueue

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core


def subscribe(core: Core, *, token_ids: bool, limit: int) -> EventQueue:
    """Return a new subscriber's queue; see :meth:`tierkv.Store.subscribe`."""
    if limit < 1:
        raise InvalidInputError(f"subscribe: limit must be at least 1, got {limit}")

    def end(queue: EventQueue) -> None:
        if planner.journal is not None and planner.journal.remove(queue):
            planner.journal = None

    planner = core.planner
    with core.lock:
        if planner.journal is None:
            planner.journal = Journal(core.index)
        queue = EventQueue(
            core.lock,
            limit,
            token_ids=token_ids,
            snapshot=planner.journal.snapshot,
            on_close=end,
        )
        planner.journal.add(queue)
        return queue
