"""Looking at directories and clearing them."""

from __future__ import annotations

import asyncio

import pytest

from tierkv.errors import NotAStoreError, StoreLockedError
from tierkv.storage.admin import (
    clear_directory,
    clear_directory_async,
    inspect_directory,
    inspect_directory_async,
    verify_async,
)
from tierkv.storage.layout import decode_sealed, encode_sealed
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


def test_clear_removes_a_store_and_nothing_else(store):
    (store / "notes").write_text("keep me")
    assert clear_directory(store) > 3 * SIZE
    assert [p.name for p in store.iterdir()] == ["notes"]


def test_clear_removes_the_directory_when_it_is_empty(store):
    clear_directory(store)
    assert not store.exists()


def test_clear_refuses_an_open_store(open_tier, fast_dir):
    tier = open_tier()
    with pytest.raises(StoreLockedError):
        clear_directory(fast_dir / "store")
    assert tier.put([make_page(1, SIZE)]).wait(20)


def test_clear_refuses_what_is_no_store(fast_dir):
    (fast_dir / "thesis").write_text("x")
    for path in (fast_dir, fast_dir / "nowhere"):
        with pytest.raises(NotAStoreError, match="nothing was removed"):
            clear_directory(path)
    assert (fast_dir / "thesis").exists()


def test_clear_accepts_another_version(store):
    value = decode_sealed((store / "meta").read_bytes())
    (store / "meta").write_bytes(encode_sealed({**value, "version": 9}))
    assert not inspect_directory(store).is_store
    clear_directory(store)
    assert not store.exists()


def test_async_forms(open_tier, store):
    async def visit() -> None:
        tier = open_tier()
        assert (await verify_async(tier)).pages == 3
        tier.close()
        assert (await inspect_directory_async(store)).is_store
        assert await clear_directory_async(store) > 0
        assert not (await inspect_directory_async(store)).is_store

    asyncio.run(visit())
