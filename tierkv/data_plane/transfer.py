"""The data plane between tiers: makes room, demotes, writes down.  Decides nothing.

A page in flight is pinned by whoever moves it.  Every move ends in exactly one way
(done or failed) and gives back what it held in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tierkv.devices.base import CopyOp, DeviceError
from tierkv.storage.types import PageWrite, WriteStatus
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Rows, Victims
    from tierkv.data_plane.core import Core
    from tierkv.storage.tickets import WriteTicket

_WRITTEN = (WriteStatus.WRITTEN, WriteStatus.DUPLICATE)
# Victims are moved in batches: one fdatasync covers a group, one copy call a run of pages.
_BATCH_PAGES = 16


class Transfers:
    """Moves pages between the tiers of a store.  Thread-safe; call without the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._save = core.device.stream("save")
        self.writing: set[int] = set()  # rows on their way to disk
        # Pages on their way down, by the tier whose slots will come free.
        self._moving = {Tier.DEVICE: 0, Tier.HOST: 0}
        self._limbo: list[tuple[Callable[[], bool], Tier, list[int]]] = []

    def obtain(
        self, tier: Tier, count: int, *, deadline: float, near: int | None = None
    ) -> list[int] | None:
        """Return ``count`` held slots of a memory tier, evicting as needed.

        None when sequences and pins leave too few, or the deadline passes; nothing is
        taken then.
        """
        core, planner, late = self._core, self._core.planner, False
        while True:
            with core.lock:
                self._reap()
                slots = planner.take(tier, count, near=near)
                if slots is not None or late:
                    return slots
                short = count - planner.free(tier)
                batch = min(_BATCH_PAGES, planner.capacity(tier) // 8)
                victims = planner.victims(tier, max(short, batch))
                chosen = len(victims.clean) + len(victims.dirty)
                if not chosen and not self._wait_for_moves(tier, deadline):
                    return None
                self._moving[tier] += chosen
            if chosen:
                self._evict(tier, victims, deadline)
            # A last look after the deadline: what could not be moved down was dropped.
            late = core.clock() > deadline

    def write_down(self, rows: Rows, *, then_evict: bool) -> WriteTicket | None:
        """Start writing host-resident, pinned pages to disk; the pins end with the write.

        Args:
            rows: pages resident in host memory, each pinned once for this call and
                counted as moving.
            then_evict: give the host copy up when the write has ended, for good or bad.

        Returns:
            A ticket to wait on, or None when the write could not even begin.
        """
        core = self._core
        with core.lock:
            if core.disk is None:
                self._release(Tier.HOST, rows)
                return None
            booked, evicted = core.planner.book_disk(len(rows))
            pages = [self._page_write(row) for row in rows[:booked].tolist()]
            self.writing.update(rows[:booked].tolist())
        if booked < len(rows):
            refused = rows[booked:]
            self._written(refused, [WriteStatus.NO_SPACE] * len(refused), 0, then_evict)
        if evicted:
            core.disk.delete(evicted)
        if not pages:
            return None
        started = rows[:booked]
        ticket = core.disk.put(pages)
        ticket.add_done_callback(
            lambda statuses: self._written(started, statuses, booked, then_evict)
        )
        return ticket

    def write_behind(self, headroom: float = 0.25) -> None:
        """Start writing the host pages that will be evicted next, so that room is cheap."""
        core = self._core
        if core.disk is None:
            return
        with core.lock:
            planner = core.planner
            wanted = int(planner.capacity(Tier.HOST) * headroom) - planner.free(Tier.HOST)
            if wanted <= 0:
                return
            victims = planner.victims(Tier.HOST, wanted)
            core.index.unpin(victims.clean, Tier.HOST)
            self._moving[Tier.HOST] += len(victims.dirty)
        if len(victims.dirty):
            self.write_down(victims.dirty, then_evict=False)

    def copy_to_host(self, rows: Rows, deadline: float) -> Rows:
        """Copy pinned device pages to host memory, keeping the device copies.

        Returns the rows that are host-resident afterwards; the others found no room.
        """
        core = self._core
        slots = self.obtain(Tier.HOST, len(rows), deadline=deadline)
        if slots is None:
            with core.lock:
                fits = min(core.planner.free(Tier.HOST), len(rows))
                slots = core.planner.take(Tier.HOST, fits) or []
        moved = rows[: len(slots)]
        with core.lock:
            sources = [core.slot(row, Tier.DEVICE) for row in moved.tolist()]
        self._save.copy(
            [
                CopyOp(core.host_memory[target], core.pool.page(source))
                for target, source in zip(slots, sources, strict=True)
            ]
        )
        if not self._finish_copy(Tier.HOST, slots, deadline):
            return moved[:0]
        with core.lock:
            core.planner.install(Tier.HOST, moved, slots)
            core.count_bytes(moved, Tier.DEVICE, Tier.HOST)
        return moved

    def begin_moves(self, count: int) -> None:
        """Count pages that a caller of ``write_down`` has pinned.  Call with the lock held."""
        self._moving[Tier.HOST] += count

    def forget_removed(self) -> None:
        """Take in which pages the disk tier dropped by itself (damaged, or its room reused)."""
        core = self._core
        if core.disk is None:
            return
        keys = core.disk.take_removed()
        if keys:
            with core.lock:
                core.planner.evict(
                    Tier.DISK, [r for r in core.find_rows(keys) if core.is_in(r, Tier.DISK)]
                )

    def check(self) -> None:
        """Raise AssertionError when a move was lost."""
        with self._core.lock:
            assert min(self._moving.values()) >= 0, f"{self._moving} pages moving"

    def limbo_slots(self, tier: Tier) -> int:
        """Return how many slots wait for a copy that missed its deadline."""
        return sum(len(slots) for _, t, slots in self._limbo if t is tier)

    def park(self, over: Callable[[], bool], tier: Tier, slots: list[int]) -> None:
        """Keep held slots out of use until ``over()`` is true.  Call with the lock held."""
        self._limbo.append((over, tier, slots))

    def _evict(self, tier: Tier, victims: Victims, deadline: float) -> None:
        core = self._core
        with core.lock:
            self._release(tier, victims.clean)
        if tier is Tier.HOST:
            ticket = self.write_down(victims.dirty, then_evict=True) if len(victims.dirty) else None
            if ticket is not None:
                ticket.wait(max(0.0, deadline - core.clock()))
            return
        step = max(1, core.planner.capacity(Tier.HOST) // 4)
        for start in range(0, len(victims.dirty), step):
            rows = victims.dirty[start : start + step]
            moved = self.copy_to_host(rows, deadline)
            with core.lock:
                core.counters.demoted_to_host += len(moved)
                self._release(tier, rows)

    def _release(self, tier: Tier, rows: Rows) -> None:
        """End a move: give the copies up unless somebody else uses them by now."""
        core = self._core
        leaving = [row for row in rows.tolist() if core.index.pins([row], tier)[0] == 1]
        alone = 1 << tier
        lost = sum(int(r) == alone for r in core.index.residency(np.asarray(leaving, np.int32)))
        core.counters.dropped_pages += lost
        core.planner.evict(tier, leaving)
        core.index.unpin(rows, tier)
        self._moving[tier] -= len(rows)
        core.settled.notify_all()

    def _written(
        self, rows: Rows, statuses: Sequence[WriteStatus], booked: int, then_evict: bool
    ) -> None:
        """Take a write's outcome in; runs on the disk tier's writer thread."""
        core = self._core
        with core.lock:
            good = [row for row, s in zip(rows.tolist(), statuses, strict=True) if s in _WRITTEN]
            self.writing.difference_update(rows.tolist())
            if booked:
                core.planner.settle_disk(good, booked)
            core.count_bytes(good, Tier.HOST, Tier.DISK)
            core.counters.demoted_to_disk += len(good)
            core.counters.write_failures += len(rows) - len(good)
            if then_evict:
                self._release(Tier.HOST, rows)
            else:
                core.index.unpin(rows, Tier.HOST)
                self._moving[Tier.HOST] -= len(rows)
                core.settled.notify_all()

    def _page_write(self, row: int) -> PageWrite:
        core = self._core
        group = core.spec.groups[core.group_of(row)]
        payload = core.arena.slot(core.slot(row, Tier.HOST))[: group.page_bytes]
        return PageWrite(info=core.page_info(row), payload=payload, layer_bytes=group.layer_bytes)

    def _finish_copy(self, tier: Tier, slots: list[int], deadline: float) -> bool:
        """Wait for the copies into held slots; give the slots back if they failed."""
        core = self._core
        event = self._save.record()
        try:
            if event.wait(max(0.0, deadline - core.clock())):
                return True
        except DeviceError:
            with core.lock:
                core.planner.give_back(tier, slots)
            return False
        with core.lock:
            core.counters.late_copies += len(slots)
            self.park(event.done, tier, slots)
        return False

    def _wait_for_moves(self, tier: Tier, deadline: float) -> bool:
        """Wait until a page leaving ``tier`` is gone; False when none is leaving, or time is up.

        Only moves out of the same tier count: whoever makes room on the device while host
        memory is full of pages in use would otherwise wait for itself.
        """
        core = self._core
        remaining = deadline - core.clock()
        return self._moving[tier] > 0 and remaining > 0 and core.settled.wait(remaining)

    def _reap(self) -> None:
        """Give back the slots of copies that missed their deadline and are over now."""
        done = [entry for entry in self._limbo if entry[0]()]
        for entry in done:
            self._limbo.remove(entry)
            self._core.planner.give_back(entry[1], entry[2])
