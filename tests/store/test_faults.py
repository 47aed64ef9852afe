"""Faults below the store: a counted miss, never wrong bytes, never an exception, never a hang."""

import os
import subprocess
import sys

import pytest
from toy_model import FULL, MIXED, namespace, states, turn

from tierkv import (
    CapacityError,
    ForkError,
    InvalidInputError,
    NamespaceMismatchError,
    NotAStoreError,
    SequenceEndedError,
    Store,
    StoreClosedError,
    StoreLockedError,
    UnsupportedError,
)
from tierkv.identity.spec import CacheSpec, GroupKind, LayerGroup, kv_components


def leave_on_disk(open_store, path, tokens, spec=FULL):
    store = open_store(spec, path=path)
    turn(store, tokens)
    store.close()


def slabs(path):
    return sorted(p for p in (path / "slabs").iterdir() if p.is_file())


def test_a_damaged_page_shortens_the_prefix(open_store, tmp_path):
    tokens = list(range(20))
    leave_on_disk(open_store, tmp_path / "s", tokens)
    store = open_store(path=tmp_path / "s")
    found = damage_one_page(store, tmp_path / "s", tokens)
    assert 0 <= found.total < 20
    assert store.stats().counters["disk_corrupt"] + store.stats().counters["disk_misses"] == 1
    turn(store, [*tokens, 1])
    assert turn(store, [*tokens, 2]).total == 20  # computed again, and kept again


def damage_one_page(store, path, tokens):
    """Flip a byte in the middle of the third slot, whichever page that is."""
    with open(slabs(path)[0], "r+b") as file:
        file.seek(2 * (FULL.slot_bytes + 4096) + 4096 + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
        os.fsync(file.fileno())
    return turn(store, [*tokens, 1], finish=False)


@pytest.mark.parametrize("harm", ["unlink", "truncate"])
def test_a_missing_or_short_slab_is_a_miss(open_store, tmp_path, harm):
    tokens = list(range(20))
    leave_on_disk(open_store, tmp_path / "s", tokens)
    slab = slabs(tmp_path / "s")[0]
    slab.unlink() if harm == "unlink" else os.truncate(slab, 4096)
    store = open_store(path=tmp_path / "s")
    assert turn(store, [*tokens, 1]).total == 0
    assert turn(store, [*tokens, 1, 2]).total == 21
    assert store.flush().ok


def test_a_damaged_index_is_rebuilt(open_store, tmp_path):
    tokens = list(range(20))
    leave_on_disk(open_store, tmp_path / "s", tokens)
    data = tmp_path / "s" / "index" / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    store = open_store(path=tmp_path / "s")
    assert turn(store, [*tokens, 1]).total == 20


def test_a_directory_belongs_to_one_store_at_a_time(open_store, tmp_path):
    store = open_store(path=tmp_path / "s")
    with pytest.raises(StoreLockedError) as caught:
        open_store(path=tmp_path / "s")
    assert caught.value.pid == os.getpid()
    store.close()
    open_store(path=tmp_path / "s")


def test_a_directory_with_other_things_in_it_is_refused(open_store, tmp_path):
    (tmp_path / "thesis.txt").write_text("not a store")
    with pytest.raises(NotAStoreError, match=r"not a tierkv store|no tierkv store"):
        open_store(path=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "not a store"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": -1}, InvalidInputError, "device: must be more than zero"),
        ({"device": 0}, InvalidInputError, "device"),
        ({"host": "many"}, InvalidInputError, "cannot read 'many'"),
        ({"disk": 0.5}, InvalidInputError, "disk: expected bytes"),
        ({"device": 100}, CapacityError, "holds 0 pages"),
        ({"host": FULL.slot_bytes}, CapacityError, "transfers need 8"),
        ({"disk": 5000}, CapacityError, "."),
        ({"policy": "magic"}, InvalidInputError, "policy"),
        ({"codec": "magic"}, InvalidInputError, "codec"),
        ({"boundary_pages": 0}, InvalidInputError, "boundary_pages"),
        ({"io_timeout_s": 0}, InvalidInputError, "io_timeout_s"),
        ({"torch_device": "abacus"}, InvalidInputError, "abacus"),
        ({"host": "900TiB"}, CapacityError, "host"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        Store.open(tmp_path / "s", FULL, namespace(FULL), **options)
    Store.open(tmp_path / "s", FULL, namespace(FULL), disk="4MiB").close()  # nothing stayed open


def test_a_namespace_of_another_spec_is_refused(tmp_path):
    with pytest.raises(NamespaceMismatchError, match="another spec"):
        Store.open(tmp_path / "s", FULL, namespace(MIXED))


def test_snapshot_groups_cannot_run_yet(tmp_path):
    group = LayerGroup(
        name="state",
        kind=GroupKind.SNAPSHOT,
        layers=(0,),
        components=kv_components(1, 16),
        dtype="float32",
        page_tokens=64,
    )
    spec = CacheSpec(groups=(group,))
    with pytest.raises(UnsupportedError, match="state"):
        Store.open(None, spec, namespace(spec))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        ([[1, 2], [3, 4]], "one sequence"),
        ([0.5], "integers"),
        ([-1], r"\[0, 2\*\*32\)"),
        ([2**32], r"\[0, 2\*\*32\)"),
        ("words", "token ids"),
        ([True, False], "integers"),
    ],
)
def test_token_ids_that_are_none_are_refused(open_store, tokens, message):
    with pytest.raises(InvalidInputError, match=message):
        open_store().begin(tokens)


@pytest.mark.parametrize("name", ["limit", "device_pages", "max_new_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "3"])
def test_numbers_that_are_none_are_refused(open_store, name, value):
    store = open_store()
    with pytest.raises(InvalidInputError, match=f"{name} must be an integer >= 0, got"):
        store.begin([1, 2], **{name: value})
    store.check()


def test_a_million_tokens_are_refused_by_arithmetic_or_served(open_store):
    store = open_store()
    with pytest.raises(CapacityError, match="1000000 tokens"):
        store.begin(range(1_000_000))
    store.check()


def test_states_of_wrong_shape_dtype_or_number_are_refused(open_store):
    import torch

    store = open_store()
    good = [torch.zeros(2, 3, 32), torch.zeros(2, 3, 32)]
    bad = {
        "expected 2 tensors": good[:1],
        "expected shape": [good[0], torch.zeros(2, 3, 31)],
        "tokens >= 1": [torch.zeros(2, 0, 32)] * 2,
        "the pool holds": [good[0].double(), good[1].double()],
    }
    with store.begin([1, 2, 3]) as sequence:
        for message, states in bad.items():
            with pytest.raises(InvalidInputError, match=message), sequence.gate.layer(0) as layer:
                layer.append(*states)
        with pytest.raises(InvalidInputError, match="layer 7"):
            sequence.gate.layer(7)
        assert sequence.length == 0


def test_a_forward_that_ended_in_the_middle_cannot_be_tried_again(open_store):
    """Its first layers would hold the tokens twice, and wrong bytes would be committed."""
    store = open_store()
    tokens = list(range(9))
    sequence = store.begin(tokens)
    with sequence.gate.layer(0) as layer:
        layer.append(*states(FULL, 0, tokens, 0, 9))
    with pytest.raises(InvalidInputError, match="abandon"), sequence.gate.layer(0) as layer:
        layer.append(*states(FULL, 0, tokens, 0, 9))
    with pytest.raises(InvalidInputError, match="abandon"), sequence.gate.layer(1) as layer:
        layer.append(*states(FULL, 1, tokens, 0, 4))
    for end in (sequence.finish, sequence.commit):
        with pytest.raises(InvalidInputError, match="ended in the middle"):
            end(tokens)
    sequence.abandon()
    turn(store, tokens)
    assert turn(store, [*tokens, 1]).total == 9


def test_a_layer_is_reached_only_through_its_gate(open_store):
    store = open_store()
    sequence = store.begin([1, 2, 3])
    with sequence.gate.layer(0) as layer:
        pass
    with pytest.raises(StoreClosedError, match="outside"):
        layer.read()
    sequence.abandon()
    with pytest.raises(SequenceEndedError, match="ended"):
        sequence.gate.layer(0)
    with pytest.raises(SequenceEndedError, match="ended"):
        sequence.finish()


def test_use_after_close_is_an_error(open_store):
    store = open_store()
    sequence = store.begin([1, 2, 3])
    store.close()
    store.close()
    for call in (lambda: store.begin([1]), store.flush, lambda: sequence.commit([1, 2, 3])):
        with pytest.raises(StoreClosedError):
            call()


def test_a_forked_child_is_refused_and_the_parent_unharmed(open_store):
    store = open_store()
    turn(store, list(range(9)))
    child = os.fork()
    if not child:
        try:
            store.begin([1, 2])
        except ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert turn(store, list(range(10))).total == 9


CRASHER = """
import sys
sys.path.insert(0, {support!r})
from toy_model import FULL, feed, namespace
from tierkv import Store
store = Store.open({path!r}, FULL, namespace(FULL), device="1MiB", host="1MiB", disk="4MiB")
for number in range(1000):
    tokens = [number, *range(20)]
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    sequence.finish()
    if number % 3 == 0:
        assert store.flush().ok
        print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device_name", ["cpu"], indirect=True)  # the process dies, not the device
@pytest.mark.parametrize("after", [1, 2, 5])
def test_everything_flushed_survives_kill_9(open_store, tmp_path, after):
    path = tmp_path / "s"
    script = CRASHER.format(
        support=os.path.dirname(sys.modules["toy_model"].__file__), path=str(path)
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    flushed = [int(child.stdout.readline()) for _ in range(after)][-1]
    child.kill()
    child.wait()
    child.stdout.close()
    store = open_store(path=path, device=64, host=64, disk=600)
    for number in range(flushed + 1):
        assert turn(store, [number, *range(20), 9], finish=False).total == 21
