"""The pages of one running sequence: obtained, shared with forks, spilled, given back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierkv.data_plane.spill import Spill
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.identity.spec import GroupKind
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierkv.control_plane.planner import Rows
    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers

_NO_BOUNDARY = 1 << 62  # no sequence is so long
_TIERS = (Tier.DEVICE, Tier.HOST)


class Holding:
    """Page tables of a sequence, and the slots and pins behind them.

    One thread at a time.  Forks of the sequence may share slots from other threads: a page
    is written only while its slot has no other holder, and copied before that if it has.

    Args:
        core: the store's parts.
        transfers: makes room for pages.
        tables: the page table of each layer group.
        limit: most device slots that the sequence may take; None for all there are.

    Attributes:
        floor: tokens may be taken back down to this length; None for no promise.
        spill: what of the sequence is kept in host memory.
    """

    def __init__(
        self,
        core: Core,
        transfers: Transfers,
        tables: list[GroupTable],
        limit: int | None = None,
    ) -> None:
        self.tables = tables
        self.floor: int | None = None
        self.spill = Spill(core, transfers, tables, limit)
        self.transfers = transfers
        self._core = core
        self._boundary_tokens = core.boundary_tokens
        # Slots of dropped pages that copies may still touch.
        self._leaving: dict[Tier, list[int]] = {tier: [] for tier in _TIERS}

    def fork(self, length: int) -> Holding:
        """Return a holding of the pages of ``length`` tokens.  Call with the store's lock held.

        Pages obtained ahead are not shared: two sequences would write into them.
        """
        core = self._core
        tables = [table.fork(table.group.pages_for(length)) for table in self.tables]
        other = Holding(core, self.transfers, tables, self.spill.limit)
        other.floor, other._boundary_tokens = self.floor, self._boundary_tokens
        for tier in _TIERS:
            core.planner.share(tier, other.private_pages(tier))
            core.index.pin(np.asarray(other.shared_rows(tier), np.int32), tier)
        return other

    def obtain(self, start: int, count: int, *, ahead: bool, spill: bool = False) -> int:
        """Obtain the pages that ``count`` tokens from ``start`` need, to be written.

        Args:
            start: tokens held so far.
            count: tokens to come.
            ahead: only of groups that keep every page: what a window keeps depends on how
                the tokens will be split.
            spill: where the device is too small, let pages of the sequence leave it.

        Returns:
            0, or how many pages were wanted when there was no room for them.
        """
        missing = [
            (table, page)
            for table in self.tables
            if not (ahead and table.group.kind is GroupKind.SLIDING)
            for page in table.missing(start, count, self._boundary_tokens, self.floor)
        ]
        foreign = self._not_writable(start)
        wanted = missing + foreign
        if not wanted and not self.spill.slots_short():
            return 0
        if self._obtain(missing, foreign):
            return 0
        pages = [
            sum(map(table.holds, range(len(table.slots)))) + sum(t is table for t, _ in missing)
            for table in self.tables
        ]
        fits = spill and self.spill.fit(pages, fixed=len(foreign))
        if fits and self._obtain(missing, foreign):
            return 0
        return len(wanted) + self.spill.slots_short()

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

    @property
    def leaving(self) -> bool:
        """Whether slots of dropped pages are still held, since copies may touch them."""
        return any(self._leaving.values())

    def release(self) -> None:
        """Give everything back.  Call with the store's lock held."""
        core = self._core
        self.spill.release()
        for tier in _TIERS:
            slots, rows = self.private_pages(tier), self.shared_rows(tier)
            if tier is Tier.DEVICE:
                core.fences.put([*slots, *(core.slot(row, tier) for row in rows)])
            core.index.unpin(np.asarray(rows, np.int32), tier)
            core.planner.give_back(tier, slots)
        for table in self.tables:
            table.clear()

    def own_tails(self, length: int) -> dict[int, int | None]:
        """Return the groups whose partial page at ``length`` can be handed over as it is.

        Pages that others hold too are copied, if there is room.
        """
        shared = self._not_writable(length)
        if shared:
            self._obtain([], shared)
        foreign = {table.group.name for table, _ in self._not_writable(length)}
        return {
            number: None
            for number in self._partial_groups(length)
            if self.tables[number].group.name not in foreign
        }

    def copy_tails(self, length: int) -> dict[int, int | None]:
        """Copy the partial pages, which the sequence goes on writing; {} when no room is left.

        Returns:
            By group, the held slot with the copy, in the tier of the page.
        """
        core, groups = self._core, self._partial_groups(length)
        pages = [(self.tables[n], length // self.tables[n].group.page_tokens) for n in groups]
        slots = self._take(pages)
        if slots is None or not self._copy(pages, slots):
            with core.lock:
                core.counters.skipped_pages += len(groups)
            return {}
        return dict(zip(groups, slots, strict=True))

    def private_slots(self, tier: Tier) -> list[int]:
        """Return the slots that the sequence holds: of pages not committed, and of rings."""
        rings = self.spill.ring_slots() if tier is Tier.DEVICE else []
        return self.private_pages(tier) + rings + self._leaving[tier]

    def private_pages(self, tier: Tier) -> list[int]:
        """Return the slots of pages that are not committed."""
        return [slot for table in self.tables for slot in table.private_slots(tier)]

    def shared_rows(self, tier: Tier) -> list[int]:
        """Return the index rows of the committed pages held in a tier."""
        return [row for table in self.tables for row in table.shared_rows(tier)]

    def _obtain(
        self, missing: list[tuple[GroupTable, int]], foreign: list[tuple[GroupTable, int]]
    ) -> bool:
        """Give every missing page a slot, and every foreign one a copy; False when neither fits."""
        if not self.spill.grow_rings():
            return False
        slots = self._take([*missing, *foreign])
        if slots is None:
            return False
        if not self._copy_apart(foreign, slots[len(missing) :]):
            self._give_back(missing, slots)
            return False
        for (table, page), slot in zip(missing, slots, strict=False):
            table.set(page, slot)
        low = sum(table.tier(page) is Tier.HOST for table, page in missing)
        if low:
            with self._core.lock:
                self._core.counters.spilled_pages += low
        return True

    def _take(self, pages: list[tuple[GroupTable, int]]) -> list[int] | None:
        """Return a held slot for each page, in the page's tier; None when there is no room."""
        core, taken = self._core, dict[Tier, list[int]]()
        tiers = [table.tier(page) for table, page in pages]
        for tier in _TIERS:
            count = tiers.count(tier)
            limit = self.spill.limit
            if tier is Tier.DEVICE and limit is not None:
                allowed = count <= limit - self.spill.device_slots()
            else:
                allowed = True
            slots = (
                self.transfers.obtain(tier, count, deadline=core.deadline(), near=self._last(tier))
                if allowed
                else None
            )
            if slots is None:
                with core.lock:
                    for other, held in taken.items():
                        core.planner.give_back(other, held)
                return None
            taken[tier] = slots
        order = {tier: iter(slots) for tier, slots in taken.items()}
        return [next(order[tier]) for tier in tiers]

    def _last(self, tier: Tier) -> int | None:
        """Return a slot near which pages of the sequence lie best."""
        if tier is Tier.DEVICE:
            return next((t.slots[-1] for t in self.tables if len(t.slots) > t.spilled), None)
        return None

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
                        table.tier(page), table.slots[page]
                    )
                    if not own:
                        found.append((table, page))
        return found

    def _copy_apart(self, pages: list[tuple[GroupTable, int]], slots: list[int]) -> bool:
        """Replace pages by copies that belong to this sequence alone."""
        if not self._copy(pages, slots):
            return False
        for (table, page), slot in zip(pages, slots, strict=True):
            self._drop(table, [page])
            table.set(page, slot)
        return True

    def _copy(self, pages: list[tuple[GroupTable, int]], targets: list[int]) -> bool:
        """Copy pages into held slots of their tiers; give those back if that fails."""
        core = self._core
        on_device, in_host = list[CopyOp](), list[CopyOp]()
        for (table, page), target in zip(pages, targets, strict=True):
            tier = table.tier(page)
            memory = core.memory(tier)
            op = CopyOp(memory[target], memory[table.slots[page]])
            (on_device if tier is Tier.DEVICE else in_host).append(op)
        if self._copy_on_device(on_device) and self._copy_in_host(in_host):
            return True
        self._give_back(pages, targets)
        return False

    def _give_back(self, pages: list[tuple[GroupTable, int]], slots: list[int]) -> None:
        """Give back slots that were taken for pages, when no copy touches them any more."""
        core, over = self._core, self.spill.over()
        with core.lock:
            for (table, page), slot in zip(pages, slots, strict=False):
                tier = table.tier(page)
                if tier is Tier.DEVICE:
                    core.fences.put([slot])
                give_back = partial(core.planner.give_back, tier)
                self.transfers.park(_now if tier is Tier.DEVICE else over, [slot], give_back)

    def _copy_on_device(self, ops: list[CopyOp]) -> bool:
        """Copy between slots of the pool, behind what was computed."""
        try:
            if ops:
                self._core.device.compute.copy(ops)
        except DeviceError:
            return False
        return True

    def _copy_in_host(self, ops: list[CopyOp]) -> bool:
        """Copy between slots of host memory, behind the write-backs under way."""
        if not ops:
            return True
        save = self._core.device.stream("save")
        with self._core.lock:
            save.copy(ops)
            event = save.record()
        try:
            if event.wait(self._core.timeout_s):
                return True
            self.spill.await_late(event)
        except DeviceError:
            pass  # over, and a miss: whoever wanted the copies does without
        return False

    def _drop(self, table: GroupTable, pages: Iterable[int]) -> None:
        """Give pages of a table back."""
        core = self._core
        for tier in _TIERS:
            leaving = [page for page in pages if table.tier(page) is tier]
            if not leaving:
                continue
            with core.lock:
                rows = [table.rows[page] for page in leaving]
                slots = [table.drop(page) for page in leaving]
                if tier is Tier.DEVICE:
                    core.fences.put(slots)
                shared = np.asarray([row for row in rows if row >= 0], np.int32)
                own = [slot for slot, row in zip(slots, rows, strict=True) if row < 0]
                self._leaving[tier] += own
                release = partial(self._release_pages, tier, own, shared)
                self.transfers.when(self.spill.over() if tier is Tier.HOST else _now, release)

    def _release_pages(self, tier: Tier, slots: list[int], rows: Rows) -> None:
        for slot in slots:
            self._leaving[tier].remove(slot)
        self._core.index.unpin(rows, tier)
        self._core.planner.give_back(tier, slots)


def _now() -> bool:
    return True
