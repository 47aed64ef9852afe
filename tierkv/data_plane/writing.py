"""Writes pages from host memory to the disk tier, and takes the outcome in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierkv.storage.types import PageWrite, WriteStatus
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Rows
    from tierkv.data_plane.core import Core
    from tierkv.storage.tickets import WriteTicket

_WRITTEN = (WriteStatus.WRITTEN, WriteStatus.DUPLICATE)


class PageWriter:
    """Starts writes to the disk tier; each page's write ends exactly once, for good or bad."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._writing: set[int] = set()

    def is_writing(self, row: int) -> bool:
        """Return whether a page is on its way to disk.  Call with the lock held."""
        return row in self._writing

    def start(
        self, rows: Rows, slots: Sequence[int], end: Callable[[Rows], None]
    ) -> WriteTicket | None:
        """Start writing pinned pages from slots of host memory.  Call without the lock.

        Args:
            rows: the pages.
            slots: where in the arena their bytes are; untouched until the page's end.
            end: called for every page once, perhaps in parts, with the lock held, when its
                write has ended; the page is disk-resident by then if the write succeeded.

        Returns:
            A ticket to wait on, or None when no write could begin.
        """
        core = self._core
        if core.disk is None:
            with core.lock:
                end(rows)
            return None
        with core.lock:
            booked, evicted = core.planner.book_disk(len(rows))
            core.delete_from_disk(evicted)
            started, refused = rows[:booked], rows[booked:]
            pages = [self._page(r, s) for r, s in zip(started.tolist(), slots, strict=False)]
            self._writing.update(started.tolist())
            if len(refused):
                core.counters.write_failures += len(refused)
                end(refused)
        if not pages:
            return None
        if core.device.checks_order:
            given = [core.host_memory[slot] for slot in slots[: len(pages)]]
            core.device.host_use("disk write", reads=given)
        ticket = core.disk.put(pages)
        ticket.add_done_callback(lambda statuses: self._ended(started, statuses, end))
        return ticket

    def _ended(
        self, rows: Rows, statuses: Sequence[WriteStatus], end: Callable[[Rows], None]
    ) -> None:
        """Take a write's outcome in; runs on the disk tier's writer thread."""
        core = self._core
        with core.lock:
            good = [row for row, s in zip(rows.tolist(), statuses, strict=True) if s in _WRITTEN]
            self._writing.difference_update(rows.tolist())
            core.planner.settle_disk(good, len(rows))
            core.count_bytes(good, Tier.HOST, Tier.DISK)
            core.counters.demoted_to_disk += len(good)
            core.counters.write_failures += len(rows) - len(good)
            end(rows)

    def _page(self, row: int, slot: int) -> PageWrite:
        core = self._core
        group = core.spec.groups[core.group_of(row)]
        return PageWrite(
            info=core.page_info(row),
            payload=core.arena.slot(slot)[: group.page_bytes],
            layer_bytes=group.layer_bytes,
        )
