"""Real faults on a real filesystem: a small ext4 image, filled, cut off and remounted."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from tierkv.errors import CapacityError, StoreReadOnlyError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus, WriteStatus
from tierkv.storage.testing import TEST_NAMESPACE, make_page, page_bytes, page_key

pytestmark = pytest.mark.slow

SIZE = 256 << 10
SLOT = SIZE + 4096
EXT4_SHUTDOWN = 0x8004587D
HIT, MISS = ReadStatus.HIT, ReadStatus.MISS


def run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)


def mount(image: Path, target: Path, *options: str) -> None:
    run("mount", "-o", ",".join(("loop", *options)), image, target)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A mounted ext4 filesystem of 64 MiB, and its image file."""
    if os.getuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    file, target = tmp_path / "disk.img", tmp_path / "disk"
    target.mkdir()
    with file.open("wb") as handle:
        handle.truncate(64 << 20)
    try:
        run("mkfs.ext4", "-q", "-F", "-m", "0", file)
        mount(file, target)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"loop mounts are refused here: {error.stderr.decode().strip()}")
    try:
        yield file, target
    finally:
        subprocess.run(["umount", str(target)], check=False, capture_output=True, timeout=60)
        used = subprocess.run(
            ["losetup", "-j", str(file)], check=False, capture_output=True, text=True, timeout=60
        )
        assert not used.stdout, "a loop device is left behind"


def put(tier, *numbers):
    return tier.put([make_page(n, SIZE) for n in numbers]).wait(60)


def read(tier, *numbers):
    outs = [aligned_empty(SIZE) for _ in numbers]
    statuses = tier.read([page_key(n) for n in numbers], outs, namespace=TEST_NAMESPACE)
    for number, out, status in zip(numbers, outs, statuses, strict=True):
        if status is HIT:
            assert np.array_equal(out, page_bytes(number, SIZE))
    return statuses


def fill(file: BinaryIO) -> None:
    """Write until the filesystem is full."""
    try:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def test_a_full_disk(image, open_tier):
    """Slabs cannot be had, pages are refused, hits are served; it recovers with space."""
    _, target = image
    options = {"slot_payload_bytes": SIZE, "capacity_bytes": 32 << 20, "slab_bytes": 8 * SLOT}
    tier = open_tier(target / "store", **options)
    assert tier.stats().direct
    assert put(tier, *range(8)) == [WriteStatus.WRITTEN] * 8
    ballast = target / "ballast"
    with ballast.open("wb", buffering=0) as file:
        fill(file)
    assert put(tier, 8, 9) == [WriteStatus.NO_SPACE] * 2
    assert read(tier, *range(8)) == [HIT] * 8
    tier.delete([page_key(0)])
    assert put(tier, 10) == [WriteStatus.WRITTEN], "freed slots need no new space"
    ballast.unlink()
    assert put(tier, 8, 9) == [WriteStatus.WRITTEN] * 2
    assert tier.flush().ok
    tier.close()
    assert read(open_tier(target / "store", **options), 8, 9, 10) == [HIT] * 3


def test_capacity_larger_than_the_disk(image, open_tier, caplog):
    _, target = image
    with pytest.raises(CapacityError, match="in all"):
        open_tier(target / "store", slot_payload_bytes=SIZE, capacity_bytes=1 << 30)
    ballast = target / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 30 << 20)
    tier = open_tier(target / "store", slot_payload_bytes=SIZE, capacity_bytes=50 << 20)
    assert "instead of" in caplog.text
    assert tier.stats().capacity_bytes < 30 << 20
    count = tier.capacity_pages
    statuses = put(tier, *range(count))
    assert statuses.count(WriteStatus.WRITTEN) >= count - 1


def test_a_read_only_filesystem(image, open_tier):
    _, target = image
    options = {"slot_payload_bytes": SIZE, "capacity_bytes": 16 << 20}
    tier = open_tier(target / "store", **options)
    put(tier, 1, 2)
    tier.close()
    run("mount", "-o", "remount,ro", target)
    with pytest.raises(StoreReadOnlyError, match="read-only filesystem"):
        open_tier(target / "store", **options)
    reader = open_tier(target / "store", read_only=True, **options)
    assert read(reader, 1, 2) == [HIT] * 2
    assert reader.verify().ok
    reader.close()


def test_the_filesystem_dies_under_an_open_store(image, open_tier):
    """After EXT4 shutdown every write and sync fails: statuses, no wrong bytes, no hang."""
    file, target = image
    options = {"slot_payload_bytes": SIZE, "capacity_bytes": 16 << 20, "slab_bytes": 8 * SLOT}
    tier = open_tier(target / "store", **options)
    put(tier, *range(4))
    assert tier.flush().ok
    put(tier, 4, 5)
    fd = os.open(target, os.O_RDONLY)
    fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", 2))
    os.close(fd)
    assert WriteStatus.WRITTEN not in put(tier, 6, 7)
    assert not tier.flush(60).ok
    for status in read(tier, *range(8)):
        assert status is not ReadStatus.TIMEOUT
    tier.close()
    run("umount", target)
    mount(file, target)
    again = open_tier(target / "store", **options)
    assert read(again, *range(4)) == [HIT] * 4, "what a flush confirmed is there"
    assert set(read(again, *range(4, 8))) <= {HIT, MISS}
    assert put(again, 6, 7) == [WriteStatus.WRITTEN] * 2


CHILD = """
import os, signal, sys
from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import make_page, page_key
SIZE = 256 << 10
tier = SsdTier.open(sys.argv[1], capacity_bytes=32 << 20, slot_payload_bytes=SIZE,
                    slab_bytes=8 * (SIZE + 4096), sync_interval_s=0.05)
n = 0
while True:
    numbers = range(n, n + 4)
    tier.put([make_page(k, SIZE) for k in numbers]).wait(30)
    if n % 12 == 8:
        assert tier.flush().ok
        print(n + 4, flush=True)
    if n > 60:
        tier.delete([page_key(k) for k in range(n - 60, n - 56)])
        print(-(n - 56), flush=True)
    n += 4
"""


@pytest.mark.parametrize("lines", [1, 3, 6, 10])
def test_a_power_cut(image, open_tier, tmp_path, lines):
    """Freeze the writer, copy the image, mount the copy: what had reached the device."""
    file, target = image
    cut, cut_target = tmp_path / "cut.img", tmp_path / "cut"
    cut_target.mkdir()
    confirmed = deleted = 0
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(target / "store")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for _ in range(lines):
                value = int(process.stdout.readline())
                confirmed, deleted = max(confirmed, value), max(deleted, -value)
            process.send_signal(19)
            run("cp", "--sparse=always", file, cut)
        finally:
            process.kill()
    # The child may have gone on between its last line and the signal.
    in_doubt = range(deleted, deleted + 12)
    mount(cut, cut_target)
    try:
        tier = open_tier(
            cut_target / "store",
            slot_payload_bytes=SIZE,
            capacity_bytes=32 << 20,
            slab_bytes=8 * SLOT,
        )
        numbers = [n for n in range(deleted, confirmed) if n not in in_doubt or not deleted]
        assert read(tier, *numbers) == [HIT] * len(numbers)
        assert set(read(tier, *range(confirmed + 100))) <= {HIT, MISS}
        tier.check()
        assert tier.verify().ok
        tier.close()
    finally:
        run("umount", cut_target)
