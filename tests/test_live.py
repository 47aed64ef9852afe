"""The live file: a snapshot is read whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ForkError, InvalidInputError, StoreClosedError, StoreError
from tierkv.live import PAGE_DTYPE, LiveFile, read_live, read_live_pages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live"


def test_reader_sees_the_last_snapshot_and_the_owner(path: Path) -> None:
    with LiveFile.create(path) as file:
        assert read_live(path) is None
        for turn in range(5):
            assert file.publish({"turn": turn, "tiers": {"host": {"pages": turn}}})
            file.check()
            expected = {"pid": os.getpid(), "turn": turn, "tiers": {"host": {"pages": turn}}}
            assert read_live(path) == expected
        assert file.stats().published == 5


def test_page_list_is_read_as_published_beside_the_statistics(path: Path) -> None:
    pages = np.zeros(3, PAGE_DTYPE)
    pages["end_token"] = [64, 128, 192]
    pages["key"] = [np.void(bytes([i]) * 32) for i in range(3)]
    with LiveFile.create(path, max_pages=3) as file:
        assert read_live_pages(path) is None
        file.publish({"turn": 1})
        assert file.publish_pages(pages)
        assert not file.publish_pages(np.zeros(4, PAGE_DTYPE))
        file.check()
        found = read_live_pages(path)
        assert found is not None
        assert found.tobytes() == pages.tobytes()
        assert file.publish_pages(pages[:0])
        found = read_live_pages(path)
        assert found is not None
        assert len(found) == 0
        assert read_live(path) == {"pid": os.getpid(), "turn": 1}
        assert (file.stats().published, file.stats().dropped) == (3, 1)


def test_closing_withdraws_the_snapshot(path: Path) -> None:
    file = LiveFile.create(path)
    file.publish({"turn": 1})
    file.close()
    file.close()
    assert read_live(path) is None
    with pytest.raises(StoreClosedError):
        file.publish({})


def test_a_new_owner_does_not_show_the_snapshot_of_a_killed_one(path: Path) -> None:
    code = (
        "import os, signal\nfrom tierkv.live import LiveFile\n"
        f"LiveFile.create({str(path)!r}).publish({{'turn': 7}})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=30)
    left = read_live(path)
    assert left is not None
    assert left["turn"] == 7
    with LiveFile.create(path):
        assert read_live(path) is None


def test_a_snapshot_too_long_is_dropped_and_the_one_before_stays(path: Path) -> None:
    with LiveFile.create(path, slot_bytes=128) as file:
        assert file.publish({"turn": 1})
        assert not file.publish({"turn": 2, "text": "x" * 200})
        found = read_live(path)
        assert found is not None
        assert found["turn"] == 1
        assert (file.stats().published, file.stats().dropped) == (1, 1)
        file.check()


def test_an_io_error_is_counted_and_not_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveFile.create(path) as file:
        file.publish({"turn": 1})
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", lambda *_: 3)
            assert not file.publish({"turn": 2})
        assert file.stats().dropped == 1
        found = read_live(path)
        assert found is not None
        assert found["turn"] == 1


def test_use_in_a_forked_child_is_refused(path: Path) -> None:
    with LiveFile.create(path) as file:
        file._pid = os.getpid() + 1  # what a child sees of its parent's file
        with pytest.raises(ForkError):
            file.publish({})
        file._pid = os.getpid()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot create the live file"):
        LiveFile.create(tmp_path / "missing" / "live")
    with pytest.raises(InvalidInputError):
        LiveFile.create(tmp_path / "live", slot_bytes=16)
    with pytest.raises(InvalidInputError):
        LiveFile.create(tmp_path / "live", max_pages=-1)
    with pytest.raises(InvalidInputError):
        LiveFile.create(tmp_path / "live", max_pages=10**8)


@pytest.mark.parametrize("content", [b"", b"TKVLIVE2", b"\0" * 70_000, os.urandom(70_000)])
def test_foreign_content_is_no_snapshot(path: Path, content: bytes) -> None:
    assert read_live(path) is None
    path.write_bytes(content)
    assert read_live(path) is None


@given(at=st.integers(0, 4096 + 2 * 256 - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_a_snapshot_that_was_not_published(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    file = LiveFile.create(path, slot_bytes=256)
    snapshots = [{"turn": 1, "text": "first"}, {"turn": 2, "text": "second"}]
    for snapshot in snapshots:
        file.publish(snapshot)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    assert read_live(path) in [None, *({"pid": os.getpid(), **s} for s in snapshots)]
    file.close()


def test_a_reader_beside_a_busy_writer_never_sees_a_torn_snapshot(path: Path) -> None:
    with LiveFile.create(path) as file:
        file.publish({"turn": 0, "copies": [0] * 800})
        stop = threading.Event()

        def write() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                file.publish({"turn": turn, "copies": [turn] * 800})

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(300):
                found = read_live(path)
                if found is not None:
                    assert found["copies"] == [found["turn"]] * 800
        finally:
            stop.set()
            writer.join(timeout=10)
        found = read_live(path)
        assert found is not None
        assert found["turn"] == file.stats().published - 1
