"""The planner: which pages go where.  A state machine without I/O, threads or clock.

Every slot of the memory tiers is in exactly one state::

    free --take()--> held --install()--> resident --evict()--> free
                      |                                          ^
                      +---------------give_back()----------------+

``held`` slots belong to a running sequence (private pages) or to a transfer in flight.
``check`` proves free + held + resident = capacity.  The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane.slots import SlotAllocator
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.index import PrefixIndex

Rows = NDArray[np.int32]
MEMORY_TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True, slots=True)
class Victims:
    """Pages chosen to leave a tier; pinned until they are settled.

    Attributes:
        clean: a lower tier holds them already, so that dropping this copy loses nothing.
        dirty: this tier holds the only copy, which must be written down first.
    """

    clean: Rows
    dirty: Rows


class Planner:
    """Residency of pages and ownership of slots.

    Args:
        index: the prefix index, whose residency this class alone changes.
        slots: capacity in pages of each memory tier.
        disk_pages: capacity in pages of the disk tier, 0 when there is none.
    """

    def __init__(self, index: PrefixIndex, *, slots: dict[Tier, int], disk_pages: int) -> None:
        self.index = index
        self.disk_pages = disk_pages
        self._slots = {tier: SlotAllocator(slots[tier]) for tier in MEMORY_TIERS}
        self._held: dict[Tier, set[int]] = {tier: set() for tier in MEMORY_TIERS}
        self._disk_booked = 0

    def capacity(self, tier: Tier) -> int:
        """Return the pages that fit into a tier."""
        return self._slots[tier].capacity if tier in self._slots else self.disk_pages

    def free(self, tier: Tier) -> int:
        """Return how many pages more fit into a tier."""
        if tier in self._slots:
            return self._slots[tier].free_count
        return self.disk_pages - self._disk_booked - self.index.resident_count(tier)

    def held(self, tier: Tier) -> int:
        """Return how many slots sequences and transfers hold."""
        return len(self._held[tier])

    def take(self, tier: Tier, count: int, *, near: int | None = None) -> list[int] | None:
        """Move free slots to ``held``; None when fewer than ``count`` are free."""
        taken = self._slots[tier].alloc(count, near=near)
        if taken is None:
            return None
        slots: list[int] = taken.tolist()
        self._held[tier].update(slots)
        return slots

    def give_back(self, tier: Tier, slots: Iterable[int]) -> None:
        """Move held slots to free."""
        returned = list(slots)
        if returned:
            assert self._held[tier].issuperset(returned), f"{tier.label}: slots not held"
            self._held[tier].difference_update(returned)
            self._slots[tier].free(returned)

    def install(self, tier: Tier, rows: Sequence[int] | Rows, slots: Sequence[int]) -> None:
        """Make pages resident in held slots of a memory tier.

        The slot of a page that has become resident there meanwhile goes back to free.
        """
        array = _rows(rows)
        there = (self.index.residency(array) >> tier & 1).astype(bool)
        if there.any():
            self.give_back(tier, [s for s, known in zip(slots, there, strict=True) if known])
            array = array[~there]
            slots = [s for s, known in zip(slots, there, strict=True) if not known]
        assert self._held[tier].issuperset(slots), f"{tier.label}: slots not held"
        self._held[tier].difference_update(slots)
        self.index.set_resident(array, tier, np.asarray(slots, np.int32))

    def holds(self, tier: Tier, slots: Iterable[int]) -> bool:
        """Return whether all these slots are held."""
        return self._held[tier].issuperset(slots)

    def evict(self, tier: Tier, rows: Sequence[int] | Rows) -> None:
        """Drop the copies of pages in a tier; a page without a copy left is forgotten."""
        array = _rows(rows)
        if not array.size:
            return
        if tier in self._slots:
            self._slots[tier].free(self.index.slot(array, tier))
        self.index.clear_resident(array, tier)

    def victims(self, tier: Tier, count: int) -> Victims:
        """Choose up to ``count`` pages to leave a tier, and pin them."""
        rows = self.index.victims(tier, count)
        below = sum(1 << t for t in Tier if t > tier)
        clean = (self.index.residency(rows) & below) != 0
        return Victims(clean=rows[clean], dirty=rows[~clean])

    def drop(self, rows: Sequence[int] | Rows) -> list[bytes]:
        """Forget pages that nobody uses, in all tiers; return the keys to delete from disk."""
        on_disk: list[bytes] = []
        for row in rows:
            if any(self.index.pins([row], tier)[0] for tier in Tier):
                continue
            residency = int(self.index.residency(_rows([row]))[0])
            if residency >> Tier.DISK & 1:
                on_disk.append(self.index.key(row))
            for tier in Tier:
                if residency >> tier & 1:
                    self.evict(tier, [row])
        return on_disk

    def book_disk(self, count: int) -> tuple[int, list[bytes]]:
        """Book room for up to ``count`` writes to disk, evicting from it as needed.

        Returns:
            How many writes fit, and the keys of the pages evicted.
        """
        evicted: list[bytes] = []
        short = count - self.free(Tier.DISK)
        if short > 0:
            rows = self.index.victims(Tier.DISK, short)
            evicted = [self.index.key(row) for row in rows.tolist()]
            self.index.clear_resident(rows, Tier.DISK)
            self.index.unpin(rows, Tier.DISK)
        granted = max(0, min(count, self.free(Tier.DISK)))
        self._disk_booked += granted
        return granted, evicted

    def settle_disk(self, written: Sequence[int] | Rows, booked: int) -> None:
        """End ``booked`` bookings: the pages ``written`` are resident on disk now."""
        assert len(written) <= booked <= self._disk_booked
        self._disk_booked -= booked
        if len(written):
            self.index.set_resident(_rows(written), Tier.DISK)

    def check(self) -> None:
        """Prove free + held + resident = capacity in each memory tier.

        Raises:
            AssertionError: an invariant is broken.
        """
        self.index.check()
        for tier, slots in self._slots.items():
            slots.check()
            resident = self.index.resident_count(tier)
            total = slots.free_count + len(self._held[tier]) + resident
            assert total == slots.capacity, (
                f"{tier.label}: free {slots.free_count} + held {len(self._held[tier])} + "
                f"resident {resident} = {total}, but the capacity is {slots.capacity}"
            )
        assert self.free(Tier.DISK) >= 0, f"disk: more than its {self.disk_pages} pages are in use"


def _rows(rows: Sequence[int] | Rows) -> Rows:
    return np.asarray(rows, np.int32)
