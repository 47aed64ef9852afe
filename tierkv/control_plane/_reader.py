"""Reading what the index knows of pages, for the planner, the store and the CLI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._columns import (
    PUBLIC_FLAGS,
    Columns,
    RowAllocator,
    Rows,
    RowsLike,
    as_rows,
)
from tierkv.identity.keys import KEY_BYTES, KeyArray
from tierkv.tiers import Tier


class PageReader:
    """The read-only half of the prefix index: properties of rows, as arrays."""

    _columns: Columns
    _allocator: RowAllocator

    def keys(self, rows: RowsLike) -> KeyArray:
        """Return page keys, ``[n, 32]``."""
        return self._columns.keys[as_rows(rows)].view(np.uint8).reshape(-1, KEY_BYTES)

    def key(self, row: int) -> bytes:
        """Return a page's key."""
        key: bytes = self._columns.keys[row].tobytes()
        return key

    def parent(self, row: int) -> int:
        """Return the parent's row (perhaps a ghost), -1 for none."""
        return int(self._columns.parent[row])

    def parent_key(self, row: int) -> bytes:
        """Return the parent's key, zeros for none."""
        parent = self.parent(row)
        return self.key(parent) if parent >= 0 else bytes(KEY_BYTES)

    def children(self, row: int) -> int:
        """Return how many rows hang below a page, ghosts included."""
        return int(self._columns.children[row])

    def residency(self, rows: RowsLike) -> NDArray[np.uint8]:
        """Return the tiers that hold pages, as bits ``1 << tier``."""
        return self._columns.residency.take(as_rows(rows))

    def slot(self, rows: RowsLike, tier: Tier) -> Rows:
        """Return the slots of pages in the device or the host tier, -1 for none."""
        return self._columns.slots[tier].take(as_rows(rows)) - 1

    def pins(self, rows: RowsLike, tier: Tier) -> Rows:
        """Return the pin counts of pages in a tier."""
        return self._columns.tier_pins[tier].take(as_rows(rows))

    def group(self, rows: RowsLike) -> NDArray[np.uint8]:
        """Return the layer groups of pages, ``UNKNOWN_GROUP`` for mere parents."""
        return self._columns.group.take(as_rows(rows))

    def end_token(self, rows: RowsLike) -> NDArray[np.uint32]:
        """Return the prefix lengths that pages complete."""
        return self._columns.end_token.take(as_rows(rows))

    def num_tokens(self, rows: RowsLike) -> NDArray[np.uint32]:
        """Return how many valid tokens pages have."""
        return self._columns.num_tokens.take(as_rows(rows))

    def flags(self, rows: RowsLike) -> NDArray[np.uint8]:
        """Return the flags of pages (``PAGE_TAIL``)."""
        return self._columns.flags.take(as_rows(rows)) & np.uint8(PUBLIC_FLAGS)

    def eviction_class(self, rows: RowsLike) -> NDArray[np.uint8]:
        """Return the eviction classes of pages."""
        return self._columns.klass.take(as_rows(rows))

    def hits(self, rows: RowsLike) -> NDArray[np.uint32]:
        """Return how often pages were touched."""
        return self._columns.hits.take(as_rows(rows))

    def used_s(self, rows: RowsLike) -> NDArray[np.uint32]:
        """Return the caller's clock at the last use of pages, seconds; 0 if not given."""
        return self._columns.used_s.take(as_rows(rows))

    def select(self, *, within: Sequence[Tier] = tuple(Tier), without: Sequence[Tier] = ()) -> Rows:
        """Return the pages held by one of ``within`` and none of ``without``.

        One vectorised pass over a byte for each row that was ever used.
        """
        wanted = sum(1 << tier for tier in within)
        unwanted = sum(1 << tier for tier in without)
        held = self._columns.residency[: self._allocator.high]
        return np.flatnonzero(((held & wanted) != 0) & ((held & unwanted) == 0)).astype(np.int32)
