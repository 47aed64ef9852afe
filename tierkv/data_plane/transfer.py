"""The data plane between tiers: makes room, demotes, writes down.  Decides nothing.

A page in flight is pinned by whoever moves it.  Every move ends in exactly one way
(done or failed) and gives back what it held in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierkv.data_plane.reads import Reads
from tierkv.data_plane.writing import PageWriter
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Rows, Victims
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Event
    from tierkv.storage.tickets import WriteTicket

# Victims are moved in batches: one fdatasync covers a group, one copy call a run of pages.
_BATCH_PAGES = 16
_POLL_S = 0.005  # between looks at late operations, when a store closes


class Transfers:
    """Moves pages between the tiers of a store.  Thread-safe; call without the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._save = core.device.stream("save")
        self.writer = PageWriter(core)
        self._staging = list(core.staging_slots)
        # Pages on their way down, by the tier whose slots will come free.
        self._moving = {Tier.DEVICE: 0, Tier.HOST: 0}
        self._limbo: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self.reads = Reads(core, self.when)

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
                self._moving[tier] += chosen
                coming = bool(chosen) or self._wait_for_moves(tier, deadline)
            if chosen:
                self._evict(tier, victims, deadline)
            elif not coming and (tier is Tier.DEVICE or not self.reads.wait_for_room(deadline)):
                return None
            # A last look after the deadline: what could not be moved down was dropped.
            late = core.clock() > deadline

    def obtain_now(self, tier: Tier, count: int) -> list[int]:
        """Return up to ``count`` held slots of a memory tier, without waiting.

        Pages that a lower tier holds make room, but no others.  Call with the lock held.
        """
        self._reap()
        planner = self._core.planner
        short = count - planner.free(tier)
        if short > 0:
            victims = planner.victims(tier, short)
            self._core.index.unpin(victims.dirty, tier)
            self._moving[tier] += len(victims.clean)
            self._release(tier, victims.clean)
        return planner.take(tier, min(count, planner.free(tier))) or []

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
            slots = core.index.slot(rows, Tier.HOST).tolist()
        return self.writer.start(
            rows, slots, lambda ended: self._release(Tier.HOST, ended, evict=then_evict)
        )

    def spill(self, rows: Rows, *, then_evict: bool, deadline: float) -> WriteTicket | None:
        """Write pinned device pages to disk by way of staging memory.

        For when pages in use fill the host tier.  The pins end as in ``write_down``.
        """
        core = self._core
        ticket: WriteTicket | None = None
        for start in range(0, len(rows), len(core.staging_slots)):
            batch = rows[start : start + len(core.staging_slots)]
            slots = self._take_staging(len(batch), deadline) if core.disk is not None else None
            if slots is None or not self._copy_pages_down(
                batch, slots, deadline, self._give_staging
            ):
                with core.lock:
                    self._release(Tier.DEVICE, batch, evict=then_evict)
                continue
            slot_of = dict(zip(batch.tolist(), slots, strict=True))
            ticket = self.writer.start(batch, slots, partial(self._spilled, slot_of, then_evict))
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
            self.begin_moves(Tier.HOST, len(victims.dirty))
        if len(victims.dirty):
            self.write_down(victims.dirty, then_evict=False)

    def copy_to_host(self, rows: Rows, deadline: float) -> Rows:
        """Copy pinned device pages to host memory, keeping the device copies.

        Returns the rows that are host-resident afterwards, pinned there once for the caller;
        the others found no room.
        """
        core = self._core
        slots = self.obtain(Tier.HOST, len(rows), deadline=deadline)
        if slots is None:
            with core.lock:
                fits = min(core.planner.free(Tier.HOST), len(rows))
                slots = core.planner.take(Tier.HOST, fits) or []
        moved = rows[: len(slots)]
        give_back = partial(core.planner.give_back, Tier.HOST)
        if not self._copy_pages_down(moved, slots, deadline, give_back):
            return moved[:0]
        with core.lock:
            core.planner.install(Tier.HOST, moved, slots)
            core.index.pin(moved, Tier.HOST)
            core.count_bytes(moved, Tier.DEVICE, Tier.HOST)
        return moved

    def let_go(self, rows: Rows) -> None:
        """Drop device copies that nobody uses of pages that host memory holds.

        Their descendants may be in use, and then eviction, which takes leaves first, would
        not come to them.  Call with the lock held.
        """
        index = self._core.index
        unused = rows[
            (index.residency(rows) >> Tier.DEVICE & 1 == 1) & (index.pins(rows, Tier.DEVICE) == 0)
        ]
        self._core.planner.evict(Tier.DEVICE, unused)

    def settle(self, deadline: float) -> None:
        """Wait for the operations that missed their deadline, so that nothing is under way."""
        core = self._core
        with core.lock:
            self._reap()
            while self._limbo and core.clock() < deadline:
                core.settled.wait(_POLL_S)
                self._reap()

    def obtainable(self, tier: Tier) -> int:
        """Return how many slots ``obtain`` could free at most.  Call with the lock held.

        Pages on their way down are pinned, but will make room.
        """
        planner = self._core.planner
        pinned = self._core.index.pinned_count(tier) - self._moving[tier]
        return planner.capacity(tier) - planner.held(tier) - max(0, pinned)

    def begin_moves(self, tier: Tier, count: int) -> None:
        """Count pages pinned for ``write_down`` or ``spill``.  Call with the lock held."""
        self._moving[tier] += count

    def forget_removed(self) -> None:
        """Take in which pages the disk tier dropped by itself (damaged, or its room reused)."""
        core = self._core
        if core.disk is None:
            return
        keys = list(dict.fromkeys(core.disk.take_removed()))
        if keys:
            with core.lock:
                # A page may have been computed and written anew since.
                here = core.disk.contains(keys)
                gone = [key for key, there in zip(keys, here, strict=True) if not there]
                rows = [row for row in core.find_rows(gone) if core.is_in(row, Tier.DISK)]
                core.planner.evict(Tier.DISK, rows)

    def check(self) -> None:
        """Raise AssertionError when a move was lost."""
        with self._core.lock:
            assert min(self._moving.values()) >= 0, f"{self._moving} pages moving"
            self.reads.check()
            free = len(set(self._staging))
            assert free == len(self._staging) <= len(self._core.staging_slots), "staging slots"

    def when(self, over: Callable[[], bool], act: Callable[[], None]) -> None:
        """Do something once ``over()``: now, or before room is next looked for.

        Call with the lock held; ``act`` runs with it held as well.
        """
        if over():
            act()
        else:
            self._limbo.append((over, act))

    def take_in(self) -> None:
        """Do now what waits for operations that are over by now.  Call with the lock held."""
        self._reap()

    def park(
        self, over: Callable[[], bool], slots: list[int], give_back: Callable[[list[int]], None]
    ) -> None:
        """Keep slots out of use until ``over()``, then give them back.  Call with the lock held."""
        self.when(over, partial(give_back, slots))

    def copy_slots_down(
        self, sources: list[int], slots: list[int], deadline: float
    ) -> tuple[bool, Event | None]:
        """Copy device slots into held slots of host memory; give those back if that failed.

        Returns:
            Whether it is done, and an event after which nothing reads ``sources`` any more;
            None when nothing does.
        """
        give_back = partial(self._core.planner.give_back, Tier.HOST)
        return self._copy_down(sources, slots, deadline, give_back)

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
                self._release(tier, moved)
                core.index.unpin(moved, Tier.HOST)
            ticket = self.spill(rows[len(moved) :], then_evict=True, deadline=deadline)
            if ticket is not None:
                ticket.wait(max(0.0, deadline - core.clock()))

    def _release(self, tier: Tier, rows: Rows, *, evict: bool = True) -> None:
        """End a move: unpin, giving the copies up unless somebody else uses them by now."""
        core = self._core
        if evict:
            leaving = [row for row in rows.tolist() if core.index.pins([row], tier)[0] == 1]
            alone = 1 << tier
            held = core.index.residency(np.asarray(leaving, np.int32))
            core.counters.dropped_pages += int(np.count_nonzero(held == alone))
            core.planner.evict(tier, leaving)
        core.index.unpin(rows, tier)
        self._moving[tier] -= len(rows)
        core.settled.notify_all()

    def _spilled(self, slot_of: dict[int, int], then_evict: bool, rows: Rows) -> None:
        """End the move of pages that went through staging memory."""
        self._give_staging([slot_of[row] for row in rows.tolist()])
        self._release(Tier.DEVICE, rows, evict=then_evict)

    def _take_staging(self, count: int, deadline: float) -> list[int] | None:
        """Return free staging slots, waiting for them; None when time is up."""
        core = self._core
        with core.lock:
            while len(self._staging) < count:
                self._reap()
                remaining = deadline - core.clock()
                if remaining <= 0 or not core.settled.wait(remaining):
                    return None
            taken, self._staging = self._staging[:count], self._staging[count:]
            return taken

    def _give_staging(self, slots: list[int]) -> None:
        self._staging += slots

    def _copy_pages_down(
        self,
        rows: Rows,
        slots: list[int],
        deadline: float,
        give_back: Callable[[list[int]], None],
    ) -> bool:
        """Copy pinned device pages into slots of host memory; give those back if that failed."""
        core = self._core
        with core.lock:
            sources = core.index.slot(rows, Tier.DEVICE).tolist()
        done, event = self._copy_down(sources, slots, deadline, give_back)
        if event is not None:  # the pages must not leave the device while a late copy reads them
            with core.lock:
                core.index.pin(rows, Tier.DEVICE)
                self.when(event.done, partial(core.index.unpin, rows, Tier.DEVICE))
        return done

    def _copy_down(
        self,
        sources: list[int],
        slots: list[int],
        deadline: float,
        give_back: Callable[[list[int]], None],
    ) -> tuple[bool, Event | None]:
        core = self._core
        ops = [
            CopyOp(core.host_memory[target], core.pool.page(source))
            for target, source in zip(slots, sources, strict=True)
        ]
        with core.lock:  # an event tells of the failures since the one before: keep ours apart
            if core.clock() >= deadline:  # nothing is begun that nobody would wait for
                give_back(slots)
                return False, None
            core.fences.order(self._save, sources, core.timeout_s)
            self._save.copy(ops)
            event = self._save.record()
        try:
            if event.wait(max(0.0, deadline - core.clock())):
                return True, None
        except DeviceError:
            with core.lock:
                give_back(slots)
            return False, None
        with core.lock:
            core.counters.late_copies += len(slots)
            self.park(event.done, slots, give_back)
        return False, event

    def _wait_for_moves(self, tier: Tier, deadline: float) -> bool:
        """Wait until a page leaving ``tier`` is gone; False when none is leaving, or time is up.

        Only moves out of the same tier count: whoever makes room on the device while host
        memory is full of pages in use would otherwise wait for itself.
        """
        core = self._core
        remaining = deadline - core.clock()
        return self._moving[tier] > 0 and remaining > 0 and core.settled.wait(remaining)

    def _reap(self) -> None:
        """Give back the slots of operations that missed their deadline and are over now."""
        done = [entry for entry in self._limbo if entry[0]()]
        for entry in done:
            self._limbo.remove(entry)
            entry[1]()
