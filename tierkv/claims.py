"""Pins on single copies of pages, kept together so that each is released exactly once."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import TYPE_CHECKING

import numpy as np

from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.core import Core


class Claims:
    """The copies that one load has pinned: at most one a page."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tiers: dict[int, Tier] = {}

    def add(self, row: int, tier: Tier) -> None:
        """Pin a page's copy in ``tier``."""
        with self._core.lock:
            assert row not in self._tiers
            self._core.index.pin(_one(row), tier)
            self._tiers[row] = tier

    def move(self, row: int, tier: Tier) -> None:
        """Pin the copy in ``tier`` instead of the one pinned before."""
        with self._core.lock:
            old = self._tiers[row]
            self._core.index.pin(_one(row), tier)
            self._core.index.unpin(_one(row), old)
            self._tiers[row] = tier

    def end(self, row: int) -> None:
        """Unpin a page's copy."""
        with self._core.lock:
            self._core.index.unpin(_one(row), self._tiers.pop(row))
            self._core.settled.notify_all()

    def tier(self, row: int) -> Tier:
        """Return where a page's pinned copy is."""
        return self._tiers[row]

    def items(self) -> ItemsView[int, Tier]:
        """Return (row, tier) pairs."""
        return self._tiers.items()

    def release(self) -> None:
        """Unpin everything; idempotent."""
        with self._core.lock:
            for row, tier in self._tiers.items():
                self._core.index.unpin(_one(row), tier)
            self._tiers.clear()
            self._core.settled.notify_all()


def _one(row: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray([row], np.int32)
