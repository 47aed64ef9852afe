"""A hash table from page keys to rows, without an object a page.

Open addressing with linear probing in one preallocated int32 array: an entry is
``row + 1``, 0 is empty.  The keys themselves live in the index's key column, and since
they are SHA-256 digests their low bits are the hash.  The table never grows (it has at
least four slots for each row there can ever be), so no insert ever pays for a rehash; its
memory is mapped lazily, so an unused table costs next to nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # keys as [n, 4] 64-bit words
Rows = NDArray[np.int32]

KEY_WORDS = 4
_ALL_EQUAL = np.uint32(0x01010101)  # four boolean bytes, all true
# Slots for each row, at least: at 4, nine keys in ten lie where their hash says.
_SPARSITY = 4
# Below this many keys a plain loop beats the fixed cost of numpy calls.
_FEW = 10
# Runs of adjacent rows followed before keys are searched one by one.
_MAX_RUNS = 8


def same_keys(a: Words, b: Words) -> NDArray[np.bool_]:
    """Return which keys of two ``[n, 4]`` arrays are equal, all 32 bytes compared."""
    equal = np.equal(a, b).view(np.uint32).ravel()
    result: NDArray[np.bool_] = equal == _ALL_EQUAL
    return result


class KeyTable:
    """Finds the row of a key; rows are unique by key.

    Not thread-safe.  Rows handed to :meth:`add` must have their key in the key column,
    which must not change while the row is in the table; other rows have no key (zeros)
    when :meth:`find` is called.
    """

    def __init__(self, keys: Words, max_rows: int) -> None:
        """Create a table over a key column of shape ``[at least max_rows, 4]``."""
        size = 16
        while size < _SPARSITY * max_rows:
            size *= 2
        self._keys = keys
        self._mask = size - 1
        self._slots = np.zeros(size, np.int32)
        # Memoryviews read and write single items several times faster than arrays do.
        self._slot = self._slots.data
        self._word = keys.reshape(-1).data

    def find(self, keys: Words) -> Rows:
        """Return the row of each key, -1 where it is not in the table."""
        if len(keys) <= _FEW:
            return self._find_few(keys, self._homes(keys))
        if np.count_nonzero(keys[:, 0]) < len(keys):  # "no key" equals an unused row's
            return self._find_many(keys)
        rows, known = self._follow_runs(keys)
        if known < len(keys):
            rows[known:] = self._find_many(keys[known:])
        return rows

    def _follow_runs(self, keys: Words) -> tuple[Rows, int]:
        """Find the first keys by guessing that a path lies in adjacent rows.

        Paths are mostly entered as a whole, so the row after a page's is mostly its
        successor's.  Comparing a stretch of the key column is far cheaper than a look at
        a random slot for each key.  A guess needs no other proof than the equal key,
        since the keys of removed rows are erased.

        Returns:
            Rows, of which the first ``known`` are filled in; and ``known``.
        """
        rows, known = np.empty(len(keys), np.int32), 0
        for followed in range(_MAX_RUNS):
            key = keys[known].tolist()
            start = self._probe(key, key[0] & self._mask)
            if start < 0:
                break
            stretch = self._keys[start : start + len(keys) - known]
            same = same_keys(stretch, keys[known : known + len(stretch)])
            wrong = int(same.argmin())
            length = len(stretch) if same[wrong] else wrong
            rows[known : known + length] = np.arange(start, start + length)
            known += length
            if known == len(keys) or known < followed * _FEW:  # done, or not worth it
                break
        return rows, known

    def _find_many(self, keys: Words) -> Rows:
        """Return the rows of keys, probing for all of them at once."""
        slots = self._homes(keys)
        found = rows = self._at(slots)
        at = np.arange(len(keys))  # where in ``rows`` the keys still searched belong
        while True:
            other = (~same_keys(self._keys.take(found, axis=0), keys)).nonzero()[0]
            other = other[found.take(other) >= 0]  # an empty slot ends the search
            if not other.size:
                return rows
            keys, at = keys.take(other, axis=0), at.take(other)
            slots = (slots.take(other) + 1) & self._mask
            if len(keys) <= _FEW:
                rows[at] = self._find_few(keys, slots)
                return rows
            rows[at] = found = self._at(slots)

    def _homes(self, keys: Words) -> NDArray[np.int64]:
        """Return the slots at which the search for keys begins."""
        return keys[:, 0].view(np.int64) & self._mask

    def _at(self, slots: NDArray[np.int64]) -> Rows:
        """Return the rows in slots; -1, which holds no key, for an empty one."""
        rows: Rows = self._slots.take(slots) - 1
        return rows

    def _find_few(self, keys: Words, slots: NDArray[np.int64]) -> Rows:
        """Return the rows of keys, probing from the given slots on, one by one."""
        return np.array(list(map(self._probe, keys.tolist(), slots.tolist())), np.int32)

    def _probe(self, key: list[int], slot: int) -> int:
        """Return the row of a key given as four words, probing from a slot on, or -1."""
        slots, word, mask = self._slot, self._word, self._mask
        a, b, c, d = key
        while entry := slots[slot]:
            at = KEY_WORDS * (entry - 1)
            if word[at] == a and word[at + 1] == b and word[at + 2] == c and word[at + 3] == d:
                return entry - 1
            slot = (slot + 1) & mask
        return -1

    def add(self, rows: Rows) -> Rows:
        """Enter rows by their keys; return the row that holds each key.

        That is the row itself, or the one that had the key before: a row already in the
        table, or another row of the same call.  The caller takes back the losers.
        """
        owners = np.empty_like(rows)
        keys = self._keys.take(rows, axis=0)
        slots = self._homes(keys)
        pending = np.arange(len(rows))
        while pending.size:
            at = slots[pending]
            empty = self._slots.take(at) == 0
            # Several rows may claim one slot: one write stays, the others see it below.
            self._slots[at[empty]] = rows[pending[empty]] + 1
            held = self._slots.take(at) - 1
            settled = same_keys(self._keys.take(held, axis=0), keys[pending])
            owners[pending[settled]] = held[settled]
            pending = pending[~settled]
            slots[pending] = (slots[pending] + 1) & self._mask
        return owners

    def remove(self, row: int) -> None:
        """Take a row out and erase its key; no tombstone stays behind."""
        slots, word, mask = self._slot, self._word, self._mask
        hole = word[KEY_WORDS * row] & mask
        while slots[hole] != row + 1:
            assert slots[hole], f"row {row} is not in the key table"
            hole = (hole + 1) & mask
        at = hole
        while entry := slots[at := (at + 1) & mask]:
            home = word[KEY_WORDS * (entry - 1)] & mask
            # An entry may move back to the hole unless its home lies behind the hole.
            if ((at - home) & mask) >= ((at - hole) & mask):
                slots[hole] = entry
                hole = at
        slots[hole] = 0
        self._keys[row] = 0

    def rows(self) -> Rows:
        """Return all rows in the table, ascending."""
        used: Rows = np.sort(self._slots[self._slots != 0] - 1)
        return used
