"""The device pages of one running sequence: obtained, shared with forks, given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.devices.base import CopyOp
from tierkv.identity.spec import GroupKind
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers

_NO_BOUNDARY = 1 << 62  # no sequence is so long


class Holding:
    """Page tables of a sequence, and the slots and pins behind them.

    One thread at a time.  Forks of the sequence may share slots from other threads: a page
    is written only while its slot has no other holder, and copied before that if it has.

    Attributes:
        tables: the page table of each layer group.
        transfers: makes room for pages.
        floor: tokens may be taken back down to this length; None for no promise.
    """

    def __init__(self, core: Core, transfers: Transfers, tables: list[GroupTable]) -> None:
        self.tables = tables
        self.floor: int | None = None
        self._core = core
        self.transfers = transfers
        self._boundary_tokens = core.boundary_tokens

    def fork(self, length: int) -> Holding:
        """Return a holding of the pages of ``length`` tokens.  Call with the store's lock held.

        Pages obtained ahead are not shared: two sequences would write into them.
        """
        core = self._core
        tables = [table.fork(table.group.pages_for(length)) for table in self.tables]
        other = Holding(core, self.transfers, tables)
        other.floor, other._boundary_tokens = self.floor, self._boundary_tokens
        core.planner.share(Tier.DEVICE, other.private_slots())
        core.index.pin(np.asarray(other.shared_rows(), np.int32), Tier.DEVICE)
        return other

    def obtain(self, start: int, count: int, *, ahead: bool) -> int:
        """Obtain the pages that ``count`` tokens from ``start`` need, to be written.

        Args:
            start: tokens held so far.
            count: tokens to come.
            ahead: only of groups that keep every page: what a window keeps depends on how
                the tokens will be split.

        Returns:
            0, or how many pages were wanted when there was no room for them.
        """
        core = self._core
        missing = [
            (table, page)
            for table in self.tables
            if not (ahead and table.group.kind is GroupKind.SLIDING)
            for page in table.missing(start, count, self._boundary_tokens, self.floor)
        ]
        foreign = self._not_writable(start)
        last = next((table.slots[-1] for table in self.tables if table.slots), None)
        wanted = len(missing) + len(foreign)
        slots = self.transfers.obtain(Tier.DEVICE, wanted, deadline=core.deadline(), near=last)
        if slots is None:
            return wanted
        for (table, page), slot in zip(missing, slots, strict=False):
            table.set(page, slot)
        self._copy_apart(foreign, slots[len(missing) :])
        return 0

    def give_up_boundaries(self) -> None:
        """Keep no windows but the last from now on: the pool is too small for more."""
        self._boundary_tokens = _NO_BOUNDARY

    def drop_outdated(self, tokens: int, committed: int) -> None:
        """Give back the pages that neither the window at ``tokens`` nor a boundary needs."""
        for table in self.tables:
            pages = table.outdated(tokens, committed, self._boundary_tokens, self.floor)
            self._drop(table, pages)

    def crop(self, length: int) -> None:
        """Give back every page that lies wholly behind ``length`` tokens."""
        for table in self.tables:
            first = table.group.pages_for(length)
            self._drop(table, [p for p in range(first, len(table.slots)) if table.holds(p)])

    def release(self) -> None:
        """Give everything back.  Call with the store's lock held."""
        core = self._core
        core.index.unpin(np.asarray(self.shared_rows(), np.int32), Tier.DEVICE)
        core.planner.give_back(Tier.DEVICE, self.private_slots())
        for table in self.tables:
            table.clear()

    def own_tails(self, length: int) -> dict[int, int | None]:
        """Return the groups whose partial page at ``length`` can be handed over as it is.

        Pages that others hold too are copied, if there is room.
        """
        shared = self._not_writable(length)
        slots = self.transfers.obtain(Tier.DEVICE, len(shared), deadline=self._core.deadline())
        if slots is not None:
            self._copy_apart(shared, slots)
        foreign = {table.group.name for table, _ in self._not_writable(length)}
        return {
            number: None
            for number in self._partial_groups(length)
            if self.tables[number].group.name not in foreign
        }

    def copy_tails(self, length: int) -> dict[int, int | None]:
        """Copy the partial pages, which the sequence goes on writing; {} when no room is left.

        Returns:
            By group, the held slot with the copy.
        """
        core, groups = self._core, self._partial_groups(length)
        slots = self.transfers.obtain(Tier.DEVICE, len(groups), deadline=core.deadline())
        if slots is None:
            with core.lock:
                core.counters.skipped_pages += len(groups)
            return {}
        sources = [self.tables[n].slots[length // self.tables[n].group.page_tokens] for n in groups]
        self._copy(sources, slots)
        return dict(zip(groups, slots, strict=True))

    def private_slots(self) -> list[int]:
        """Return the slots of pages that are not committed."""
        return [slot for table in self.tables for slot in table.private_slots()]

    def shared_rows(self) -> list[int]:
        """Return the index rows of the committed pages."""
        return [row for table in self.tables for row in table.shared_rows()]

    def _partial_groups(self, length: int) -> list[int]:
        """Return the groups whose last page is partial at ``length`` tokens."""
        return [
            number
            for number, table in enumerate(self.tables)
            if length % table.group.page_tokens
            and table.group.kind is not GroupKind.SNAPSHOT
            and table.holds(length // table.group.page_tokens)
        ]

    def _not_writable(self, start: int) -> list[tuple[GroupTable, int]]:
        """Return the pages that hold tokens before and after ``start`` and are others' too."""
        planner, found = self._core.planner, []
        with self._core.lock:
            for table in self.tables:
                page, used = divmod(start, table.group.page_tokens)
                if used and table.holds(page):
                    own = table.is_private(page) and planner.exclusive(
                        Tier.DEVICE, table.slots[page]
                    )
                    if not own:
                        found.append((table, page))
        return found

    def _copy_apart(self, pages: list[tuple[GroupTable, int]], slots: list[int]) -> None:
        """Replace pages by copies that belong to this sequence alone."""
        if not pages:
            return
        self._copy([table.slots[page] for table, page in pages], slots)
        for (table, page), slot in zip(pages, slots, strict=True):
            self._drop(table, [page])
            table.set(page, slot)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        pool = self._core.pool
        self._core.device.compute.copy(
            [CopyOp(pool.page(t), pool.page(s)) for s, t in zip(sources, targets, strict=True)]
        )

    def _drop(self, table: GroupTable, pages: list[int]) -> None:
        """Give pages of a table back."""
        if not pages:
            return
        core = self._core
        with core.lock:
            rows = [table.rows[page] for page in pages]
            slots = [table.drop(page) for page in pages]
            shared = [row for row in rows if row >= 0]
            core.index.unpin(np.asarray(shared, np.int32), Tier.DEVICE)
            own = [slot for slot, row in zip(slots, rows, strict=True) if row < 0]
            core.planner.give_back(Tier.DEVICE, own)
