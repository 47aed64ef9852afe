"""The spilled pages of one running sequence: moved to host memory, and the rings they need.

A page spills once: from then on its bytes live in a slot of host memory that the sequence
holds (or, once committed, in the page's pinned host copy), and its device slot is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.spilling import can_spill, plan_spill
from tierkv.control_plane.table import PRIVATE
from tierkv.data_plane.ring import LayerRing
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.devices.base import Event


class Spill:
    """Decides with the planner's rule, and carries out, what of a sequence leaves the device.

    One thread at a time.

    Attributes:
        rings: by layer group, the device buffers of its spilled pages.
        limit: most device slots that the sequence may take; None for all there are.
    """

    def __init__(
        self, core: Core, transfers: Transfers, tables: Sequence[GroupTable], limit: int | None
    ) -> None:
        self.rings: dict[int, LayerRing] = {}
        self.limit = limit
        self._core = core
        self._transfers = transfers
        self._tables = tables
        self._late: list[Event] = []

    def fit(self, pages: Sequence[int], fixed: int) -> bool:
        """Spill until ``pages`` pages of each group and ``fixed`` more slots have room.

        Returns:
            Whether it is worth trying again.
        """
        if not any(can_spill(table.group) for table in self._tables):
            return False
        core, own = self._core, self.device_slots()
        before = [table.spilled for table in self._tables]
        with core.lock:
            in_pool = own + self._transfers.obtainable(Tier.DEVICE)
            host = sum(before) + self._transfers.obtainable(Tier.HOST)
        groups, lost = [table.group for table in self._tables], 0
        while True:
            device = min(in_pool - lost, self.limit if self.limit is not None else in_pool)
            targets = plan_spill(
                groups, pages, fixed=fixed, device=device, host=host, spilled=before
            )
            if targets is None:
                return False
            shared = self._shared_with_others(targets)
            if shared <= lost:
                return self.to(targets)
            lost = shared

    def to(self, targets: Sequence[int]) -> bool:
        """Move the first ``targets`` pages of each group to host memory.

        False when host memory or the rings could not be had; what moved stays moved.
        """
        moved = all(map(self._lower_to, self._tables, targets))
        return self.grow_rings() and moved  # what has moved needs its ring in any case

    def grow_rings(self) -> bool:
        """Give every ring the slots that its spilled pages need; False when there are none."""
        for number, table in enumerate(self._tables):
            if table.spilled and number not in self.rings:
                self.rings[number] = LayerRing(self._core, table)
        for ring in self.rings.values():
            short = ring.slots_short()
            slots = self._transfers.obtain(Tier.DEVICE, short, deadline=self._core.deadline())
            if slots is None:
                return False
            ring.slots += slots
            with self._core.lock:
                self._core.fences.order(
                    self._core.device.stream("load"), slots, self._core.timeout_s
                )
        return True

    def over(self) -> Callable[[], bool]:
        """Return whether every copy between host memory and the rings, so far, is over."""
        events = self.events()
        return lambda: all(event.done() for event in events)

    def events(self) -> list[Event]:
        """Return events after all copies of the sequence's pages that are under way."""
        return [*self._late, *(e for ring in self.rings.values() for e in ring.events())]

    def await_late(self, event: Event) -> None:
        """Count a copy that missed its deadline among those under way."""
        self._late.append(event)

    @property
    def streams(self) -> bool:
        """Whether pages of the sequence are kept in host memory."""
        return any(table.spilled for table in self._tables)

    def slots_short(self) -> int:
        """Return how many slots the rings lack."""
        return sum(ring.slots_short() for ring in self.rings.values())

    def device_slots(self) -> int:
        """Return how many device slots the sequence takes now, rings included."""
        held = sum(
            1
            for table in self._tables
            for page in range(table.spilled, len(table.slots))
            if table.holds(page)
        )
        return held + len(self.ring_slots())

    def ring_slots(self) -> list[int]:
        """Return the device slots of the rings."""
        return [slot for ring in self.rings.values() for slot in ring.slots]

    def release(self) -> None:
        """Give the rings' slots back.  Call with the store's lock held, when nothing runs."""
        self._core.planner.give_back(Tier.DEVICE, self.ring_slots())
        for ring in self.rings.values():
            ring.slots.clear()
        self.rings.clear()

    def _shared_with_others(self, targets: Sequence[int]) -> int:
        """Return how many of the pages to spill would free no slot, since others use them."""
        core, count = self._core, 0
        with core.lock:
            for table, target in zip(self._tables, targets, strict=True):
                for page in range(table.spilled, min(target, len(table.slots))):
                    if not table.holds(page):
                        continue
                    if table.is_private(page):
                        count += not core.planner.exclusive(Tier.DEVICE, table.slots[page])
                    else:
                        count += int(core.index.pins([table.rows[page]], Tier.DEVICE)[0]) > 1
        return count

    def _lower_to(self, table: GroupTable, target: int) -> bool:
        """Move the first ``target`` pages of a group; False at one that cannot be moved."""
        for page in range(table.spilled, target):
            if table.holds(page) and not self._move(table, page):
                return False
            table.spilled = page + 1
        return True

    def _move(self, table: GroupTable, page: int) -> bool:
        """Move one page, behind those that have spilled, from the device to host memory."""
        row = table.rows[page]
        moved = self._move_private(table, page) if row == PRIVATE else self._lower(table, page, row)
        if moved:
            with self._core.lock:
                self._core.counters.spilled_pages += 1
        return moved

    def _move_private(self, table: GroupTable, page: int) -> bool:
        core, source = self._core, table.slots[page]
        slots = self._transfers.obtain(Tier.HOST, 1, deadline=core.deadline())
        if slots is None:
            return False
        with core.lock:
            core.fences.put([source])
        done, event = self._transfers.copy_slots_down([source], slots, core.deadline())
        if event is not None:
            self._late.append(event)
        if not done:
            return False
        with core.lock:
            core.planner.give_back(Tier.DEVICE, [source])
            table.set(page, slots[0], PRIVATE)
            table.spilled = page + 1
        return True

    def _lower(self, table: GroupTable, page: int, row: int) -> bool:
        """Hold a committed page by its host copy instead of its device copy."""
        core, rows = self._core, np.asarray([row], np.int32)
        with core.lock:
            core.fences.put([table.slots[page]])
            there = core.is_in(row, Tier.HOST)
            if there:
                core.index.pin(rows, Tier.HOST)
        if not there and not len(self._transfers.copy_to_host(rows, core.deadline())):
            return False
        with core.lock:
            core.index.unpin(rows, Tier.DEVICE)
            self._transfers.let_go(rows)
            table.set(page, core.slot(row, Tier.HOST), row)
            table.spilled = page + 1
            core.settled.notify_all()
        return True
