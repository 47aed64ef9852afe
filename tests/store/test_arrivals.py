"""Pages on their way into the pool are never published before they have arrived."""

import threading

import numpy as np
import pytest
from toy_model import FULL, LATENT, feed, turn

from tierkv import InvalidInputError, Tier
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.devices.cpu import CpuDevice
from tierkv.devices.faults import Faults
from tierkv.devices.sim import SimDevice


@pytest.fixture(params=["cpu"])  # a real thread is held up
def device_name(request):
    return request.param


@pytest.fixture
def held_up(open_store, tmp_path):
    """A store whose loads wait for an event, with 24 tokens on disk."""
    tokens = list(range(24))
    store = open_store(path=tmp_path / "s")
    turn(store, tokens)
    store.close()
    store = open_store(path=tmp_path / "s")
    stream, release = store._loader._stream, threading.Event()
    copy = stream._copy_now

    def late(ops):
        release.wait(30)
        copy(ops)

    stream._copy_now = late
    yield store, tokens, release
    release.set()


@pytest.mark.parametrize("how", ["commit", "finish"])
def test_a_tail_is_published_only_when_its_page_has_arrived(held_up, how):
    store, tokens, release = held_up
    sequence = store.begin(tokens)
    assert sequence.length == 23

    def end():
        if how == "commit":
            sequence.commit(tokens, turn_end=True)
            sequence.abandon()
        else:
            sequence.finish(tokens)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert store.flush().ok
    release.set()
    thread.join(30)
    assert turn(store, [*tokens[:23], 777, 1]).total == 23


def test_a_turn_end_before_the_tail_resumed_from_supersedes_nothing(open_store):
    store = open_store(LATENT)
    tokens = list(range(21))
    turn(store, tokens)
    sequence = store.begin(tokens)
    sequence.commit(tokens, turn_end=True)
    sequence.abandon()
    assert turn(store, [*tokens, 7]).total == 21


def test_finish_without_ids_after_a_commit_of_part_of_the_prompt(open_store):
    store = open_store(FULL)
    tokens = list(range(20))
    sequence = store.begin(tokens)
    feed(sequence, tokens, 10)
    sequence.commit(tokens)
    feed(sequence, tokens)
    sequence.finish()
    assert turn(store, [*tokens, 7]).total == 20


@pytest.mark.parametrize("count", [-1, 1.5, "x", None, 10**30])
def test_max_new_tokens_must_be_a_sensible_integer(open_store, count):
    with pytest.raises(InvalidInputError, match="max_new_tokens"):
        open_store().begin([1, 2], max_new_tokens=count)


def test_a_copy_down_that_fails_is_not_taken_for_another_threads_success(open_store):
    """An event tells of the failures since the one before it: two threads share the stream."""
    store = open_store(device=64, host=32, path=None, disk=None)
    for start in (0, 100):
        turn(store, list(range(start, start + 4)))
    transfers, core = store._transfers, store._core
    rows = [np.asarray([row], np.int32) for row in core.index.select(within=(Tier.DEVICE,))]
    stream, copied = transfers._save, {}
    copy = stream.copy

    def copy_down(number):
        with core.lock:
            core.index.pin(rows[number], Tier.DEVICE)
        moved = transfers.copy_to_host(rows[number], core.deadline())
        with core.lock:
            core.index.unpin(moved, Tier.HOST)
            core.index.unpin(rows[number], Tier.DEVICE)
        copied[number] = len(moved)

    other = threading.Thread(target=copy_down, args=[1])

    def failing(ops):
        stream.copy = copy
        copy([CopyOp(op.destination[:1], op.source) for op in ops])  # sizes differ: fails
        other.start()
        other.join(0.2)  # it must not come between this copy and its event

    stream.copy = failing
    copy_down(0)
    other.join(30)
    assert copied == {0: 0, 1: 1}
    store.check()


FAULTY = {"cpu": CpuDevice, "sim": SimDevice}


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_part_of_a_page_that_fails_to_arrive_is_not_taken_for_good(open_store, kind, layer):
    """Another sequence copies from it on the device before anybody knows."""
    faults = Faults()
    store = open_store(host=120, disk=None, torch_device=FAULTY[kind](faults=faults))
    tokens = list(range(24))
    turn(store, tokens)
    turn(store, [99] * 250)  # takes the whole pool: the pages are in host memory only
    faults.fail_copies("load", after=layer)
    first = store.begin([*tokens, 1])
    second = store.begin(tokens[:4])  # all but the last token of its first page
    assert second.found.total == 3
    for sequence, ids in ((second, tokens[:4]), (first, [*tokens, 1])):
        with pytest.raises(DeviceError):
            feed(sequence, ids)
    for sequence in (first, second):
        sequence.abandon()
    assert turn(store, tokens[:4]).total == 3
    assert turn(store, [*tokens, 1]).total == 24


@pytest.mark.parametrize("kind", FAULTY)
def test_a_page_that_leaves_while_it_is_wanted_is_looked_for_again(open_store, kind):
    """It failed to arrive; whoever brought it takes it off the books in the midst of a load."""
    faults = Faults()
    store = open_store(host=120, disk=None, torch_device=FAULTY[kind](faults=faults))
    tokens = list(range(24))
    turn(store, tokens)
    turn(store, [99] * 250)
    faults.fail_copies("load", count=1)
    first = store.begin([*tokens, 1])
    obtain, calls = store._transfers.obtain, []

    def obtain_and_end(*args, **options):
        if not calls:
            calls.append(args)
            store._loader._stream.record().wait(20)  # so that it ends at once
            first.abandon()
        return obtain(*args, **options)

    store._transfers.obtain = obtain_and_end
    second = store.begin([*tokens, 2])
    assert calls
    feed(second, [*tokens, 2])
    second.finish([*tokens, 2])
    store.check()
