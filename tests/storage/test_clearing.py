"""Emptying a store, whole or interrupted at any of its steps."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tierkv.errors import NotAStoreError, StoreLockedError, StoreVersionError
from tierkv.storage.clearing import clear_directory
from tierkv.storage.layout import decode_sealed, encode_sealed
from tierkv.storage.ssd import ReadStatus
from tierkv.storage.testing import FaultyBackend, make_page, page_bytes, page_key

SIZE = 16 << 10
OPERATIONS = ("remove_file", "write_file")


def fill(tier, pages: int = 10) -> None:
    tier.put([make_page(n, SIZE) for n in range(pages)])
    assert tier.flush(30).ok


def test_clearing_removes_pages_and_gives_the_space_back(open_tier, fast_dir) -> None:
    with open_tier(slab_bytes=4 * (SIZE + 4096)) as tier:
        fill(tier)
        slabs = tier.stats().slabs
    report = clear_directory(fast_dir / "store")
    assert report.slabs == slabs > 1
    assert list((fast_dir / "store" / "slabs").iterdir()) == []
    with open_tier() as tier:
        assert tier.contains([page_key(n) for n in range(10)]) == [False] * 10
        fill(tier)
    assert clear_directory(fast_dir / "store").slabs > 0
    assert clear_directory(fast_dir / "store").slabs == 0


def test_clearing_refuses_a_store_in_use(open_tier, fast_dir) -> None:
    with open_tier() as tier:
        fill(tier)
        with pytest.raises(StoreLockedError):
            clear_directory(fast_dir / "store")
        assert all(tier.contains([page_key(n) for n in range(10)]))


def test_clearing_refuses_what_is_no_store(tmp_path) -> None:
    (tmp_path / "slabs").mkdir()
    (tmp_path / "slabs" / "0000").write_bytes(b"somebody's")
    with pytest.raises(NotAStoreError):
        clear_directory(tmp_path)
    assert (tmp_path / "slabs" / "0000").exists()


def test_clearing_leaves_files_that_are_not_ours_and_another_version_alone(
    open_tier, fast_dir
) -> None:
    store = fast_dir / "store"
    with open_tier() as tier:
        fill(tier)
    (store / "notes").write_text("keep me")
    clear_directory(store)
    assert (store / "notes").read_text() == "keep me"
    meta = decode_sealed((store / "meta").read_bytes())
    assert meta is not None
    (store / "meta").write_bytes(encode_sealed({**meta, "version": 9}))
    with pytest.raises(StoreVersionError):
        clear_directory(store)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_clearing_interrupted_at_any_step_leaves_a_store_that_opens(
    open_tier, fast_dir, operation
) -> None:
    for step in range(30):
        with open_tier(slab_bytes=4 * (SIZE + 4096)) as tier:
            fill(tier)
        backend = FaultyBackend()
        backend.inject(operation, errno.EIO, skip=step, times=None)
        try:
            clear_directory(fast_dir / "store", backend=backend)
            finished = True
        except OSError:
            finished = False
        with open_tier() as tier:
            out = np.empty(SIZE, np.uint8)
            for n in range(10):
                if tier.read([page_key(n)], [out]) == [ReadStatus.HIT]:
                    assert np.array_equal(out, page_bytes(n, SIZE))
            tier.check()
        if finished and not backend.calls[operation] > step:
            return
    raise AssertionError("clearing never ran to its end")
