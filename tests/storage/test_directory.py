"""Opening directories that are damaged, foreign, of another version, or too large for the disk."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil

import pytest
from small_tier import CORRUPT, HIT, MISS, SIZE, SLOT, put, read

from tierkv.errors import (
    CapacityError,
    NotAStoreError,
    StoreError,
    StoreReadOnlyError,
    StoreVersionError,
)
from tierkv.storage.layout import decode_sealed, encode_sealed
from tierkv.storage.ssd import WriteStatus
from tierkv.storage.testing import (
    page_key,
)


@pytest.fixture
def closed_store(open_tier, fast_dir):
    """A cleanly closed store with pages 0 to 5, over two slabs."""
    tier = open_tier(pages=8, slab_bytes=4 * SLOT)
    put(tier, *range(6))
    assert tier.close()
    return fast_dir / "store"


@pytest.fixture
def reopen(open_tier):
    return lambda **options: open_tier(pages=8, slab_bytes=4 * SLOT, **options)


def test_missing_slab(closed_store, reopen):
    (closed_store / "slabs" / "0000").unlink()
    tier = reopen()
    assert sorted(tier.take_removed()) == sorted(page_key(n) for n in range(4))
    assert read(tier, *range(6)) == [MISS] * 4 + [HIT] * 2
    tier.check()
    assert put(tier, *range(4)) == [WriteStatus.WRITTEN] * 4


@pytest.mark.parametrize("size", [0, 1, 4096, 4 * SLOT - 1, 4 * SLOT + 1])
def test_slab_of_the_wrong_size(closed_store, reopen, size):
    os.truncate(closed_store / "slabs" / "0000", size)
    tier = reopen()
    assert read(tier, *range(6)) == [MISS] * 4 + [HIT] * 2
    assert put(tier, 0) == [WriteStatus.WRITTEN]


@pytest.mark.parametrize("clean", [True, False])
def test_slab_of_another_store(closed_store, reopen, open_tier, fast_dir, clean):
    other = open_tier(fast_dir / "other", pages=8, slab_bytes=4 * SLOT)
    put(other, *range(6), version=7)
    other.close()
    shutil.copyfile(fast_dir / "other" / "slabs" / "0000", closed_store / "slabs" / "0000")
    if not clean:
        (closed_store / "clean").unlink()
    tier = reopen()
    statuses = read(tier, *range(6))
    assert statuses == [CORRUPT if clean else MISS] * 4 + [HIT] * 2
    assert put(tier, 0) == [WriteStatus.WRITTEN]
    assert read(tier, 0) == [HIT]


def test_unknown_files_are_left_alone_and_reported(closed_store, reopen):
    (closed_store / "readme").write_text("hello")
    (closed_store / "slabs" / "backup").write_text("hello")
    tier = reopen()
    assert sorted(tier.verify().unknown_files) == ["readme", "slabs/backup"]
    tier.close()
    assert (closed_store / "readme").exists()
    assert (closed_store / "slabs" / "backup").exists()


def test_leftovers_of_a_crash_are_removed(closed_store, reopen):
    (closed_store / "slabs" / "0002").write_bytes(bytes(100))
    (closed_store / "slabs" / "0007.new").write_bytes(bytes(100))
    tier = reopen()
    assert sorted(p.name for p in (closed_store / "slabs").iterdir()) == ["0000", "0001"]
    assert read(tier, *range(6)) == [HIT] * 6


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "no lock file", "no directory"])
def test_unusable_index(closed_store, reopen, how):
    data = closed_store / "index" / "data.mdb"
    if how == "missing":
        data.unlink()
    elif how == "empty":
        data.write_bytes(b"")
    elif how == "garbage":
        data.write_bytes(random.Random(1).randbytes(data.stat().st_size))
    elif how == "no lock file":
        (closed_store / "index" / "lock.mdb").unlink()
    else:
        shutil.rmtree(closed_store / "index")
    tier = reopen()
    assert read(tier, *range(6)) == [HIT] * 6
    assert tier.stats().clean_open is (how == "no lock file")
    tier.check()


def test_an_older_index_is_noticed(open_tier, fast_dir):
    tier = open_tier()
    put(tier, 1, 2)
    tier.close()
    store = fast_dir / "store"
    shutil.copytree(store / "index", fast_dir / "old")
    tier = open_tier()
    put(tier, 3)
    tier.delete([page_key(1)])
    tier.close()
    shutil.rmtree(store / "index")
    shutil.copytree(fast_dir / "old", store / "index")
    tier = open_tier()
    assert not tier.stats().clean_open
    assert read(tier, 2, 3) == [HIT, HIT]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, b'{"txnid": 1}\n0\n'])
def test_damaged_clean_marker(closed_store, reopen, content):
    (closed_store / "clean").write_bytes(content)
    tier = reopen()
    assert not tier.stats().clean_open
    assert read(tier, *range(6)) == [HIT] * 6


def change_meta(store, **changes):
    value = decode_sealed((store / "meta").read_bytes())
    (store / "meta").write_bytes(encode_sealed({**value, **changes}))


@pytest.mark.parametrize("changes", [{"version": 2}, {"version": 0}, {"lmdb": "1.0"}])
@pytest.mark.parametrize("read_only", [False, True])
def test_another_version_is_refused_and_nothing_changed(closed_store, reopen, changes, read_only):
    change_meta(closed_store, **changes)
    before = {
        p: p.read_bytes() for p in closed_store.rglob("*") if p.is_file() and p.name != "lock"
    }
    with pytest.raises(StoreVersionError, match="nothing was changed"):
        reopen(read_only=read_only)
    assert all(p.read_bytes() == data for p, data in before.items())


@pytest.mark.parametrize("content", [b"", b"not json", b'{"kind": "tierkv-store"}\n', b"\0" * 500])
def test_damaged_meta_is_refused(closed_store, reopen, content):
    (closed_store / "meta").write_bytes(content)
    with pytest.raises(NotAStoreError, match="meta"):
        reopen()
    assert (closed_store / "slabs" / "0000").exists()


def test_a_foreign_directory_is_refused(fast_dir, open_tier):
    (fast_dir / "home").mkdir()
    (fast_dir / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(NotAStoreError, match="not a tierkv store"):
        open_tier(fast_dir / "home")
    assert [p.name for p in (fast_dir / "home").iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError):
        open_tier(fast_dir / "home" / "thesis.tex")


def test_an_unfinished_creation_is_finished(fast_dir, open_tier):
    (fast_dir / "store" / "slabs").mkdir(parents=True)
    (fast_dir / "store" / "lock").write_text("")
    tier = open_tier()
    assert put(tier, 1) == [WriteStatus.WRITTEN]


def test_read_only_creates_nothing(fast_dir, open_tier):
    with pytest.raises(NotAStoreError, match="no such directory"):
        open_tier(read_only=True)
    (fast_dir / "store").mkdir()
    with pytest.raises(NotAStoreError, match="not a tierkv store"):
        open_tier(read_only=True)
    assert list((fast_dir / "store").iterdir()) == []


def test_capacity_beyond_the_disk_is_refused(open_tier):
    with pytest.raises(CapacityError, match="in all"):
        open_tier(capacity_bytes=1 << 60)
    with pytest.raises(CapacityError, match="cannot hold one page"):
        open_tier(capacity_bytes=SIZE)


def test_capacity_beyond_the_free_space_is_cut(open_tier, monkeypatch, caplog):
    import tierkv.storage.slabs as slabs

    space = slabs.DiskSpace(free=5 * SLOT, total=100 * SLOT)
    monkeypatch.setattr(slabs, "disk_space", lambda path: space)
    tier = open_tier(pages=50)
    assert tier.capacity_pages == 3, "five slots, less the reserve of two"
    assert "instead of" in caplog.text
    tier.close()
    monkeypatch.setattr(slabs, "disk_space", lambda path: slabs.DiskSpace(SLOT, 100 * SLOT))
    with pytest.raises(CapacityError, match="reserved"):
        open_tier(slot_payload_bytes=SIZE, pages=50)


def test_a_read_only_filesystem_says_what_to_do(fast_dir, open_tier, monkeypatch):
    def refuse(path, mode=0o777, exist_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(StoreReadOnlyError, match="read-only filesystem"):
        open_tier()


def test_sealed_json_is_what_the_format_says(closed_store):
    line, checksum, end = (closed_store / "meta").read_bytes().split(b"\n")
    meta = json.loads(line)
    assert meta["kind"] == "tierkv-store"
    assert [s["id"] for s in meta["slabs"]] == [0, 1]
    assert len(checksum) == 16
    assert end == b""
