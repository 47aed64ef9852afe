"""What is where, in memory: slots of every slab, and the page each of them holds.

A slot's life, and who moves it on::

    FREE --take--> WRITING --publish--> LIVE --remove--> DOOMED --defer--> DEFERRED --release--+
     ^                |                                                                       |
     +---abandon------+            (deletion not yet committed)  (committed, not yet synced)  |
     +----------------------------------------------------------------------------------------+

A slot is not reused before the index that freed it is durable, nor while a read of it is in
flight.  Columns, not objects: about 250 bytes a page, the dictionary's share included.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tierkv.storage.format import KEY_BYTES, IndexRecord
from tierkv.storage.layout import SlabMeta

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class SlotState(IntEnum):
    """State of a slot; see the module's diagram."""

    FREE = 0
    WRITING = 1
    LIVE = 2
    DOOMED = 3
    DEFERRED = 4


@dataclass(frozen=True, slots=True)
class Location:
    """Where a page lies, and what the slot's header must say."""

    slab: int
    slot: int
    seq: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Slots by state, over all slabs."""

    free: int
    writing: int
    live: int
    doomed: int
    deferred: int

    @property
    def total(self) -> int:
        """All slots."""
        return self.free + self.writing + self.live + self.doomed + self.deferred


class SlabColumns:
    """The slots of one slab, a column per fact."""

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
        self.meta = meta
        count = meta.slots
        self.states = np.zeros(count, np.uint8)
        self.keys = np.zeros((count, KEY_BYTES), np.uint8)
        self.seqs = np.zeros(count, np.uint64)
        self.raw_bytes = np.zeros(count, np.uint64)
        self.stored_bytes = np.zeros(count, np.uint64)
        self.namespaces = np.zeros(count, np.int32)
        self.record_sums = np.zeros(count, np.uint64)
        self.pins: Counter[int] = Counter()
        self.free = list(range(count - 1, -1, -1))  # popped in ascending order

    @property
    def writable(self) -> bool:
        """Whether new pages may be written into the slab."""
        return self.meta.state == "active"


class Catalog:
    """The in-memory index and the slot allocator.  Every method is thread-safe and quick."""

    def __init__(self, slot_bytes: int) -> None:
        """Args:
        slot_bytes: size of the slots that ``take`` hands out.
        """
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._slabs: dict[int, SlabColumns] = {}
        self._where: dict[bytes, int] = {}
        self._namespaces: dict[bytes, int] = {}
        self._deferred: list[tuple[int, int, int]] = []  # (epoch, slab, slot)
        self._filling = -1  # the slab that the last slot came from
        self._page_bytes = 0
        self._used_bytes = 0
        self._record_sum = 0

    # -- slabs ---------------------------------------------------------------------------

    def add_slab(self, meta: SlabMeta) -> None:
        """Add a slab whose slots are all free."""
        with self._lock:
            assert meta.id not in self._slabs, f"slab {meta.id} added twice"
            self._slabs[meta.id] = SlabColumns(meta)

    def set_meta(self, meta: SlabMeta) -> None:
        """Replace a slab's meta (its state changed)."""
        with self._lock:
            self._slabs[meta.id].meta = meta

    def drop_slab(self, slab_id: int) -> list[bytes] | None:
        """Forget a slab with all its pages and return their keys.

        Returns None, and changes nothing, while a read or a write of the slab is in flight.
        """
        with self._lock:
            slab = self._slabs[slab_id]
            if slab.pins or (slab.states == SlotState.WRITING).any():
                return None
            keys = [slab.keys[s].tobytes() for s in np.flatnonzero(slab.states == SlotState.LIVE)]
            for key in keys:
                self._forget(key)
            self._deferred = [d for d in self._deferred if d[1] != slab_id]
            del self._slabs[slab_id]
            return keys

    def reclaimable(self) -> list[SlabMeta]:
        """Return the slabs that no new page can go into, fewest pages first, then oldest."""
        with self._lock:
            idle = [
                s
                for s in self._slabs.values()
                if not s.writable or s.meta.slot_bytes != self._slot_bytes
            ]
            idle.sort(key=lambda s: (int((s.states == SlotState.LIVE).sum()), s.meta.id))
            return [s.meta for s in idle]

    def slab_metas(self) -> list[SlabMeta]:
        """Return all slabs by id."""
        with self._lock:
            return sorted((s.meta for s in self._slabs.values()), key=lambda m: m.id)

    def slab(self, slab_id: int) -> SlabMeta:
        """Return a slab's meta."""
        return self._slabs[slab_id].meta

    def pages_in(self, slab_id: int) -> int:
        """Return how many pages a slab holds."""
        with self._lock:
            return int((self._slabs[slab_id].states == SlotState.LIVE).sum())

    # -- slots ---------------------------------------------------------------------------

    def take(self) -> tuple[int, int] | None:
        """Return a free (slab, slot) for writing, or None."""
        with self._lock:
            slab = self._slabs.get(self._filling)
            if slab is None or not self._has_room(slab):
                slab = next((s for s in self._slabs.values() if self._has_room(s)), None)
            if slab is None:
                return None
            self._filling = slab.meta.id
            slot = slab.free.pop()
            slab.states[slot] = SlotState.WRITING
            return slab.meta.id, slot

    def has_room(self) -> bool:
        """Whether ``take`` would find a slot."""
        with self._lock:
            return any(self._has_room(s) for s in self._slabs.values())

    def abandon(self, slab_id: int, slot: int) -> None:
        """Free a slot whose write came to nothing: no index ever named it."""
        with self._lock:
            slab = self._slabs[slab_id]
            assert slab.states[slot] == SlotState.WRITING, "abandoned a slot not being written"
            self._free(slab, slot)

    def publish(self, record: IndexRecord, record_sum: int) -> None:
        """Make a written page findable."""
        with self._lock:
            slab = self._slabs[record.slab]
            slot, key = record.slot, record.info.key
            assert key not in self._where, "published a page twice"
            assert slab.states[slot] == SlotState.WRITING, "published a slot not being written"
            slab.states[slot] = SlotState.LIVE
            slab.keys[slot] = np.frombuffer(key, np.uint8)
            slab.seqs[slot] = record.seq
            slab.raw_bytes[slot] = record.raw_bytes
            slab.stored_bytes[slot] = record.stored_bytes
            slab.record_sums[slot] = record_sum
            slab.namespaces[slot] = self._namespaces.setdefault(
                record.info.namespace, len(self._namespaces)
            )
            self._where[key] = record.slab << _SLOT_BITS | slot
            self._page_bytes += record.raw_bytes
            self._used_bytes += slab.meta.slot_bytes
            self._record_sum = (self._record_sum + record_sum) % (1 << 64)

    def load(self, records: Iterable[tuple[IndexRecord, int]]) -> list[bytes]:
        """Publish the pages of an index and return the keys that have no place.

        A record has no place when its slab is unknown, its slot is outside the slab or taken.
        """
        misplaced = []
        for record, record_sum in records:
            slab = self._slabs.get(record.slab)
            inside = slab is not None and record.slot < slab.meta.slots
            if not inside or slab is None or slab.states[record.slot] != SlotState.FREE:
                misplaced.append(record.info.key)
                continue
            slab.states[record.slot] = SlotState.WRITING
            self.publish(record, record_sum)
        with self._lock:
            for slab in self._slabs.values():
                slab.free = np.flatnonzero(slab.states == SlotState.FREE)[::-1].tolist()
        return misplaced

    def remove(self, key: bytes, seq: int | None = None) -> Location | None:
        """Unpublish a page (only the one of ``seq``, when given) and doom its slot."""
        with self._lock:
            where = self._where.get(key)
            if where is None:
                return None
            location = self._location(where)
            if seq is not None and location.seq != seq:
                return None
            self._forget(key)
            self._slabs[location.slab].states[location.slot] = SlotState.DOOMED
            return location

    def defer(self, locations: Iterable[Location], epoch: int) -> None:
        """Note that the deletion of these pages is committed, after ``epoch`` index syncs."""
        with self._lock:
            for location in locations:
                slab = self._slabs.get(location.slab)
                if slab is None:  # its slab was dropped meanwhile
                    continue
                assert slab.states[location.slot] == SlotState.DOOMED, "deferred a slot not doomed"
                slab.states[location.slot] = SlotState.DEFERRED
                self._deferred.append((epoch, location.slab, location.slot))

    def release(self, epoch: int) -> int:
        """Free the slots deferred before index sync number ``epoch`` and return how many.

        Slots that a read still uses stay deferred.
        """
        with self._lock:
            kept = []
            for entry in self._deferred:
                slab = self._slabs[entry[1]]
                if entry[0] >= epoch or slab.pins[entry[2]]:
                    kept.append(entry)
                else:
                    self._free(slab, entry[2])
            released = len(self._deferred) - len(kept)
            self._deferred = kept
            return released

    # -- pages ---------------------------------------------------------------------------

    def pin(self, key: bytes, namespace: bytes | None) -> tuple[Location | None, bool]:
        """Find a page and keep its slot from being reused until ``unpin``.

        Args:
            key: the page's key.
            namespace: the namespace it must belong to; None accepts any.

        Returns:
            The location or None, and whether the page is there under another namespace.
        """
        with self._lock:
            where = self._where.get(key)
            if where is None:
                return None, False
            slab = self._slabs[where >> _SLOT_BITS]
            slot = where & _SLOT_MASK
            if (
                namespace is not None
                and self._namespaces.get(namespace, -1) != slab.namespaces[slot]
            ):
                return None, True
            slab.pins[slot] += 1
            return self._location(where), False

    def unpin(self, location: Location) -> None:
        """Give up a pin."""
        with self._lock:
            pins = self._slabs[location.slab].pins
            pins[location.slot] -= 1
            assert pins[location.slot] >= 0, "unpinned a slot too often"
            if not pins[location.slot]:
                del pins[location.slot]

    def is_current(self, key: bytes, location: Location) -> bool:
        """Whether ``key`` still names this very write of the page."""
        with self._lock:
            where = self._where.get(key)
            return where is not None and self._location(where) == location

    def holds(self, record: IndexRecord) -> bool:
        """Whether an index record and this catalog agree."""
        with self._lock:
            where = self._where.get(record.info.key)
            return where is not None and self._location(where) == Location(
                record.slab, record.slot, record.seq, record.raw_bytes, record.stored_bytes
            )

    def __contains__(self, key: bytes) -> bool:
        return key in self._where  # one dictionary look-up is atomic

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are here."""
        where = self._where
        return [key in where for key in keys]

    def keys(self) -> list[bytes]:
        """Return all keys."""
        with self._lock:
            return list(self._where)

    def __len__(self) -> int:
        return len(self._where)

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, before codecs."""
        return self._page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold pages."""
        return self._used_bytes

    @property
    def record_sum(self) -> int:
        """Sum of the checksums of all index records, modulo 2**64."""
        return self._record_sum

    def counts(self) -> SlotCounts:
        """Return slots by state."""
        with self._lock:
            total = np.zeros(len(SlotState), np.int64)
            for slab in self._slabs.values():
                total += np.bincount(slab.states, minlength=len(SlotState))
        return SlotCounts(*(int(n) for n in total))

    def check(self) -> None:
        """Prove that keys, slots and counts agree; raises AssertionError otherwise."""
        with self._lock:
            live = 0
            for slab_id, slab in self._slabs.items():
                for slot in np.flatnonzero(slab.states == SlotState.LIVE):
                    live += 1
                    where = self._where.get(slab.keys[slot].tobytes())
                    assert where == slab_id << _SLOT_BITS | int(slot), "a live slot is not indexed"
                free = np.flatnonzero(slab.states == SlotState.FREE)
                assert sorted(slab.free) == free.tolist(), f"slab {slab_id}: free list is wrong"
                assert all(n > 0 for n in slab.pins.values()), f"slab {slab_id}: stale pins"
            assert live == len(self._where), "the index names a page that no slot holds"
            marked = sum(int((s.states == SlotState.DEFERRED).sum()) for s in self._slabs.values())
            assert marked == len(self._deferred), "deferred slots and their list differ"
            assert len({d[1:] for d in self._deferred}) == marked, "a slot was deferred twice"
            sums = sum(
                int(x)
                for s in self._slabs.values()
                for x in s.record_sums[s.states == SlotState.LIVE]
            )
            assert sums % (1 << 64) == self._record_sum, "record sums differ"

    # -- under the lock ------------------------------------------------------------------

    def _has_room(self, slab: SlabColumns) -> bool:
        return bool(slab.free) and slab.writable and slab.meta.slot_bytes == self._slot_bytes

    def _location(self, where: int) -> Location:
        slab_id, slot = where >> _SLOT_BITS, where & _SLOT_MASK
        slab = self._slabs[slab_id]
        return Location(
            slab_id,
            slot,
            int(slab.seqs[slot]),
            int(slab.raw_bytes[slot]),
            int(slab.stored_bytes[slot]),
        )

    def _forget(self, key: bytes) -> None:
        where = self._where.pop(key)
        slab, slot = self._slabs[where >> _SLOT_BITS], where & _SLOT_MASK
        self._page_bytes -= int(slab.raw_bytes[slot])
        self._used_bytes -= slab.meta.slot_bytes
        self._record_sum = (self._record_sum - int(slab.record_sums[slot])) % (1 << 64)

    def _free(self, slab: SlabColumns, slot: int) -> None:
        slab.states[slot] = SlotState.FREE
        slab.free.append(slot)
