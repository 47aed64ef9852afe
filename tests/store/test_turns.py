"""Conversations over all tiers: what is found, and that it is what was committed."""

import pytest
from toy_model import FULL, MIXED, SPECS, feed, full_group, states, turn

from tierkv import CacheSpec, InvalidInputError, SequenceTooLongError, Tier

ONE_LAYER = CacheSpec(groups=(full_group(layers=(0,)),))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31])
def test_a_second_turn_finds_what_the_first_left(open_store, spec, length):
    store = open_store(spec)
    first = list(range(100, 100 + length))
    assert turn(store, first).total == 0
    second = first + [7, 8, 9]
    assert turn(store, second).total == length
    assert turn(store, second + [1]).total == length + 3


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_last_token_is_always_left_to_compute(open_store, spec):
    store = open_store(spec)
    tokens = list(range(16))
    turn(store, tokens)
    found = turn(store, tokens)
    assert found.total <= 15
    if all(group.kind.needs_every_page for group in spec.groups):
        assert found.total == 15


def test_a_sliding_model_resumes_at_every_kept_boundary(open_store):
    store = open_store(MIXED, boundary_pages=2, device=128)
    tokens = list(range(64))
    turn(store, tokens, cut=20)
    for shared in (8, 16, 24, 40, 56):
        other = tokens[:shared] + [999, 998]
        assert turn(store, other).total == shared
    assert turn(store, tokens[:30] + [999]).total == 24


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pages_come_back_from_host_and_disk_and_after_a_restart(open_store, spec, tmp_path):
    store = open_store(spec, device=24, host=8, disk=400, path=tmp_path / "s")
    talks = [[1000 * i + j for j in range(17)] for i in range(12)]
    for talk in talks:
        turn(store, talk)
    found = [turn(store, [*talk, 5, 6]) for talk in talks]
    assert all(f.total == 17 for f in found)
    assert sum(f.disk for f in found) > 0
    store.close()
    again = open_store(spec, device=24, host=8, disk=400, path=tmp_path / "s")
    found = [turn(again, [*talk, 5, 6, 7]) for talk in talks]
    assert all(f.total == 19 for f in found)
    assert found[0].disk == 19


def test_conversations_share_a_document_once(open_store):
    store = open_store(device=60)
    document = list(range(40))
    for i in range(5):
        turn(store, document + [500 + i])
    stats = store.stats()
    assert stats.tiers["device"].pages == 10 + 5  # the document, and a tail for each


def test_a_tail_page_is_superseded_by_the_next_turn(open_store):
    store = open_store()
    tokens = list(range(6))
    for _ in range(5):
        turn(store, tokens)
        tokens = [*tokens, 50 + len(tokens)]
    # Turns end at 6, 7, 8, 9 and 10 tokens: two full pages and the last tail.
    assert store.stats().tiers["device"].pages == 3


def test_forks_share_pages_and_write_apart(open_store):
    store = open_store()
    tokens = list(range(10))
    turn(store, tokens)
    left, right = store.begin(tokens + [1, 2]), store.begin(tokens + [3, 4])
    assert left.found.total == right.found.total == 10
    feed(left, tokens + [1, 2])
    feed(right, tokens + [3, 4])
    store.check()
    left.finish()
    right.finish()
    assert turn(store, tokens + [1, 2, 9]).total == 12
    assert turn(store, tokens + [3, 4, 9]).total == 12


def test_an_abandoned_sequence_leaves_nothing(open_store):
    store = open_store()
    turn(store, list(range(9)), finish=False)
    assert store.stats().tiers["device"].used_bytes == 0
    with store.begin([1, 2, 3]) as sequence:
        feed(sequence, [1, 2, 3])
    assert store.stats().tiers["device"].used_bytes == 0


def test_a_sequence_longer_than_the_pool_is_refused_with_the_arithmetic(open_store):
    store = open_store(ONE_LAYER, device=4)  # pages of one layer cannot stream: see test_spill
    with pytest.raises(SequenceTooLongError, match=r"needs 5 pages .* has 4.* layers enough"):
        store.begin(list(range(17)))
    with pytest.raises(SequenceTooLongError, match="needs 5 pages"):
        store.begin([1], max_new_tokens=16)
    sequence = store.begin(list(range(16)))
    feed(sequence, list(range(16)))
    with pytest.raises(SequenceTooLongError), sequence.gate.layer(0) as layer:
        layer.append(*[part[:, :1] for part in layer.read()])
    sequence.abandon()


def test_commit_in_mid_sequence_makes_pages_visible_and_the_tail_stays_private(open_store):
    store = open_store(MIXED)
    tokens = list(range(11))
    sequence = store.begin(tokens)
    feed(sequence, tokens)
    report = sequence.commit(tokens, turn_end=True)
    assert report.tail_pages == 2
    store.check()
    tokens = [*tokens, 77, 78, 79]
    feed(sequence, tokens)
    assert turn(store, list(range(11)) + [5]).total == 11
    sequence.finish(tokens)
    assert turn(store, tokens + [5]).total == 14


def test_commit_refuses_ids_that_were_not_fed(open_store):
    store = open_store()
    sequence = store.begin([1, 2, 3])
    feed(sequence, [1, 2, 3])
    with pytest.raises(InvalidInputError, match="2 token ids given, but 3"):
        sequence.commit([1, 2])
    with pytest.raises(InvalidInputError, match="token 1 is 9"):
        sequence.commit([1, 9, 3])
    sequence.abandon()


def test_another_namespace_never_matches(open_store, tmp_path):
    store = open_store(path=tmp_path / "s")
    tokens = list(range(9))
    turn(store, tokens)
    store.close()
    other = open_store(path=tmp_path / "s", weights="other")
    assert turn(other, [*tokens, 1]).total == 0
    assert other.stats().tiers["disk"].pages == 3
    other.close()
    back = open_store(path=tmp_path / "s")
    assert turn(back, [*tokens, 1]).total == 9


def test_write_through_writes_each_page_once(open_store):
    store = open_store(write_through=True)
    tokens = list(range(20))
    turn(store, tokens)
    assert store.flush().ok
    assert store.stats().counters["demoted_to_disk"] == 5
    turn(store, tokens + [9])
    report = store.flush()
    assert report.ok
    assert report.durable_pages == 6  # five full pages and a tail
    assert store.stats().counters["demoted_to_disk"] == 6


def test_memory_only_stores_drop_what_does_not_fit(open_store):
    store = open_store(path=None, disk=None, device=8, host=8)
    for i in range(10):
        turn(store, [100 * i + j for j in range(12)])
    assert turn(store, [*(900 + j for j in range(12)), 1]).total == 12
    assert turn(store, [*range(12), 1]).total == 0
    assert not store.flush().ok


def test_bytes_moved_are_counted_in_every_direction(open_store, tmp_path):
    store = open_store(path=tmp_path / "s")
    turn(store, list(range(16)))
    assert store.flush().ok
    store.close()
    store = open_store(path=tmp_path / "s")
    turn(store, [*range(16), 1], finish=False)
    tiers, size = store.stats().tiers, 4 * FULL.slot_bytes
    assert tiers["disk"].bytes_out == tiers["host"].bytes_in == size
    assert tiers["host"].bytes_out == tiers["device"].bytes_in == size


def test_found_tokens_are_counted_by_tier(open_store):
    store = open_store(FULL, device=8, host=8, disk=64)
    talks = [[1000 * i + j for j in range(16)] for i in range(6)]
    for talk in talks:
        turn(store, talk)
    by_tier = {tier.label: 0 for tier in Tier}
    for talk in talks:
        found = turn(store, [*talk, 3])
        for name in by_tier:
            by_tier[name] += getattr(found, name)
    stats = store.stats()
    assert {name: stats.tiers[name].hit_tokens for name in ("device", "host", "disk")} == {
        name: by_tier[name] for name in ("device", "host", "disk")
    }


@pytest.mark.parametrize("call", ["keep_from", "reserve"])
def test_what_a_step_has_written_stays_when_it_goes_on_after_other_calls(open_store, call):
    store = open_store(MIXED, device=20)
    tokens = [5, 6, 7, 8, 9]
    other = store.begin([1, 2])
    feed(other, [1, 2])
    sequence = store.begin(tokens)
    for layer in sorted(MIXED.layer_to_group):
        with sequence.gate.layer(layer) as view:
            view.append(*states(MIXED, layer, tokens, 0, 5))
        if layer == 2:  # the first of the window's layers
            other.abandon()  # its slots are free, and would be taken first
            if call == "keep_from":
                sequence.keep_from(0)
            else:
                with pytest.raises(SequenceTooLongError):
                    sequence.reserve(400)
    feed(sequence, [*tokens, 1])  # checks what is held
    sequence.abandon()
    store.check()
