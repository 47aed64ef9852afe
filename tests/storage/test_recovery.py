"""Opening what an unclean stop, a power cut or somebody's mistake left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil

import numpy as np
import pytest

from tierkv.errors import (
    CapacityError,
    NotAStoreError,
    StoreError,
    StoreReadOnlyError,
    StoreVersionError,
)
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.layout import decode_sealed, encode_sealed
from tierkv.storage.ssd import ReadStatus, SsdTier, WriteStatus
from tierkv.storage.testing import (
    TEST_NAMESPACE,
    CrashBackend,
    FaultyBackend,
    Gate,
    kill_image,
    make_page,
    page_bytes,
    page_key,
)

SIZE = 16 << 10
SLOT = SIZE + 4096
HIT, MISS, CORRUPT = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT


def put(tier, *numbers, version=0):
    return tier.put([make_page(n, SIZE, version=version) for n in numbers]).wait(20)


def read(tier, *numbers, version=0):
    outs = [aligned_empty(SIZE) for _ in numbers]
    statuses = tier.read([page_key(n) for n in numbers], outs, namespace=TEST_NAMESPACE)
    for number, out, status in zip(numbers, outs, statuses, strict=True):
        if status is HIT:
            assert np.array_equal(out, page_bytes(number, SIZE, version))
    return statuses


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


# -- unclean stops -----------------------------------------------------------------------


def test_a_killed_process_loses_no_written_page(open_tier, fast_dir):
    tier = open_tier(sync_interval_s=1000)
    put(tier, *range(10))
    tier.delete([page_key(0)])
    kill_image(fast_dir / "store", fast_dir / "image")
    again = open_tier(fast_dir / "image")
    stats = again.stats()
    assert not stats.clean_open
    assert stats.recover_seconds < 2
    assert stats.recovered_pages in (9, 10)
    assert read(again, *range(1, 10)) == [HIT] * 9


def test_the_latest_write_of_a_key_wins(open_tier, fast_dir):
    tier = open_tier()
    put(tier, 1, 2)
    tier.delete([page_key(1)])
    put(tier, 1, version=1)
    kill_image(fast_dir / "store", fast_dir / "image")
    assert read(open_tier(fast_dir / "image"), 1, version=1) == [HIT]


def test_sequence_numbers_go_on_after_a_scan(open_tier, fast_dir):
    tier = open_tier()
    put(tier, *range(5))
    highest = tier._writer._next_seq
    kill_image(fast_dir / "store", fast_dir / "image")
    again = open_tier(fast_dir / "image")
    assert again._core.next_seq == highest
    again.close()
    assert open_tier(fast_dir / "image")._core.next_seq == highest


def test_reading_needs_no_clean_shutdown(open_tier, fast_dir):
    tier = open_tier()
    put(tier, 1, 2, 3)
    kill_image(fast_dir / "store", fast_dir / "image")
    reader = open_tier(fast_dir / "image", read_only=True)
    assert read(reader, 1, 2, 3) == [HIT] * 3
    reader.close()
    (fast_dir / "image" / "index" / "data.mdb").unlink()
    reader = open_tier(fast_dir / "image", read_only=True)
    assert read(reader, 1, 2, 3) == [HIT] * 3
    assert len(list(reader.pages())) == 3
    assert not (fast_dir / "image" / "index" / "data.mdb").exists()


@pytest.mark.parametrize(
    "op", ["remove_file", "rename", "commit_index", "sync_index", "write_file"]
)
def test_recovery_may_be_interrupted_anywhere(open_tier, fast_dir, op):
    """A fault at the n-th step of opening, for every n, then a second attempt."""
    tier = open_tier()
    put(tier, *range(5))
    tier.flush()
    kill_image(fast_dir / "store", fast_dir / "image")
    for n in range(50):
        path = fast_dir / f"attempt-{n}"
        shutil.copytree(fast_dir / "image", path)
        backend = FaultyBackend()
        backend.inject(op, errno.EIO, skip=n)
        with contextlib.suppress(OSError):  # StoreError is one
            open_tier(path, backend=backend).close()
        fired = backend.fired(op)
        again = open_tier(path)
        assert read(again, *range(5)) == [HIT] * 5
        again.close()
        if not fired:
            return
    raise AssertionError("opening never ended")


# -- power cuts --------------------------------------------------------------------------


def script(tier, confirmed):
    """Put, delete and flush; note in ``confirmed`` what each flush promised."""
    live: set[int] = set()
    for round_ in range(4):
        numbers = range(round_ * 5, round_ * 5 + 5)
        put(tier, *numbers)
        live.update(numbers)
        if round_ % 2 == 0:
            victims = sorted(live)[:3]
            tier.delete([page_key(n) for n in victims])
            live.difference_update(victims)
            for earlier in confirmed:
                earlier[1].difference_update(victims)
        if tier.flush().ok:
            confirmed.append((tier._core.backend.syncs, set(live)))
    put(tier, 30, 31)


@pytest.mark.parametrize("tear", [None, 1, 2])
def test_power_cut_at_every_sync(open_tier, fast_dir, tear):
    """Whatever a flush confirmed before the cut is there; nothing wrong is ever served."""
    options = {"pages": 20, "slab_bytes": 8 * SLOT}
    counting = CrashBackend(fast_dir / "dry", fast_dir / "dry-image")
    tier = open_tier(fast_dir / "dry", backend=counting, **options)
    script(tier, [])
    tier.close()
    for cut in range(0, counting.syncs + 1, 1 if tear is None else 3):
        store, image = fast_dir / f"store-{cut}", fast_dir / f"image-{cut}"
        backend = CrashBackend(store, image, freeze_at=cut)
        tier = open_tier(store, backend=backend, **options)
        confirmed: list[tuple[int, set[int]]] = []
        script(tier, confirmed)
        tier.close()
        if tear is not None:
            backend.tear(random.Random(tear * 1000 + cut))
        promised = set().union(*(pages for syncs, pages in confirmed if syncs <= cut))
        again = open_tier(image, **options)
        statuses = dict(zip(range(32), read(again, *range(32)), strict=True))
        assert set(statuses.values()) <= {HIT, MISS}, "recovery believed a torn page"
        lost = [n for n in promised if statuses[n] is not HIT]
        assert not lost, f"cut {cut}: pages {lost} were confirmed and are gone"
        assert put(again, 40) == [WriteStatus.WRITTEN] or again.stats().free_slots == 0
        again.check()
        again.close()
        shutil.rmtree(store)
        shutil.rmtree(image)


def test_a_flush_after_a_kill_covers_what_the_dead_process_wrote(open_tier, fast_dir):
    """The scan finds pages that were never synced; a flush that counts them must be true."""
    dead = CrashBackend(fast_dir / "store", fast_dir / "image")
    faults = FaultyBackend(dead)
    tier = open_tier(backend=faults)
    put(tier, 1)
    assert tier.flush().ok
    gate = Gate()
    faults.inject("fdatasync", gate)
    ticket = tier.put([make_page(2, SIZE)])
    assert gate.reached.wait(20)
    kill_image(fast_dir / "store", fast_dir / "killed")
    shutil.copytree(fast_dir / "image", fast_dir / "power")
    heir = CrashBackend(fast_dir / "killed", fast_dir / "power", inherit=dead)
    gate.opened.set()
    assert ticket.wait(20)
    again = open_tier(fast_dir / "killed", backend=heir)
    assert read(again, 1, 2) == [HIT, HIT]
    assert again.flush().pages == 2
    shutil.copytree(fast_dir / "power", fast_dir / "cut")
    assert read(open_tier(fast_dir / "cut"), 1, 2) == [HIT, HIT]


def test_what_a_failed_write_left_is_not_believed(open_tier, fast_dir):
    """A header without its payload, and good writes after it, then a kill."""
    backend = FaultyBackend()
    tier = open_tier(pages=8, slab_bytes=4 * SLOT, backend=backend)
    put(tier, 1)
    backend.inject("pwritev", "short")
    backend.inject("pwritev", errno.EIO)
    assert put(tier, 2) == [WriteStatus.FAILED]
    for number in range(3, 6):
        assert put(tier, number) == [WriteStatus.WRITTEN]
    kill_image(fast_dir / "store", fast_dir / "image")
    again = open_tier(fast_dir / "image", pages=8, slab_bytes=4 * SLOT)
    assert read(again, *range(1, 6)) == [HIT, MISS, HIT, HIT, HIT]
    tier.close()
    later = open_tier(pages=8, slab_bytes=4 * SLOT)
    assert later.stats().clean_open
    assert put(later, 6) == [WriteStatus.WRITTEN]
    kill_image(fast_dir / "store", fast_dir / "second")
    again = open_tier(fast_dir / "second", pages=8, slab_bytes=4 * SLOT)
    assert read(again, *range(1, 7)) == [HIT, MISS, HIT, HIT, HIT, HIT]


# -- damage ------------------------------------------------------------------------------


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

    space = slabs.DiskSpace(free=4 * SLOT, total=100 * SLOT)
    monkeypatch.setattr(slabs, "disk_space", lambda path: space)
    tier = open_tier(pages=50)
    assert tier.capacity_pages == 3, "four slots, less the reserve of one"
    assert "instead of" in caplog.text
    tier.close()
    monkeypatch.setattr(slabs, "disk_space", lambda path: slabs.DiskSpace(SLOT, 100 * SLOT))
    with pytest.raises(CapacityError, match="reserved"):
        open_tier(slot_payload_bytes=SIZE, pages=50)


def test_a_read_only_filesystem_says_what_to_do(fast_dir, open_tier, monkeypatch):
    def refuse(path, mode=0o777, exist_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(StoreReadOnlyError, match="read_only=True"):
        open_tier()


def test_sealed_json_is_what_the_format_says(closed_store):
    line, checksum, end = (closed_store / "meta").read_bytes().split(b"\n")
    meta = json.loads(line)
    assert meta["kind"] == "tierkv-store"
    assert [s["id"] for s in meta["slabs"]] == [0, 1]
    assert len(checksum) == 16
    assert end == b""


# -- n-th fault --------------------------------------------------------------------------

OPS = ["open", "preadv", "pwritev", "fdatasync", "fallocate", "commit_index", "sync_index"]
OPS += ["write_file", "remove_file", "rename"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("times", [1, None])
def test_every_nth_fault(open_tier, fast_dir, op, number, times):
    """The n-th call fails, once or for good, for every n: no crash, nothing wrong, all told."""
    for n in range(0, 60, 1 if op not in ("preadv", "pwritev") else 4):
        path = fast_dir / f"run-{n}"
        backend = FaultyBackend()
        backend.inject(op, number, skip=n, times=times)
        promised = run_script(path, backend)
        fired = backend.fired(op)
        again = open_tier(path, pages=8, slab_bytes=4 * SLOT)
        statuses = dict(zip(range(12), read(again, *range(12)), strict=True))
        assert all(statuses[k] is HIT for k in promised), f"n={n}: {promised} {statuses}"
        assert all(s in (HIT, MISS) for s in statuses.values())
        again.check()
        again.close()
        shutil.rmtree(path)
        if not fired:
            return
    assert times is None or op in ("preadv", "pwritev"), "the script never ran through"


def run_script(path, backend) -> set[int]:
    """Use a tier through a fault; return what it promised."""
    promised: set[int] = set()
    try:
        tier = SsdTier.open(
            path,
            capacity_bytes=8 * SLOT,
            slot_payload_bytes=SIZE,
            slab_bytes=4 * SLOT,
            backend=backend,
        )
    except OSError:
        return promised
    with tier:
        for first in (0, 4, 8):
            numbers = range(first, first + 4)
            statuses = put(tier, *numbers)
            written = {
                n for n, s in zip(numbers, statuses, strict=True) if s is WriteStatus.WRITTEN
            }
            if tier.flush(20).ok:
                promised |= written
            read(tier, *range(12))
            dropped = set(tier.take_removed())
            promised = {n for n in promised if page_key(n) not in dropped}
            if first == 0:
                tier.delete([page_key(0), page_key(1)])
                promised -= {0, 1}
        tier.check()
    return promised
