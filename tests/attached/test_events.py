"""Events name every page that comes and goes; a consumer that follows them knows the tiers."""

import pytest
from engine_pools import BY_NAME, Bench
from toy_model import FULL, MIXED, feed, namespace

from tierkv import EventKind, InvalidInputError, Store, Tier

PLAIN, HYBRID = BY_NAME["kv-apart"], BY_NAME["hybrid"]


@pytest.fixture
def open_bench(benches, tmp_path):
    def make(case=HYBRID, path=tmp_path / "store", **options):
        benches.append(Bench(case, path, **options))
        return benches[-1]

    return make


def follow(view, events):
    """Apply events to a consumer's view: key -> tiers."""
    for event in events:
        tiers = view.setdefault(event.key, set())
        if event.kind is EventKind.STORED:
            assert event.tier not in tiers, "stored twice"
            tiers.add(event.tier)
        else:
            tiers.remove(event.tier)
            if not tiers:
                del view[event.key]


def truth(store):
    index = store._core.index
    rows = index.select()
    return {
        index.key(row): {tier for tier in Tier if held >> tier & 1}
        for row, held in zip(rows.tolist(), index.residency(rows).tolist(), strict=True)
    }


def test_a_consumer_that_follows_knows_what_is_where(open_bench):
    bench = open_bench(host=16, disk=32)
    bench.save(bench.keys("before", 2))
    queue, view = bench.store.subscribe(), {}
    follow(view, queue.snapshot())
    assert view == truth(bench.store)
    for talk in range(12):
        bench.save(bench.keys(talk, 3))
        bench.resume(bench.keys(max(0, talk - 3), 3))
        follow(view, queue.take())
        with bench.store._core.lock:
            follow(view, queue.take())
            assert view == truth(bench.store)
    bench.store.flush()
    follow(view, queue.take())
    assert view == truth(bench.store)
    assert any(tiers == {Tier.DISK} for tiers in view.values())
    assert queue.lost == 0


def test_sequences_tell_as_well(tmp_path):
    spec, slot = MIXED, MIXED.slot_bytes
    with Store.open(
        tmp_path / "s", spec, namespace(spec), device=24 * slot, host=8 * slot, disk=16 * 8192
    ) as store:
        queue, view = store.subscribe(token_ids=True), {}
        told = {}
        for talk in range(8):
            tokens = [100 * talk + i for i in range(14)]
            with store.begin(tokens) as sequence:
                feed(sequence, tokens)
                sequence.finish(tokens)
            with store._core.lock:
                events = queue.take()
                follow(view, events)
                assert view == truth(store)
            for event in events:
                assert event.token_ids is not None
                told.setdefault(event.key, set()).add(event.token_ids)
                start = event.end_token - event.num_tokens
                first = event.token_ids[0] - start
                assert event.token_ids == tuple(range(first + start, first + event.end_token))
        assert all(len(ids) == 1 for ids in told.values())
        assert {len(next(iter(ids))) for ids in told.values()} == {2, 4}


def test_events_carry_what_the_engine_called_its_pages(open_bench):
    bench = open_bench()
    queue = bench.store.subscribe()
    keys = bench.keys("a", 2)
    bench.save(keys)
    events = {event.key: event for event in queue.take()}
    for page in bench.all_pages(keys):
        event = events[page.key]
        assert (event.kind, event.tier) == (EventKind.STORED, Tier.HOST)
        assert (event.group, event.end_token, event.num_tokens) == (
            page.group,
            page.end_token,
            page.num_tokens,
        )
        assert (event.parent, event.engine_hash, event.parent_hash) == (
            page.parent,
            page.engine_hash,
            page.parent_hash,
        )
        assert event.token_ids is None


def test_token_ids_are_kept_for_those_who_asked_and_while_the_page_is_there(open_bench):
    bench = open_bench(PLAIN, host=8, disk=None)
    silent, curious = bench.store.subscribe(), bench.store.subscribe(token_ids=True)
    for talk in range(6):
        ids = range(1000 * talk, 1000 * talk + 4 * bench.unit)
        keys = bench.pool.keys_from_tokens(ids)
        bench.save(keys)
        stored = [e for e in curious.take() if e.kind is EventKind.STORED]
        assert [e.token_ids for e in stored] == [
            tuple(ids[at : at + bench.unit]) for at in range(0, len(ids), bench.unit)
        ]
    journal = bench.store._core.planner.journal
    assert len(journal._notes) == bench.store.stats().tiers["host"].pages == 8
    curious.close()
    curious.close()
    bench.save(bench.pool.keys_from_tokens(range(bench.unit)))
    assert len([e for e in silent.take() if e.kind is EventKind.STORED]) == 25
    assert all(note.token_ids is None for note in journal._notes.values())
    silent.close()
    assert bench.store._core.planner.journal is None


def test_a_slow_consumer_is_told_that_it_lost_events(open_bench):
    bench = open_bench(PLAIN)
    with bench.store.subscribe(limit=5) as queue:
        bench.save(bench.keys("a", 8))
        assert queue.lost == 3
        assert [event.end_token // bench.unit for event in queue.take(2)] == [4, 5]
        assert len(queue.snapshot()) == 8
        assert (queue.lost, queue.take()) == (0, [])
    with pytest.raises(InvalidInputError, match="limit"):
        bench.store.subscribe(limit=0)


def test_a_reopened_store_tells_what_it_found(open_bench):
    bench = open_bench()
    keys = bench.keys("a", 3)
    bench.save(keys)
    bench.store.flush()
    bench.close()
    bench = open_bench()
    events = bench.store.subscribe().snapshot()
    assert {event.key for event in events} == {page.key for page in bench.all_pages(keys)}
    assert {event.tier for event in events} == {Tier.DISK}
    seen = set()
    for event in events:  # a parent comes before its pages
        assert event.group or event.parent in seen or event.end_token == bench.unit
        seen.add(event.key)


def test_nothing_is_kept_while_nobody_subscribes(tmp_path):
    with Store.open(None, FULL, namespace(FULL), device="1MiB", host="1MiB") as store:
        assert store._core.planner.journal is None
