"""Looking at directories and clearing them."""

from __future__ import annotations

import asyncio

import pytest

from tierkv.storage.admin import (
    clear_directory_async,
    inspect_directory,
    inspect_directory_async,
    verify_async,
)
from tierkv.storage.testing import make_page

SIZE = 16 << 10


@pytest.fixture
def store(open_tier, fast_dir):
    tier = open_tier()
    tier.put([make_page(n, SIZE) for n in range(3)]).wait(20)
    tier.close()
    return fast_dir / "store"


def test_inspect_a_closed_store(store):
    info = inspect_directory(store)
    assert info.is_store
    assert info.clean
    assert not info.locked
    assert info.slabs == 1
    assert info.slot_bytes == (SIZE + 4096,)
    assert info.slab_bytes >= 16 * (SIZE + 4096)
    assert info.total_bytes >= info.slab_bytes + info.index_bytes > info.slab_bytes


def test_inspect_an_open_store(open_tier, fast_dir):
    open_tier()
    info = inspect_directory(fast_dir / "store")
    assert info.locked
    assert not info.clean
    assert info.owner.pid


def test_inspect_what_is_no_store(fast_dir):
    assert inspect_directory(fast_dir / "nowhere").problem == "no such directory"
    (fast_dir / "file").write_text("x")
    info = inspect_directory(fast_dir)
    assert not info.is_store
    assert "no meta file" in info.problem
    assert info.unknown_files == ("file",)


def test_async_forms(open_tier, store):
    async def visit() -> None:
        tier = open_tier()
        assert (await verify_async(tier)).pages == 3
        tier.close()
        assert (await inspect_directory_async(store)).is_store
        assert (await clear_directory_async(store)).slabs == 1
        assert (await inspect_directory_async(store)).slabs == 0

    asyncio.run(visit())
