"""What is where, in memory: slots of every slab, and the page each of them holds.

A slot's life, and who moves it on::

    FREE --take--> WRITING --publish--> LIVE --remove--> DOOMED --defer--> DEFERRED --release--+
     ^                |                                                                        |
     +----abandon-----+             (deletion not yet committed)  (committed, not yet synced)  |
     +-----------------------------------------------------------------------------------------+

A slot is not reused before the index that freed it is durable, nor while a read of it is in
flight.  Columns, not objects: about 230 bytes a page, the dictionary's share included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierkv.storage.columns import (
    DEFERRED,
    DOOMED,
    FREE,
    LIVE,
    WRITING,
    Location,
    SlabColumns,
    SlotCounts,
)
from tierkv.storage.format import KEY_BYTES, IndexRecord
from tierkv.storage.layout import SlabMeta

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_SUM_MASK = (1 << 64) - 1


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
        self._filling: SlabColumns | None = None  # the slab that the last slot came from
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
            if slab.busy:
                return None
            keys = [slab.key(slot) for slot in slab.where(LIVE)]
            for key in keys:
                self._forget(key)
            self._deferred = [d for d in self._deferred if d[1] != slab_id]
            del self._slabs[slab_id]
            self._filling = None
            return keys

    def reclaimable(self) -> list[SlabMeta]:
        """Return the slabs that no new page can go into, fewest pages first, then oldest."""
        with self._lock:
            idle = [
                s
                for s in self._slabs.values()
                if not s.writable or s.meta.slot_bytes != self._slot_bytes
            ]
            idle.sort(key=lambda s: (s.pages, s.meta.id))
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
        return self._slabs[slab_id].pages

    # -- slots ---------------------------------------------------------------------------

    def take(self) -> tuple[SlabMeta, int] | None:
        """Return a free slot for writing, or None."""
        with self._lock:
            slab = self._filling
            if slab is None or not self._has_room(slab):
                slab = next((s for s in self._slabs.values() if self._has_room(s)), None)
                self._filling = slab
                if slab is None:
                    return None
            slot = slab.free.pop()
            slab.states[slot] = WRITING
            return slab.meta, slot

    def has_room(self) -> bool:
        """Whether ``take`` would find a slot."""
        with self._lock:
            return any(self._has_room(s) for s in self._slabs.values())

    def abandon(self, slab_id: int, slot: int) -> None:
        """Free a slot whose write came to nothing: no index ever named it."""
        with self._lock:
            slab = self._slabs[slab_id]
            assert slab.states[slot] == WRITING, "abandoned a slot not being written"
            self._free(slab, slot)

    def publish(self, records: Sequence[tuple[IndexRecord, int]]) -> None:
        """Make written pages findable; each record comes with its checksum."""
        with self._lock:
            for record, record_sum in records:
                self._publish(record, record_sum)

    def load(self, records: Iterable[tuple[IndexRecord, int]]) -> list[bytes]:
        """Publish the pages of an index and return the keys that have no place.

        A record has no place when its slab is unknown, its slot is outside the slab or taken.
        """
        misplaced = []
        with self._lock:
            for record, record_sum in records:
                slab = self._slabs.get(record.slab)
                if (
                    slab is None
                    or record.slot >= slab.meta.slots
                    or slab.states[record.slot] != FREE
                ):
                    misplaced.append(record.info.key)
                    continue
                slab.states[record.slot] = WRITING
                self._publish(record, record_sum)
            for slab in self._slabs.values():
                slab.free = slab.where(FREE)[::-1]
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
            self._slabs[location.slab].states[location.slot] = DOOMED
            return location

    def defer(self, locations: Iterable[Location], epoch: int) -> None:
        """Note that the deletion of these pages is committed, after ``epoch`` index syncs."""
        with self._lock:
            for location in locations:
                slab = self._slabs.get(location.slab)
                if slab is None:  # its slab was dropped meanwhile
                    continue
                assert slab.states[location.slot] == DOOMED, "deferred a slot not doomed"
                slab.states[location.slot] = DEFERRED
                self._deferred.append((epoch, location.slab, location.slot))

    def release(self, epoch: int) -> int:
        """Free the slots deferred before index sync number ``epoch`` and return how many.

        Slots that a read still uses stay deferred.
        """
        with self._lock:
            kept = []
            for entry in self._deferred:
                slab = self._slabs[entry[1]]
                if entry[0] >= epoch or entry[2] in slab.pins:
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
            wanted = None if namespace is None else self._namespaces.get(namespace, -1)
            if wanted is not None and wanted != slab.namespaces[slot]:
                return None, True
            slab.pins[slot] += 1
            return slab.location(slot), False

    def unpin(self, location: Location) -> None:
        """Give up a pin."""
        with self._lock:
            pins = self._slabs[location.slab].pins
            pins[location.slot] -= 1
            if pins[location.slot] <= 0:
                assert pins[location.slot] == 0, "unpinned a slot too often"
                del pins[location.slot]

    def is_current(self, key: bytes, location: Location) -> bool:
        """Whether ``key`` still names this very write of the page."""
        with self._lock:
            where = self._where.get(key)
            return where is not None and self._location(where) == location

    def holds(self, record: IndexRecord) -> bool:
        """Whether an index record and this catalog agree."""
        location = Location(
            record.slab, record.slot, record.seq, record.raw_bytes, record.stored_bytes
        )
        return self.is_current(record.info.key, location)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where  # one dictionary look-up is atomic

    def is_raw(self, key: bytes) -> bool:
        """Return whether a page is here and stored as it is, not compressed."""
        with self._lock:
            where = self._where.get(key)
            if where is None:
                return False
            location = self._location(where)
            return location.raw_bytes == location.stored_bytes

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
        """Return slots by state, over all slabs."""
        with self._lock:
            columns = zip(*(s.counts() for s in self._slabs.values()), strict=True)
            return SlotCounts(*map(sum, columns)) if self._slabs else SlotCounts(0, 0, 0, 0, 0)

    def check(self) -> None:
        """Prove that keys, slots and counts agree; raises AssertionError otherwise."""
        with self._lock:
            for slab_id, slab in self._slabs.items():
                for slot in slab.where(LIVE):
                    where = self._where.get(slab.key(slot))
                    assert where == slab_id << _SLOT_BITS | slot, "a live slot is not indexed"
                assert sorted(slab.free) == slab.where(FREE), f"slab {slab_id}: free list is wrong"
                assert all(n > 0 for n in slab.pins.values()), f"slab {slab_id}: stale pins"
                assert slab.counts().total == slab.meta.slots, f"slab {slab_id}: slots are lost"
            slabs = self._slabs.values()
            assert sum(s.pages for s in slabs) == len(self._where), "a page has no live slot"
            deferred = {(s.meta.id, slot) for s in slabs for slot in s.where(DEFERRED)}
            assert len(deferred) == len(self._deferred), "a slot was deferred twice, or lost"
            assert deferred == {d[1:] for d in self._deferred}, "deferred slots differ"
            sums = sum(s.live_sum() for s in slabs) & _SUM_MASK
            assert sums == self._record_sum, "record sums differ"

    # -- under the lock ------------------------------------------------------------------

    def _publish(self, record: IndexRecord, record_sum: int) -> None:
        slab = self._slabs[record.slab]
        slot, key = record.slot, record.info.key
        assert key not in self._where, "published a page twice"
        assert slab.states[slot] == WRITING, "published a slot not being written"
        slab.states[slot] = LIVE
        slab.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
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
        self._record_sum = (self._record_sum + record_sum) & _SUM_MASK

    def _has_room(self, slab: SlabColumns) -> bool:
        return bool(slab.free) and slab.writable and slab.meta.slot_bytes == self._slot_bytes

    def _location(self, where: int) -> Location:
        return self._slabs[where >> _SLOT_BITS].location(where & _SLOT_MASK)

    def _forget(self, key: bytes) -> None:
        where = self._where.pop(key)
        slab, slot = self._slabs[where >> _SLOT_BITS], where & _SLOT_MASK
        self._page_bytes -= slab.raw_bytes[slot]
        self._used_bytes -= slab.meta.slot_bytes
        self._record_sum = (self._record_sum - slab.record_sums[slot]) & _SUM_MASK

    def _free(self, slab: SlabColumns, slot: int) -> None:
        slab.states[slot] = FREE
        slab.free.append(slot)
