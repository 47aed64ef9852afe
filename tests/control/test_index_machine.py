"""Random histories of the index and the slot allocators against a plain-dict twin."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from index_model import IndexModel, insert_named, name_key

from tierkv.control_plane.index import PrefixIndex
from tierkv.control_plane.policies import EvictionClass
from tierkv.control_plane.slots import SlotAllocator
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier

NAMES = [
    "/".join(path)
    for path in (
        *("a", "ab", "aba", "abb", "abba", "abbab", "ac", "aca", "acab"),
        *("b", "bc", "bca", "bcb", "bcbc", "c", "ca", "cb"),
    )
]
MEMORY = (Tier.DEVICE, Tier.HOST)
TIERS = (*MEMORY, Tier.DISK)
names = st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=6)
tiers = st.sampled_from(TIERS)


class IndexMachine(RuleBasedStateMachine):
    """Every rule does the same to the index and to its twin, and compares."""

    @initialize(slots=st.integers(3, 12))
    def start(self, slots):
        self.index = PrefixIndex(len(NAMES))
        self.model = IndexModel()
        self.slots = {tier: SlotAllocator(slots) for tier in MEMORY}

    def row(self, name):
        return int(self.index.lookup(key_array([name_key(name)]))[0])

    def known(self, chosen):
        return [n for n in chosen if n in self.model.pages]

    def rows(self, chosen):
        return np.array([self.row(n) for n in chosen], np.int32)

    @rule(chosen=names, tier=tiers)
    def insert_resident(self, chosen, tier):
        rows = insert_named(self.index, chosen)
        assert (rows >= 0).all()
        self.model.insert(chosen)
        self.make_resident(chosen, tier)
        self.drop_unused(chosen)

    def make_resident(self, chosen, tier):
        new = [n for n in chosen if tier not in self.model.pages[n].residency]
        slots = None
        if tier in MEMORY:
            new = new[: self.slots[tier].free_count]
            slots = self.slots[tier].alloc(len(new))
        self.index.set_resident(self.rows(new), tier, slots)
        self.model.set_resident(new, tier)

    def drop_unused(self, chosen):
        """A page that found no slot is forgotten by the last unpin."""
        rows = self.rows(chosen)
        self.index.pin(rows, Tier.DEVICE)
        self.index.unpin(rows, Tier.DEVICE)
        self.model.forget(chosen)

    @rule(chosen=names)
    def insert_pinned(self, chosen):
        self.index.pin(insert_named(self.index, chosen), Tier.HOST)
        self.model.insert(chosen)
        self.model.pin(chosen, Tier.HOST, 1)

    @rule(chosen=names, tier=tiers)
    def promote(self, chosen, tier):
        self.make_resident([n for n in self.known(chosen) if self.model.pages[n].known], tier)

    @rule(chosen=names, tier=tiers)
    def clear(self, chosen, tier):
        chosen = self.known(chosen)
        rows = self.rows(chosen)
        if tier in MEMORY:
            slots = self.index.slot(rows, tier)
            self.slots[tier].free(slots[slots >= 0])
        self.index.clear_resident(rows, tier)
        self.model.clear_resident(chosen, tier)

    @rule(chosen=names)
    def touch(self, chosen):
        chosen = sorted(self.known(chosen), key=len)
        self.index.touch(self.rows(chosen))
        self.model.touch(chosen)

    @rule(chosen=names, tier=tiers)
    def pin(self, chosen, tier):
        chosen = self.known(chosen)
        self.index.pin(self.rows(chosen), tier)
        self.model.pin(chosen, tier, 1)

    @rule(chosen=names, tier=tiers)
    def unpin(self, chosen, tier):
        chosen = [n for n in self.known(chosen) if self.model.pages[n].pins[tier]]
        self.index.unpin(self.rows(chosen), tier)
        self.model.pin(chosen, tier, -1)

    @rule(chosen=names, klass=st.sampled_from(EvictionClass))
    def set_class(self, chosen, klass):
        chosen = self.known(chosen)
        self.index.set_class(self.rows(chosen), klass)
        for name in chosen:
            self.model.pages[name].klass = klass

    @rule(tier=tiers, count=st.integers(0, 8), put_back=st.booleans())
    def evict(self, tier, count, put_back):
        rows = self.index.victims(tier, count)
        chosen = self.model.victims(tier, count)
        assert rows.tolist() == self.rows(chosen).tolist()
        if not put_back:
            if tier in MEMORY:
                self.slots[tier].free(self.index.slot(rows, tier))
            self.index.clear_resident(rows, tier)
            self.model.clear_resident(chosen, tier)
        self.index.unpin(rows, tier)
        self.model.pin(chosen, tier, -1)

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def same_pages(self):
        self.index.check()
        pages = self.model.pages
        rows = self.index.lookup(key_array(map(name_key, NAMES))).tolist()
        assert [n for n, row in zip(NAMES, rows, strict=True) if row >= 0] == [
            n for n in NAMES if n in pages
        ]
        assert self.index.stats().rows == len(pages)
        for name, row in zip(NAMES, rows, strict=True):
            if row >= 0:
                self.same_page(row, pages[name])
        for tier in TIERS:
            assert self.index.evictable_count(tier) == len(self.model.evictable(tier))
        for tier, slots in self.slots.items():
            slots.check()
            assert slots.free_count + self.index.resident_count(tier) == slots.capacity

    def same_page(self, row, page):
        index = self.index
        assert index.residency([row])[0] == sum(1 << t for t in page.residency)
        assert index.children(row) == len(self.model.children(page.name))
        assert [index.pins([row], t)[0] for t in Tier] == list(page.pins.values())
        if page.known:
            assert index.hits([row])[0] == page.hits
            assert index.eviction_class([row])[0] == page.klass
        found = index.find(key_array([name_key(page.name)]))[0]
        assert found == (row if page.residency else -1)


IndexMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=50)
TestIndexMachine = IndexMachine.TestCase
