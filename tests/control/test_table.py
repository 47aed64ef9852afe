"""The key table against a dict, with keys made to collide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.control_plane._table import KeyTable, same_keys


class Twin:
    """A table beside a dict; keys are numbered, their low bits chosen by the test."""

    def __init__(self, max_rows):
        self.words = np.zeros((max_rows + 1, 4), np.uint64)
        self.table = KeyTable(self.words, max_rows)
        self.rows = {}
        self.free = list(range(max_rows))[::-1]

    def add(self, keys):
        rows = np.array([self.free.pop() for _ in keys], np.int32)
        self.words[rows] = keys
        owners = self.table.add(rows)
        for key, row, owner in zip(map(tuple, keys.tolist()), rows, owners, strict=True):
            self.rows.setdefault(key, int(owner))
            assert self.rows[key] == owner
            if row != owner:
                self.words[row] = 0
                self.free.append(int(row))

    def remove(self, key):
        row = self.rows.pop(key)
        self.table.remove(row)
        self.free.append(row)

    def check(self, keys):
        expected = [self.rows.get(key, -1) for key in map(tuple, keys.tolist())]
        assert self.table.find(keys).tolist() == expected
        assert self.table.rows().tolist() == sorted(self.rows.values())


def numbered(low_bits):
    """Return distinct keys with these low bits in their first word."""
    keys = np.zeros((len(low_bits), 4), np.uint64)
    keys[:, 0] = low_bits
    keys[:, 3] = np.arange(1, len(low_bits) + 1)
    return keys


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_equals_a_dict(data):
    size = data.draw(st.sampled_from([4, 60]))
    homes = st.sampled_from([0, 1, 2, 254, 255, 2**63])
    keys = numbered(data.draw(st.lists(homes, min_size=size, max_size=size)))
    twin = Twin(2 * size)
    pick = st.lists(st.integers(0, size - 1), max_size=size)
    for _ in range(data.draw(st.integers(1, 5))):
        twin.add(keys[np.array(data.draw(pick), np.intp)])  # repeats within one call too
        twin.check(keys)
        for i in set(data.draw(pick)):
            if tuple(keys[i].tolist()) in twin.rows:
                twin.remove(tuple(keys[i].tolist()))
        twin.check(keys)


def test_a_long_run_of_colliding_keys_is_searched_to_its_end():
    keys = numbered([7] * 3000)
    twin = Twin(3000)
    twin.add(keys)
    twin.check(keys)


def test_all_32_bytes_are_compared():
    keys = np.zeros((5, 4), np.uint64)
    keys[1:] = np.eye(4, dtype=np.uint64)
    same = same_keys(np.repeat(keys[:1], 5, axis=0), keys)
    assert same.tolist() == [True, False, False, False, False]
    twin = Twin(4)
    twin.add(keys[:4])
    assert (twin.table.find(keys[4:]) == -1).all()
    assert (twin.table.find(np.repeat(keys[4:], 20, axis=0)) == -1).all()


def test_removing_what_is_not_there_is_a_bug():
    twin = Twin(4)
    with pytest.raises(AssertionError, match="not in the key table"):
        twin.table.remove(2)
