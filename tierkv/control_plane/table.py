"""The page table of a running sequence: which slots hold the tokens of a layer group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.identity.spec import GroupKind, LayerGroup
from tierkv.tiers import Tier

Pages = set[int]
NO_SLOT = -1
PRIVATE = -1


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of an extent: ``pages`` adjacent slots from ``slot``, for tokens from ``start``."""

    slot: int
    pages: int
    start: int


@dataclass(slots=True)
class GroupTable:
    """Page table of one layer group; page ``j`` covers tokens ``[j*p, (j+1)*p)``.

    Attributes:
        slots: slot of each page in the tier that :meth:`tier` says, ``NO_SLOT`` where none
            is held.
        rows: index row of a committed page, ``PRIVATE`` for the sequence's own pages.
        spilled: the first so many pages are kept in host memory, the others on the device.
    """

    group: LayerGroup
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    spilled: int = 0
    _runs: dict[tuple[int, int], list[Run]] = field(default_factory=dict)

    def missing(
        self, tokens: int, new: int, boundary_tokens: int, floor: int | None = None
    ) -> list[int]:
        """Return the pages to allocate before ``new`` tokens are appended to ``tokens``.

        A sliding group keeps the pages of the last window, and of the window before each
        boundary (a multiple of ``boundary_tokens``) on the way; with a ``floor``, of every
        length from there on, so that tokens can be taken back.
        """
        after = tokens + new
        wanted = self._windows(after, floor)
        if self.group.kind is GroupKind.SLIDING:
            for boundary in _boundaries(tokens, after, boundary_tokens):
                wanted.update(self.group.needed_pages(boundary))
            # Pages that ended before these tokens are held already, or are not needed.
            size = self.group.page_tokens
            return [p for p in sorted(wanted) if (p + 1) * size > tokens and not self.holds(p)]
        return [page for page in sorted(wanted) if not self.holds(page)]

    def outdated(
        self, tokens: int, committed: int, boundary_tokens: int, floor: int | None = None
    ) -> list[int]:
        """Return the pages that no window from ``floor`` to ``tokens``, nor a boundary, needs.

        Boundaries up to ``committed`` tokens have been saved and need nothing here.
        """
        if self.group.kind is not GroupKind.SLIDING:
            return []
        keep = self._windows(tokens, floor)
        for boundary in _boundaries(committed, tokens, boundary_tokens):
            keep.update(self.group.needed_pages(boundary))
        return [page for page in range(len(self.slots)) if self.holds(page) and page not in keep]

    def can_resume(self, tokens: int) -> bool:
        """Return whether every page that resuming at ``tokens`` needs is held."""
        return all(self.holds(page) for page in self.group.needed_pages(tokens))

    def fork(self, pages: int) -> GroupTable:
        """Return a table of the first ``pages`` pages."""
        return GroupTable(self.group, self.slots[:pages], self.rows[:pages], self.spilled)

    def tier(self, page: int) -> Tier:
        """Return the tier in which page ``page`` is, or would be, kept."""
        return Tier.HOST if page < self.spilled else Tier.DEVICE

    def holds(self, page: int) -> bool:
        """Return whether a slot holds page ``page``."""
        return page < len(self.slots) and self.slots[page] != NO_SLOT

    def is_private(self, page: int) -> bool:
        """Return whether page ``page`` is held and not committed."""
        return self.holds(page) and self.rows[page] == PRIVATE

    def set(self, page: int, slot: int, row: int = PRIVATE) -> None:
        """Record that ``slot`` holds page ``page``."""
        grow = page + 1 - len(self.slots)
        if grow > 0:
            self.slots.extend([NO_SLOT] * grow)
            self.rows.extend([PRIVATE] * grow)
        self.slots[page], self.rows[page] = slot, row
        self._runs.clear()

    def drop(self, page: int) -> int:
        """Forget page ``page``; return the slot that held it."""
        slot = self.slots[page]
        self.slots[page], self.rows[page] = NO_SLOT, PRIVATE
        self._runs.clear()
        return slot

    def clear(self) -> None:
        """Forget every page."""
        self.slots.clear()
        self.rows.clear()
        self._runs.clear()

    def runs(self, start: int, stop: int) -> list[Run]:
        """Return the device extents that hold the pages touching tokens ``[start, stop)``.

        Spilled pages are left out: they have no slot on the device.
        """
        size = self.group.page_tokens
        key = (max(start // size, self.spilled), -(-stop // size))
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = self._find_runs(*key)
        return found

    def private_slots(self, tier: Tier) -> Iterator[int]:
        """Yield the slots of pages in ``tier`` that are not committed."""
        for page in self._pages_in(tier):
            if self.slots[page] != NO_SLOT and self.rows[page] == PRIVATE:
                yield self.slots[page]

    def shared_rows(self, tier: Tier) -> Iterator[int]:
        """Yield the index rows of the committed pages held in ``tier``."""
        for page in self._pages_in(tier):
            if self.slots[page] != NO_SLOT and self.rows[page] != PRIVATE:
                yield self.rows[page]

    def _pages_in(self, tier: Tier) -> range:
        border = min(self.spilled, len(self.slots))
        return range(border) if tier is Tier.HOST else range(border, len(self.slots))

    def _windows(self, tokens: int, floor: int | None) -> Pages:
        """Return the pages that resuming at ``tokens``, or anywhere from ``floor`` on, needs."""
        wanted = set(self.group.needed_pages(tokens))
        if floor is not None and floor < tokens:
            wanted.update(range(self.group.needed_pages(floor).start, self.group.pages_for(tokens)))
        return wanted

    def _find_runs(self, first: int, last: int) -> list[Run]:
        runs: list[Run] = []
        for page in range(first, last):
            slot = self.slots[page]
            assert slot != NO_SLOT, f"page {page} of group {self.group.name!r} is not held"
            if runs and runs[-1].slot + runs[-1].pages == slot:
                runs[-1] = Run(runs[-1].slot, runs[-1].pages + 1, runs[-1].start)
            else:
                runs.append(Run(slot, 1, page * self.group.page_tokens))
        return runs


def _boundaries(after: int, until: int, step: int) -> range:
    """Return the multiples of ``step`` in ``(after, until]``."""
    return range((after // step + 1) * step, until + 1, step)
