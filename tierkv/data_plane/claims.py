"""Pins on single copies of pages, kept together so that each is released exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core


class Claims:
    """The copies that one load has pinned: at most one a page.  Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tiers: dict[int, Tier] = {}

    def add(self, tiers: Mapping[int, Tier]) -> None:
        """Pin pages, each in the tier given."""
        with self._core.lock:
            assert tiers.keys().isdisjoint(self._tiers), "a page is claimed twice"
            self._tiers.update(tiers)
            for tier, rows in _by_tier(tiers.items()):
                self._core.index.pin(rows, tier)

    def move(self, rows: Iterable[int], tier: Tier) -> None:
        """Pin the copies in ``tier`` instead of those pinned before."""
        with self._core.lock:
            before = {row: self._tiers[row] for row in rows if self._tiers[row] is not tier}
            self._core.index.pin(np.fromiter(before, np.int32), tier)
            self._unpin(before)
            self._tiers.update(dict.fromkeys(before, tier))

    def end(self, rows: Iterable[int]) -> None:
        """Unpin some of the pages."""
        with self._core.lock:
            self._unpin({row: self._tiers.pop(row) for row in rows})

    def release(self) -> None:
        """Unpin everything; idempotent."""
        with self._core.lock:
            self.end(list(self._tiers))
            self._core.settled.notify_all()

    def tier(self, row: int) -> Tier:
        """Return where a page's pinned copy is."""
        return self._tiers[row]

    def tiers(self) -> dict[int, Tier]:
        """Return where the pinned copies are, by row."""
        return dict(self._tiers)

    def _unpin(self, tiers: Mapping[int, Tier]) -> None:
        for tier, rows in _by_tier(tiers.items()):
            self._core.index.unpin(rows, tier)


def _by_tier(
    tiers: Iterable[tuple[int, Tier]],
) -> list[tuple[Tier, np.ndarray[tuple[int], np.dtype[np.int32]]]]:
    grouped: dict[Tier, list[int]] = {}
    for row, tier in tiers:
        grouped.setdefault(tier, []).append(row)
    return [(tier, np.asarray(rows, np.int32)) for tier, rows in grouped.items()]
