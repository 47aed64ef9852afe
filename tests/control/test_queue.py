"""The eviction queue against a dict of urgencies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.control_plane._queue import EvictionQueue


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_equals_a_dict(data):
    size = data.draw(st.sampled_from([1, 15, 16, 17, 300]))
    queue, urgencies = EvictionQueue(size), {}
    changes = st.dictionaries(st.integers(0, size - 1), st.integers(0, 5), max_size=60)
    for _ in range(data.draw(st.integers(1, 8))):
        changed = data.draw(changes)
        rows = np.array(list(changed), np.int64)
        queue.set_many(rows, np.array(list(changed.values()), np.int64))
        urgencies.update(changed)
        queue.check()
        best = max(urgencies.values(), default=0)
        row, urgency = queue.top()
        assert urgency == best
        if best:
            assert row == min(r for r, u in urgencies.items() if u == best)
        assert queue.queued().tolist() == sorted(r for r, u in urgencies.items() if u)
        assert queue.urgency(rows).tolist() == list(changed.values())


@pytest.mark.parametrize("size", [1, 16, 5000])
def test_an_empty_queue_has_no_urgency(size):
    queue = EvictionQueue(size)
    assert queue.top()[1] == 0
    assert queue.count == 0
    assert queue.urgency(np.array([-1]))[0] == 0


def test_one_and_many_rows_leave_the_same_queue():
    rng = np.random.default_rng(5)
    one, many = EvictionQueue(4000), EvictionQueue(4000)
    for _ in range(5):
        rows = rng.permutation(4000)[:1500]
        urgencies = rng.integers(0, 10, 1500)
        many.set_many(rows, urgencies)
        for row, urgency in zip(rows.tolist(), urgencies.tolist(), strict=True):
            one.set(row, urgency)
        one.check()
        many.check()
        assert one.top() == many.top()
        assert np.array_equal(one.queued(), many.queued())
