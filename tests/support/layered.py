"""Specs whose layers can be read alone, and stores whose pages lie on disk only."""

from __future__ import annotations

import threading
from functools import partial
from itertools import count

import pytest
from step_disk import StepDisk
from toy_model import full_group, sliding_group, turn

from tierkv import CacheSpec
from tierkv.storage.ssd import SsdTier

# Layers of 4 KiB, so that each can be a part of its own.
FULL = CacheSpec(groups=(full_group(layers=(0, 1, 2, 3), page_tokens=8),))
MIXED = CacheSpec(
    groups=(
        full_group(layers=(0, 2, 4), page_tokens=8),
        sliding_group(layers=(1, 3, 5), page_tokens=4, window=10),
    )
)
SPECS = {"full": FULL, "mixed": MIXED}
TOKENS = [(5 * i) % 31 for i in range(29)]  # three pages and a tail of 5


@pytest.fixture(name="disk")
def stepped_disk(monkeypatch):
    """The backend of every SSD tier opened in the test; one read at a time, in order."""
    backend = StepDisk()
    opened = partial(SsdTier.open, backend=backend, io_threads=1)
    monkeypatch.setattr("tierkv.data_plane.opening.SsdTier.open", opened)
    monkeypatch.setattr("tierkv.storage.reader.EXTRA_THREADS", 0)
    yield backend
    backend.free()
    backend.clear()


@pytest.fixture
def reopen(open_store, tmp_path, disk):
    """A new store with conversations on disk only, whose pages are read in parts."""
    paths = (tmp_path / f"s{number}" for number in count())

    def make(spec, *talks, layers=1, **options):
        path = next(paths)
        store = open_store(spec, path=path, disk=200, codec=options.get("codec", "raw"))
        for tokens in talks or (TOKENS,):
            turn(store, tokens)
        store.close()
        store = open_store(spec, path=path, disk=200, **options)
        store._transfers.reads.part_bytes = layers * 4096
        return store

    return make


def reads_of(store):
    """Return the reads under way."""
    with store._core.lock:
        return list(dict.fromkeys(store._transfers.reads._under_way.values()))


def parts_of(store):
    """Return the parts of the only read under way."""
    (read,) = reads_of(store)
    return read.parts


def held(store):
    """Return the slots held by tier, once what is over has been taken in."""
    with store._core.lock:
        store._transfers._reap()
    store.check()
    stats = store.stats()
    return {tier: stats.tiers[tier].held for tier in ("device", "host")}


def nothing_is_held(store):
    """Check that no slot is held and no page pinned, once the disk has let go of its reads."""
    pause = threading.Event()
    for _ in range(5000):
        if held(store) == {"device": 0, "host": 0}:
            break
        pause.wait(0.001)
    assert held(store) == {"device": 0, "host": 0}
    assert all(store.stats().tiers[tier].pinned == 0 for tier in ("device", "host"))


def wait_for_disk(store):
    """Wait until the disk is done with every read."""
    for read in reads_of(store):
        for part in read.parts:
            assert part.wait(20)
