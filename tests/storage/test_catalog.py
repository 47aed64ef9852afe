"""The slot allocator and in-memory index against a model of their own rules."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.storage.catalog import Catalog
from tierkv.storage.columns import Location
from tierkv.storage.format import IndexRecord, PageInfo
from tierkv.storage.layout import SlabMeta
from tierkv.storage.testing import page_key

SLOT = 8192
SLOTS = 4
numbers = st.integers(0, 9)


class CatalogMachine(RuleBasedStateMachine):
    """Pages come and go; a slot must never be handed out while anything may still name it."""

    @initialize()
    def start(self) -> None:
        self.catalog = Catalog(SLOT)
        self.slabs = 0
        self.seq = 0
        self.epoch = 0
        self.writing: list[tuple[int, int]] = []
        self.live: dict[int, tuple[int, int]] = {}
        self.doomed: list[Location] = []
        self.deferred: dict[tuple[int, int], int] = {}
        self.pins: list[Location] = []

    @rule()
    @precondition(lambda self: self.slabs < 3)
    def add_slab(self) -> None:
        self.catalog.add_slab(SlabMeta(self.slabs, "", SLOT, SLOTS))
        self.slabs += 1

    @rule()
    def take(self) -> None:
        busy = {*self.writing, *self.live.values(), *self.deferred}
        busy |= {location[:2] for location in (*self.doomed, *self.pins)}
        place = self.catalog.take()
        total = self.slabs * SLOTS
        occupied = len({*self.writing, *self.live.values(), *self.deferred}) + len(self.doomed)
        if place is None:
            assert occupied == total, "a free slot was withheld"
            return
        slot = (place[0].id, place[1])
        assert slot not in busy, "a slot in use was handed out"
        self.writing.append(slot)

    @rule(number=numbers)
    @precondition(lambda self: self.writing)
    def publish(self, number: int) -> None:
        if number in self.live:
            return
        slab, slot = self.writing.pop(0)
        self.seq += 1
        info = PageInfo(page_key(number), bytes(32))
        record = IndexRecord(info, slab, slot, self.seq, 100, 100, 0, 0, bytes(8))
        self.catalog.publish([(record, self.seq * 2**60)])
        self.live[number] = (slab, slot)
        assert self.catalog.holds(record)

    @rule()
    @precondition(lambda self: self.writing)
    def abandon(self) -> None:
        self.catalog.abandon(*self.writing.pop())

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        location = self.catalog.remove(page_key(number))
        assert (location is not None) == (number in self.live)
        if location is not None:
            assert location[:2] == self.live.pop(number)
            self.doomed.append(location)

    @rule()
    def commit(self) -> None:
        self.catalog.defer(self.doomed, self.epoch)
        for location in self.doomed:
            self.deferred[location[:2]] = self.epoch
        self.doomed = []

    @rule()
    def release_without_sync(self) -> None:
        self.release()

    @rule()
    def sync(self) -> None:
        self.epoch += 1
        self.release()

    def release(self) -> None:
        pinned = {location[:2] for location in self.pins}
        gone = [s for s, e in self.deferred.items() if e < self.epoch and s not in pinned]
        assert self.catalog.release(self.epoch) == len(gone)
        for slot in gone:
            del self.deferred[slot]

    @rule(number=numbers)
    def pin(self, number: int) -> None:
        location, mismatch = self.catalog.pin(page_key(number), bytes(32))
        assert not mismatch
        assert (location is not None) == (number in self.live)
        if location is not None:
            self.pins.append(location)

    @rule(number=numbers)
    def pin_of_another_namespace(self, number: int) -> None:
        location, mismatch = self.catalog.pin(page_key(number), b"x" * 32)
        assert location is None
        assert mismatch == (number in self.live)

    @rule()
    @precondition(lambda self: self.pins)
    def unpin(self) -> None:
        self.catalog.unpin(self.pins.pop(0))

    @rule(slab=st.integers(0, 2))
    def try_to_drop(self, slab: int) -> None:
        """A slab that is read or written stays; nothing of it changes."""
        busy = any(s == slab for s, _ in self.writing)
        busy |= any(location.slab == slab for location in self.pins)
        if slab < self.slabs and busy:
            assert self.catalog.drop_slab(slab) is None

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "catalog"):
            return
        self.catalog.check()
        counts = self.catalog.counts()
        assert counts.live == len(self.catalog) == len(self.live)
        assert counts.writing == len(self.writing)
        assert counts.doomed == len(self.doomed)
        assert counts.deferred == len(self.deferred)
        assert counts.total == self.slabs * SLOTS
        assert self.catalog.page_bytes == 100 * len(self.live)
        assert self.catalog.used_bytes == SLOT * len(self.live)


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def record(number: int, slab: int, slot: int) -> tuple[IndexRecord, int]:
    info = PageInfo(page_key(number), bytes(32))
    return IndexRecord(info, slab, slot, number, 100, 100, 0, 0, bytes(8)), number


def test_records_without_a_place_are_named():
    catalog = Catalog(SLOT)
    catalog.add_slab(SlabMeta(0, "", SLOT, SLOTS))
    records = [record(1, 0, 0), record(2, 0, 0), record(3, 0, 9), record(4, 7, 0)]
    assert catalog.load(records) == [page_key(2), page_key(3), page_key(4)]
    assert catalog.contains([page_key(1), page_key(2)]) == [True, False]
    catalog.check()


def test_a_dropped_slab_takes_its_pages_along():
    catalog = Catalog(SLOT)
    catalog.add_slab(SlabMeta(0, "", SLOT, SLOTS))
    catalog.add_slab(SlabMeta(1, "", SLOT, SLOTS, "retired"))
    catalog.load([record(1, 0, 0), record(2, 1, 0), record(3, 1, 1)])
    assert [m.id for m in catalog.reclaimable()] == [1]
    assert catalog.remove(page_key(3)) is not None
    assert catalog.drop_slab(1) == [page_key(2)]
    assert catalog.contains([page_key(n) for n in (1, 2, 3)]) == [True, False, False]
    catalog.check()


def test_retired_and_other_slabs_get_no_pages():
    catalog = Catalog(SLOT)
    catalog.add_slab(SlabMeta(0, "", SLOT, SLOTS, "retired"))
    catalog.add_slab(SlabMeta(1, "", 2 * SLOT, SLOTS))
    assert catalog.take() is None
    assert not catalog.has_room()
    catalog.add_slab(SlabMeta(2, "", SLOT, 1))
    assert catalog.has_room()
    place = catalog.take()
    assert place is not None
    assert place[0].id == 2
    assert catalog.take() is None
