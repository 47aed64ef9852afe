"""Opening what an unclean stop, a power cut or somebody's mistake left behind."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil

import pytest
from small_tier import HIT, MISS, SIZE, SLOT, put, read

from tierkv.storage.ssd import SsdTier, WriteStatus
from tierkv.storage.testing import (
    CrashBackend,
    FaultyBackend,
    Gate,
    kill_image,
    make_page,
    page_key,
)

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
