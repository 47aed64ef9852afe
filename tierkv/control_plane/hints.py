"""What the application knows: ended sessions, times to live, pins with owners.

Time arrives with each call; nothing here reads a clock.  Call with the store's lock held.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.policies import EvictionClass
from tierkv.errors import InvalidInputError, PinError
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Planner, Rows

_PIN_QUOTA = 0.5  # of a memory tier's pages; the rest must stay evictable


@dataclass(frozen=True, slots=True)
class Pin:
    """Pages that an owner wants to stay where they are, until a time or for ever."""

    owner: str
    copies: tuple[tuple[int, Tier], ...]
    expires_at: float | None


class Hints:
    """Classes and pins that applications asked for."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._pins: list[Pin] = []
        self._expiring: list[tuple[float, int, dict[bytes, int]]] = []
        self._count = 0

    def end_session(self, leaf: int, windows: Rows) -> int:
        """Make the pages that only one sequence needs the first to go; return how many.

        Args:
            leaf: the sequence's last page in the prefix tree.
            windows: the pages of other groups that resuming at its end needs.
        """
        index = self._planner.index
        chosen = np.union1d(index.unshared_path(leaf), windows).astype(np.int32)
        index.set_class(chosen, EvictionClass.DEAD)
        return len(chosen)

    def keep_for(self, rows: Rows, ttl_s: float, now: float) -> None:
        """Evict pages after all others for ``ttl_s`` seconds, and before all others then.

        Raises:
            InvalidInputError: a time to live that is not positive.
        """
        if not ttl_s > 0:
            raise InvalidInputError(f"hint: ttl_s must be positive, got {ttl_s}")
        index = self._planner.index
        index.set_class(rows, EvictionClass.PROTECTED)
        hits = index.hits(rows).tolist()
        uses = {index.key(row): n for row, n in zip(rows.tolist(), hits, strict=True)}
        self._count += 1
        heapq.heappush(self._expiring, (now + ttl_s, self._count, uses))

    def pin(self, rows: Rows, owner: str, ttl_s: float | None, now: float) -> int:
        """Pin the copies of pages in the tiers that hold them now; return how many pages.

        Raises:
            InvalidInputError: an empty owner or a time to live that is not positive.
            PinError: the pins of a memory tier would exceed half of it.
        """
        if not owner:
            raise InvalidInputError("pin: name an owner, so that the pin can be found and ended")
        if ttl_s is not None and not ttl_s > 0:
            raise InvalidInputError(f"pin: ttl_s must be positive, got {ttl_s}")
        index = self._planner.index
        copies = tuple(
            (row, tier)
            for row, residency in zip(rows.tolist(), index.residency(rows).tolist(), strict=True)
            for tier in Tier
            if residency >> tier & 1
        )
        for tier in (Tier.DEVICE, Tier.HOST):
            asked = sum(t is tier for _, t in copies)
            quota = int(self._planner.capacity(tier) * _PIN_QUOTA)
            if self.pinned(tier) + asked > quota:
                raise PinError(
                    f"pin: {asked} pages of the {tier.label} tier asked for, {self.pinned(tier)} "
                    f"pinned already, but at most {quota} of {self._planner.capacity(tier)} may be"
                )
        for row, tier in copies:
            index.pin(_one(row), tier)
        expires_at = None if ttl_s is None else now + ttl_s
        self._pins.append(Pin(owner, copies, expires_at))
        return len(rows)

    def unpin(self, owner: str) -> int:
        """End an owner's pins; return how many pages they held."""
        ended = [pin for pin in self._pins if pin.owner == owner]
        return self._end(ended)

    def tick(self, now: float) -> None:
        """End pins and times to live that have run out."""
        self._end([p for p in self._pins if p.expires_at is not None and p.expires_at <= now])
        index = self._planner.index
        while self._expiring and self._expiring[0][0] <= now:
            _, _, uses = heapq.heappop(self._expiring)
            rows = index.find(key_array(uses))
            before = np.fromiter(uses.values(), np.int64)
            still = (rows >= 0) & (index.eviction_class(rows) == EvictionClass.PROTECTED)
            unused = index.hits(rows) == before
            index.set_class(rows[still & unused], EvictionClass.DEAD)
            index.set_class(rows[still & ~unused], EvictionClass.NORMAL)

    def pinned(self, tier: Tier) -> int:
        """Return how many copies are pinned in a tier."""
        return sum(t is tier for pin in self._pins for _, t in pin.copies)

    def pins(self) -> list[Pin]:
        """Return the pins that hold now."""
        return list(self._pins)

    def clear(self) -> None:
        """End every pin."""
        self._end(list(self._pins))

    def _end(self, pins: list[Pin]) -> int:
        pages = 0
        for pin in pins:
            self._pins.remove(pin)
            for row, tier in pin.copies:
                self._planner.index.unpin(_one(row), tier)
            pages += len({row for row, _ in pin.copies})
        return pages


def _one(row: int) -> Rows:
    return np.asarray([row], np.int32)
