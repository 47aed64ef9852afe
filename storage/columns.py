"""The slots of one slab, a column per fact.

Plain arrays instead of numpy's: single elements are what the hot paths touch, and those cost
a third as much here.  Whole columns are viewed through numpy where that is quicker.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.storage.aligned import ByteArray
from tierkv.storage.format import KEY_BYTES
from tierkv.storage.layout import SlabMeta

# States of a slot; see the diagram in catalog.py.  Plain integers: an enum costs more than
# everything else that happens to a slot.
FREE, WRITING, LIVE, DOOMED, DEFERRED = range(5)


class Location(NamedTuple):
    """Where a page lies, and what the slot's header must say."""

    slab: int
    slot: int
    seq: int
    raw_bytes: int
    stored_bytes: int


class SlotCounts(NamedTuple):
    """Slots by state."""

    free: int
    writing: int
    live: int
    doomed: int
    deferred: int

    @property
    def total(self) -> int:
        """All slots."""
        return sum(self)


class SlabColumns:
    """The slots of one slab.  Not thread-safe: the catalog's lock guards it."""

    __slots__ = (
        "free",
        "keys",
        "meta",
        "namespaces",
        "pins",
        "raw_bytes",
        "record_sums",
        "seqs",
        "states",
        "stored_bytes",
    )

    def __init__(self, meta: SlabMeta) -> None:
        count = meta.slots
        self.meta = meta
        self.states = bytearray(count)
        self.keys = bytearray(count * KEY_BYTES)
        self.seqs = array("Q", bytes(8 * count))
        self.raw_bytes = array("I", bytes(4 * count))
        self.stored_bytes = array("I", bytes(4 * count))
        self.namespaces = array("I", bytes(4 * count))
        self.record_sums = array("Q", bytes(8 * count))
        self.pins: Counter[int] = Counter()
        self.free = list(range(count - 1, -1, -1))  # popped in ascending order

    @property
    def writable(self) -> bool:
        """Whether new pages may be written into the slab."""
        return self.meta.state == "active"

    @property
    def busy(self) -> bool:
        """Whether a read or a write of one of the slots is in flight."""
        return bool(self.pins) or WRITING in self.states

    @property
    def pages(self) -> int:
        """How many slots hold a page."""
        return self.states.count(LIVE)

    def where(self, state: int) -> list[int]:
        """Return the slots in a state, ascending."""
        slots: list[int] = np.flatnonzero(self._states() == state).tolist()
        return slots

    def counts(self) -> SlotCounts:
        """Return slots by state."""
        return SlotCounts(*np.bincount(self._states(), minlength=DEFERRED + 1).tolist())

    def key(self, slot: int) -> bytes:
        """Return the key of the page that a slot holds or held last."""
        return bytes(self.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def location(self, slot: int) -> Location:
        """Return where a slot's page is."""
        return Location(
            self.meta.id, slot, self.seqs[slot], self.raw_bytes[slot], self.stored_bytes[slot]
        )

    def live_sum(self) -> int:
        """Return the sum of the record checksums of all pages, modulo 2**64."""
        sums: NDArray[np.uint64] = np.frombuffer(self.record_sums, np.uint64)
        return int(sums[self._states() == LIVE].sum(dtype=np.uint64))

    def _states(self) -> ByteArray:
        return np.frombuffer(self.states, np.uint8)
