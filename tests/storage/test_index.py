"""The index's guards: cut, flipped and full LMDB files, in processes that may die."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import lmdb
import pytest

from tierkv.errors import StoreError
from tierkv.storage.backend import OsBackend
from tierkv.storage.committer import _is_no_space
from tierkv.storage.format import PageInfo, decode_record, encode_record
from tierkv.storage.index import IndexDamagedError, LmdbIndex, write_index
from tierkv.storage.memory_index import MemoryIndex
from tierkv.storage.testing import make_page, page_key

SIZE = 16 << 10


def record(number: int, slot: int | None = None):
    from tierkv.storage.format import IndexRecord

    info = PageInfo(page_key(number), bytes(32), end_token=number)
    return IndexRecord(info, 0, number if slot is None else slot, number, 10, 10, 0, 0, b"h" * 8)


def add(index, *numbers):
    records = [record(n) for n in numbers]
    index.commit(put=[encode_record(r) for r in records], keys=[r.info.key for r in records])


def numbers_in(index):
    found = [decode_record(k, v) for k, v in index.records()]
    return sorted(r.info.end_token for r in found)


@pytest.fixture
def path(fast_dir):
    (fast_dir / "index").mkdir()
    return str(fast_dir / "index")


@pytest.fixture
def index(path):
    opened = LmdbIndex(path, OsBackend())
    yield opened
    opened.close()


def test_records_come_back(index):
    add(index, 1, 2, 3)
    assert index.get(page_key(2)) == record(2)
    assert index.get(page_key(9)) is None
    index.commit(delete=[page_key(2), page_key(9)])
    assert numbers_in(index) == [1, 3]


def test_usage(index):
    add(index, 1, 2)
    index.commit(usage={page_key(1): (3, 4), page_key(9): (1, 1)})
    assert index.usage([page_key(1), page_key(2), page_key(9)]) == [(3, 4), (0, 0), (0, 0)]
    index.commit(delete=[page_key(1)])
    assert index.usage([page_key(1)]) == [(0, 0)]


def test_iteration_in_batches_sees_every_record(index, monkeypatch):
    monkeypatch.setattr("tierkv.storage.index._SCAN_BATCH", 7)
    add(index, *range(50))
    assert numbers_in(index) == list(range(50))


def test_records_may_change_while_they_are_read(index, monkeypatch):
    monkeypatch.setattr("tierkv.storage.index._SCAN_BATCH", 5)
    add(index, *range(20))
    seen = 0
    for key, _ in index.records():
        seen += 1
        index.commit(delete=[key])
    assert seen == 20
    assert numbers_in(index) == []


def test_a_full_map_grows(path):
    index = LmdbIndex(path, OsBackend(), map_bytes=64 << 10)
    try:
        before = index.map_bytes
        for first in range(0, 2000, 100):
            add(index, *range(first, first + 100))
        assert index.map_bytes > before
        assert len(numbers_in(index)) == 2000
    finally:
        index.close()


def test_a_map_at_its_bound_is_an_error(path):
    index = LmdbIndex(path, OsBackend(), map_bytes=1 << 18, max_map_bytes=1 << 18)
    try:
        with pytest.raises(lmdb.MapFullError):
            add(index, *range(10000))
        assert numbers_in(index) == []
        add(index, 1)
        assert numbers_in(index) == [1]
    finally:
        index.close()


def test_a_full_map_in_a_tier_is_invisible(open_tier, monkeypatch):
    monkeypatch.setattr("tierkv.storage.index.START_MAP_BYTES", 64 << 10)
    tier = open_tier(pages=400, slot_payload_bytes=4096)
    statuses = tier.put([make_page(n, 4096) for n in range(400)]).wait(20)
    assert {str(s) for s in statuses} == {"written"}


def test_a_short_file_is_padded_not_refused(index, path):
    """LMDB may leave pages at the end unwritten that a transaction took and gave back."""
    for first in range(0, 600, 30):
        add(index, *range(first, first + 30))
        index.commit(delete=[page_key(n) for n in range(first, first + 25)])
        assert os.path.getsize(os.path.join(path, "data.mdb")) >= index.head().file_bytes


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.9])
def test_a_cut_file_is_noticed_before_lmdb_dies_of_it(path, share):
    index = LmdbIndex(path, OsBackend())
    add(index, *range(500))
    index.sync()
    index.close()
    data = os.path.join(path, "data.mdb")
    os.truncate(data, int(os.path.getsize(data) * share))
    with pytest.raises(IndexDamagedError):
        LmdbIndex(path, OsBackend())


def test_a_file_cut_while_open_is_noticed(index, path):
    add(index, *range(500))
    os.truncate(os.path.join(path, "data.mdb"), 8192)
    for call in (
        lambda: index.get(page_key(1)),
        lambda: add(index, 600),
        lambda: list(index.records()),
    ):
        with pytest.raises(IndexDamagedError, match="cut to"):
            call()


def test_a_missing_file_is_no_index_to_read(path):
    with pytest.raises(IndexDamagedError, match="missing"):
        LmdbIndex(path, OsBackend(), read_only=True)


def test_write_index_in_one_go(fast_dir):
    path = str(fast_dir / "new")
    write_index(path, OsBackend(), [record(n) for n in range(5000)])
    index = LmdbIndex(path, OsBackend(), read_only=True)
    try:
        assert numbers_in(index) == list(range(5000))
    finally:
        index.close()


def test_the_memory_twin_answers_alike(index):
    twin = MemoryIndex(record(n) for n in range(20))
    add(index, *range(20))
    assert list(twin.records()) == list(index.records())
    assert twin.get(page_key(3)) == index.get(page_key(3))
    assert twin.get(page_key(99)) is None
    assert twin.usage([page_key(1)]) == index.usage([page_key(1)])
    twin.close()


def test_the_index_is_empty_after_close(path):
    index = LmdbIndex(path, OsBackend())
    index.close()
    index.close()
    with pytest.raises(IndexDamagedError, match="closed"):
        index.get(page_key(1))


# -- random damage, in processes of their own --------------------------------------------

VISITOR = """
import sys, json
import numpy as np
from tierkv.storage.ssd import SsdTier
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.testing import page_key, page_bytes
size = 4096
for path in sys.argv[1:]:
    tier = SsdTier.open(path, capacity_bytes=300 * 8192, slot_payload_bytes=size)
    outs = [aligned_empty(size) for _ in range(300)]
    statuses = tier.read([page_key(n) for n in range(300)], outs)
    wrong = [n for n, (s, o) in enumerate(zip(statuses, outs)) if s == "hit"
             and not np.array_equal(o, page_bytes(n, size))]
    hits = sum(s == "hit" for s in statuses)
    tier.check()
    tier.close()
    print(json.dumps({"path": path, "wrong": wrong, "hits": hits}), flush=True)
"""


@pytest.fixture
def image(open_tier, fast_dir):
    tier = open_tier(fast_dir / "image", capacity_bytes=300 * 8192, slot_payload_bytes=4096)
    assert tier.put([make_page(n, 4096) for n in range(300)]).wait(20)
    tier.close()
    return fast_dir / "image"


def visit(*paths) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(VISITOR), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def damage(kind: str, data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    if kind == "bit":
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        for _ in range(16):
            out[rng.randrange(len(out))] = rng.randrange(256)
    elif kind == "page":
        at = rng.randrange(len(out) // 4096) * 4096
        out[at : at + 4096] = bytes(4096)
    else:
        del out[rng.randrange(len(out)) :]
    return bytes(out)


@pytest.mark.parametrize("kind", ["bit", "bytes", "page", "cut"])
@pytest.mark.parametrize("clean", [True, False])
def test_random_damage_to_the_index_costs_nothing(image, fast_dir, kind, clean):
    """Every page is found and right whatever happens to data.mdb, and no process dies."""
    rng = random.Random(f"{kind}{clean}")
    paths = []
    for n in range(6):
        path = fast_dir / f"damaged-{n}"
        shutil.copytree(image, path)
        data = path / "index" / "data.mdb"
        data.write_bytes(damage(kind, data.read_bytes(), rng))
        if not clean:
            (path / "clean").unlink()
        paths.append(path)
    result = visit(*paths)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count('"wrong": [], "hits": 300') == len(paths), result.stdout


# -- a full filesystem -------------------------------------------------------------------


def test_the_lock_file_has_blocks_of_its_own(tmp_path):
    """A sparse one is written through a memory map and kills the process on a full disk."""
    write_index(str(tmp_path / "index"), OsBackend(), [record(1)])
    assert os.stat(tmp_path / "index" / "lock.mdb").st_blocks * 512 >= 8192


def test_no_space_for_the_lock_file_is_an_error(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="no space left"):
        write_index(str(tmp_path / "index"), OsBackend(), [record(1)])


@pytest.mark.parametrize(("free_blocks", "full"), [(0, True), (1 << 20, False)])
def test_an_io_error_of_lmdb_on_a_full_filesystem_means_no_space(monkeypatch, free_blocks, full):
    space = SimpleNamespace(f_bavail=free_blocks, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: space)
    error = lmdb.Error("mdb_txn_commit: Input/output error")
    assert _is_no_space(error, "anywhere") is full
