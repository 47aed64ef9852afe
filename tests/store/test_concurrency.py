"""Many threads on one store: joined loads, no wrong bytes, nothing lost, no deadlock."""

import threading

import pytest
from toy_model import FULL, MIXED, feed, turn

from tierkv import PoolExhaustedError


def in_threads(count, work):
    errors = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("spec", [FULL, MIXED], ids=["full", "mixed"])
def test_threads_hold_conversations_at_once(open_store, spec):
    store = open_store(spec, device=80, host=16, disk=300)

    over = threading.Event()

    def watch():
        while not over.is_set():
            store.check()

    def converse(number):
        tokens = [number, *range(9)]
        found_before = 0
        for step in range(6):
            found = turn(store, tokens)
            assert found.total >= found_before
            found_before = len(tokens)
            tokens = [*tokens, step, number, step]

    watcher = threading.Thread(target=in_threads, args=(1, lambda _: watch()))
    watcher.start()
    in_threads(6, converse)
    over.set()
    watcher.join(30)
    assert store.stats().sequences == 0
    assert store.stats().tiers["device"].held == 0


def test_threads_that_want_the_same_pages_read_them_once(open_store, tmp_path):
    store = open_store(device=80, host=40, path=tmp_path / "s")
    tokens = list(range(32))
    turn(store, tokens)
    store.close()
    store = open_store(device=80, host=40, path=tmp_path / "s")
    barrier = threading.Barrier(4)

    def ask(number):
        mine = [*tokens, 100 + number]
        barrier.wait(30)
        sequence = store.begin(mine)
        assert sequence.found.total == 32
        feed(sequence, mine)
        sequence.finish()

    in_threads(4, ask)
    store.check()
    assert store.stats().counters["bytes_in"]["host"] == 8 * FULL.slot_bytes


def test_a_full_pool_refuses_instead_of_hanging(open_store):
    store = open_store(device=8)
    first = store.begin(list(range(24)))
    with pytest.raises(PoolExhaustedError, match="running sequences and pins"):
        store.begin(list(range(50, 70)))
    store.check()
    first.abandon()
    store.begin(list(range(50, 70))).abandon()
