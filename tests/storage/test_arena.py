"""The host arena: slots of memory, and a clear refusal when there is not enough."""

from __future__ import annotations

import numpy as np
import pytest

import tierkv.storage.arena as arena_module
from tierkv.errors import CapacityError, InvalidInputError, StoreClosedError
from tierkv.storage.arena import HostArena

SLOT = 8192


@pytest.fixture
def arena():
    with_slots = HostArena(4, SLOT)
    yield with_slots
    with_slots.close()


def test_pages_come_back(arena):
    pages = [np.full(SLOT, n, np.uint8) for n in range(3)]
    pages[1] = pages[1][:100]
    arena.save([3, 0, 1], pages)
    outs = [np.zeros(p.nbytes, np.uint8) for p in pages]
    arena.load([3, 0, 1], outs)
    for page, out in zip(pages, outs, strict=True):
        assert np.array_equal(page, out)
    stats = arena.stats()
    assert (stats.saved_pages, stats.loaded_pages) == (3, 3)
    assert stats.saved_bytes == stats.loaded_bytes == 2 * SLOT + 100
    arena.check()


def test_slots_are_aligned_and_disjoint(arena):
    for n in range(4):
        assert arena.slot(n).__array_interface__["data"][0] % 4096 == 0
        arena.slot(n)[:] = n
    assert [int(arena.slots[n].sum()) for n in range(4)] == [n * SLOT for n in range(4)]


def test_slots_are_views(arena):
    arena.slot(2)[5] = 9
    assert arena.slots[2, 5] == 9


@pytest.mark.parametrize("args", [(0, SLOT), (-1, SLOT), (1, 0), (1, 100), (1, 4097)])
def test_impossible_shapes(args):
    with pytest.raises(InvalidInputError):
        HostArena(*args)


@pytest.mark.parametrize("index", [-1, 4])
def test_slots_that_do_not_exist(arena, index):
    with pytest.raises(InvalidInputError, match="no slot"):
        arena.slot(index)


def test_pages_that_do_not_fit(arena):
    for page in (np.zeros(SLOT + 1, np.uint8), np.zeros(8, np.float32), np.zeros((2, 4), np.uint8)):
        with pytest.raises(InvalidInputError):
            arena.save([0], [page])
    with pytest.raises(InvalidInputError):
        arena.load([0, 1], [np.zeros(8, np.uint8)])


def test_more_than_the_machine_has():
    with pytest.raises(CapacityError, match="give the host tier less"):
        HostArena(1 << 30, 1 << 20)


def test_the_control_group_counts(monkeypatch):
    monkeypatch.setattr(arena_module, "_cgroup_left", lambda: [300 << 20])
    HostArena(1, SLOT).close()
    with pytest.raises(CapacityError, match="control group"):
        HostArena(100, 1 << 20)


def test_pinning_sees_the_whole_arena_once():
    seen = []
    arena = HostArena(2, SLOT, pin=lambda area: seen.append(len(area)))
    assert seen == [2 * SLOT]
    assert arena.stats().pinned
    arena.close()


def test_pinning_that_fails_is_the_callers_to_handle():
    def refuse(area: memoryview) -> None:
        raise OSError("not enough lockable memory")

    with pytest.raises(OSError, match="lockable"):
        HostArena(2, SLOT, pin=refuse)


def test_closed():
    arena = HostArena(2, SLOT)
    view = arena.slot(0)
    arena.close()
    arena.close()
    view[:] = 1  # a view keeps its memory
    with pytest.raises(StoreClosedError):
        arena.slot(0)
