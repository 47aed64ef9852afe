"""The planner: which pages go where.  A state machine without I/O, threads or clock.

Every slot of the memory tiers is in exactly one state::

    free --take()--> held --install()--> resident --evict()--> free
                      |                                          ^
                      +---------------give_back()----------------+

``held`` slots belong to running sequences (private pages) or to a transfer in flight.
Forks of a sequence share slots until they write: such a slot has several holders.  When one
of them makes its page resident, the others hold on to it by pins (their slot is *adopted*).
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
    from tierkv.control_plane.journal import Journal
    from tierkv.identity.keys import TokenArray

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
        # Holders of each held slot; row and holders of each adopted one.
        self._held: dict[Tier, dict[int, int]] = {tier: {} for tier in MEMORY_TIERS}
        self._adopted: dict[Tier, dict[int, tuple[int, int]]] = {t: {} for t in MEMORY_TIERS}
        self._disk_booked = 0
        self.journal: Journal | None = None  # while somebody subscribes to events

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
        self._held[tier].update(dict.fromkeys(slots, 1))
        return slots

    def share(self, tier: Tier, slots: Iterable[int]) -> None:
        """Add a holder to slots that are held already."""
        held, adopted = self._held[tier], self._adopted[tier]
        for slot in slots:
            if slot in adopted:
                row, holders = adopted[slot]
                adopted[slot] = (row, holders + 1)
                self.index.pin(_rows([row]), tier)
            else:
                held[slot] += 1

    def holders(self, tier: Tier, slot: int) -> int:
        """Return how many hold a slot."""
        return self._held[tier].get(slot) or self._adopted[tier].get(slot, (0, 0))[1]

    def exclusive(self, tier: Tier, slot: int) -> bool:
        """Return whether a slot has one holder and may be written by it."""
        return self._held[tier].get(slot) == 1

    def give_back(self, tier: Tier, slots: Iterable[int]) -> None:
        """Take a holder off slots; those without holders become free."""
        held, free = self._held[tier], []
        for slot in slots:
            if slot in self._adopted[tier]:
                self._disown(tier, slot)
                continue
            assert slot in held, f"{tier.label}: slot {slot} is not held"
            held[slot] -= 1
            if not held[slot]:
                del held[slot]
                free.append(slot)
        if free:
            self._slots[tier].free(free)

    def _disown(self, tier: Tier, slot: int) -> None:
        row, holders = self._adopted[tier].pop(slot)
        if holders > 1:
            self._adopted[tier][slot] = (row, holders - 1)
        self.index.unpin(_rows([row]), tier)

    def install(self, tier: Tier, rows: Sequence[int] | Rows, slots: Sequence[int]) -> None:
        """Make pages resident in held slots of a memory tier.

        The slot of a page that has become resident there meanwhile goes back to free.  Other
        holders of a slot keep the page there until they give the slot back.
        """
        array = _rows(rows)
        there = (self.index.residency(array) >> tier & 1).astype(bool)
        if there.any():
            self.give_back(tier, [s for s, known in zip(slots, there, strict=True) if known])
            array = array[~there]
            slots = [s for s, known in zip(slots, there, strict=True) if not known]
        self.index.set_resident(array, tier, np.asarray(slots, np.int32))
        if self.journal is not None:
            self.journal.stored(tier, array)
        for row, slot in zip(array.tolist(), slots, strict=True):
            others = self._held[tier].pop(slot) - 1
            if others:
                self._adopted[tier][slot] = (row, others)
                for _ in range(others):
                    self.index.pin(_rows([row]), tier)

    def evict(self, tier: Tier, rows: Sequence[int] | Rows) -> None:
        """Drop the copies of pages in a tier; a page without a copy left is forgotten."""
        array = _rows(rows)
        if not array.size:
            return
        if tier in self._slots:
            self._slots[tier].free(self.index.slot(array, tier))
        if self.journal is not None:
            self.journal.removed(tier, array)
        self.index.clear_resident(array, tier)

    def victims(self, tier: Tier, count: int) -> Victims:
        """Choose up to ``count`` pages to leave a tier, and pin them.

        Leaves first; where there are none left, pages that nobody uses themselves but that
        pages in use hang below.
        """
        rows = self.index.victims(tier, count)
        if count > 0 and not len(rows):
            rows = self._stranded(tier)[:count]
            self.index.pin(rows, tier)
        below = sum(1 << t for t in Tier if t > tier)
        clean = (self.index.residency(rows) & below) != 0
        return Victims(clean=rows[clean], dirty=rows[~clean])

    def _stranded(self, tier: Tier) -> Rows:
        """Return the pages of a tier that are not in use, the deepest first."""
        rows = self.index.select(within=(tier,))
        rows = rows[self.index.pins(rows, tier) == 0]
        deepest: Rows = rows[np.argsort(self.index.end_token(rows), kind="stable")[::-1]]
        return deepest

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
            if self.journal is not None:
                self.journal.removed(Tier.DISK, rows)
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
            rows = _rows(written)
            new = rows[(self.index.residency(rows) >> Tier.DISK & 1) == 0]
            self.index.set_resident(new, Tier.DISK)
            if self.journal is not None:
                self.journal.stored(Tier.DISK, new)

    def note_tokens(self, rows: Sequence[int], tokens: TokenArray) -> None:
        """Tell subscribers' journal the ids of the sequence that committed these pages."""
        if self.journal is not None:
            self.journal.note_tokens(rows, tokens)

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
            for slot, (row, holders) in self._adopted[tier].items():
                assert holders > 0, f"{tier.label}: slot {slot} is adopted by nobody"
                assert int(self.index.slot([row], tier)[0]) == slot, (
                    f"{tier.label}: slot {slot} is adopted but holds another page"
                )
        assert self.free(Tier.DISK) >= 0, f"disk: more than its {self.disk_pages} pages are in use"


def _rows(rows: Sequence[int] | Rows) -> Rows:
    return np.asarray(rows, np.int32)
