"""The directory lock: one owner, and questions that stand in nobody's way."""

from __future__ import annotations

import os
import threading

import pytest

from tierkv.errors import StoreLockedError
from tierkv.storage.lock import DirectoryLock, is_locked, read_owner


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "lock")


def test_a_lock_has_one_owner_and_names_it(path) -> None:
    lock = DirectoryLock.acquire(path, now=12.0)
    assert is_locked(path)
    assert read_owner(path).pid == os.getpid()
    with pytest.raises(StoreLockedError) as caught:
        DirectoryLock.acquire(path, now=13.0)
    assert (caught.value.pid, caught.value.since) == (os.getpid(), 12.0)
    lock.release()
    lock.release()
    assert not is_locked(path)
    DirectoryLock.acquire(path, now=14.0).release()


def test_asking_changes_nothing(path) -> None:
    assert not is_locked(path)
    assert not os.path.exists(path)


def test_a_reader_without_write_permission_can_ask(path) -> None:
    lock = DirectoryLock.acquire(path, now=0.0)
    os.chmod(path, 0o400)
    assert is_locked(path)
    lock.release()
    assert not is_locked(path)


def test_questions_from_many_threads_never_make_opening_fail(path) -> None:
    DirectoryLock.acquire(path, now=0.0).release()
    stop = threading.Event()

    opened = 0

    def ask() -> None:
        while not stop.is_set():
            is_locked(path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(300):
            DirectoryLock.acquire(path, now=float(number)).release()
            opened += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=10)
    assert opened == 300
