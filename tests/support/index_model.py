"""A plain-dict twin of the prefix index, and small helpers to build pages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from tierkv.control_plane.policies import EvictionClass
from tierkv.identity.keys import KEY_BYTES, key_array
from tierkv.tiers import Tier

NO_PARENT = bytes(KEY_BYTES)


def name_key(name: str) -> bytes:
    """Return the key of a page named by its path, such as ``"a/b"``."""
    return hashlib.sha256(name.encode()).digest() if name else NO_PARENT


def parent_name(name: str) -> str:
    """Return the name of a page's parent, empty for a root."""
    return name.rpartition("/")[0]


def insert_named(index, names, *, group=0, flags=0, num_tokens=4):
    """Enter pages by their names; their lengths follow from their depth."""
    return index.insert(
        key_array(name_key(n) for n in names),
        key_array(name_key(parent_name(n)) for n in names),
        group=group,
        end_tokens=np.array([4 * (n.count("/") + 1) for n in names]),
        num_tokens=num_tokens,
        flags=flags,
    )


def enter(index, names, tier=Tier.HOST, **options):
    """Enter pages by name and make them resident in a tier."""
    rows = insert_named(index, names, **options)
    index.set_resident(rows, tier)
    return rows


def find(index, *names):
    """Return the rows of pages by name."""
    return index.find(key_array(map(name_key, names)))


def evict(index, tier, count):
    """Evict pages from a tier; return their keys in order."""
    rows = index.victims(tier, count)
    keys = [index.key(int(row)) for row in rows]
    index.clear_resident(rows, tier)
    index.unpin(rows, tier)
    return keys


def keys_of(*names):
    """Return the keys of pages by name."""
    return [name_key(name) for name in names]


@dataclass
class ModelPage:
    """What the twin knows of a row, page or ghost."""

    name: str
    known: bool = False
    residency: set[Tier] = field(default_factory=set)
    pins: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    klass: EvictionClass = EvictionClass.NORMAL
    hits: int = 0
    stamp: int = 0


class IndexModel:
    """Leaf-LRU over named pages, by brute force."""

    def __init__(self) -> None:
        self.pages: dict[str, ModelPage] = {}
        self.clock = 0

    def children(self, name):
        """Return the pages known to hang below a page; of a mere parent, nothing is known."""
        return [p for p in self.pages.values() if p.known and parent_name(p.name) == name]

    def insert(self, names):
        self.clock += len(names)
        for i, name in enumerate(names):
            page = self.pages.setdefault(name, ModelPage(name))
            if not page.residency:
                page.known, page.stamp = True, self.clock - i
        for name in names:
            if parent_name(name):
                self.pages.setdefault(parent_name(name), ModelPage(parent_name(name)))

    def touch(self, names):
        self.clock += len(names)
        for i, name in enumerate(names):
            page = self.pages[name]
            page.stamp = self.clock - i
            page.hits += 1
            if page.klass is EvictionClass.DEAD:
                page.klass = EvictionClass.NORMAL

    def set_resident(self, names, tier):
        for name in names:
            self.pages[name].residency.add(tier)

    def clear_resident(self, names, tier):
        for name in names:
            self.pages[name].residency.discard(tier)
        self.forget(names)

    def pin(self, names, tier, step):
        for name in names:
            self.pages[name].pins[tier] += step
        if step < 0:
            self.forget([n for n in names if not self.pages[n].pins[tier]])

    def forget(self, names):
        for name in names:
            while name in self.pages and not self.needed(name):
                known = self.pages.pop(name).known
                name = parent_name(name) if known else ""

    def needed(self, name):
        page = self.pages[name]
        return bool(page.residency or any(page.pins.values()) or self.children(name))

    def evictable(self, tier, gone=()):
        return [
            page
            for page in self.pages.values()
            if tier in page.residency
            and page.name not in gone
            and not page.pins[tier]
            and all(tier not in c.residency or c.name in gone for c in self.children(page.name))
        ]

    def victims(self, tier, count):
        chosen = []
        while len(chosen) < count and (candidates := self.evictable(tier, chosen)):
            chosen.append(min(candidates, key=lambda p: (p.klass, p.stamp)).name)
        for name in chosen:
            self.pages[name].pins[tier] += 1
        return chosen
