"""A hash table from page keys to rows, without an object a page.

Open addressing with linear probing in one preallocated int32 array: an entry is
``row + 1``, 0 is empty.  The keys themselves live in the index's key column, and since
they are SHA-256 digests their low bits are the hash.  The table never grows (it has at
least two slots for each row there can ever be), so no insert ever pays for a rehash; its
memory is mapped lazily, so an unused table costs next to nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # keys as [n, 4] 64-bit words
Rows = NDArray[np.int32]

KEY_WORDS = 4
_ALL_EQUAL = np.uint32(0x01010101)  # four boolean bytes, all true
# Below this many keys a plain loop beats the fixed cost of numpy calls.
_FEW = 10


def same_keys(a: Words, b: Words) -> NDArray[np.bool_]:
    """Return which keys of two ``[n, 4]`` arrays are equal, all 32 bytes compared."""
    equal = np.equal(a, b).view(np.uint32).ravel()
    result: NDArray[np.bool_] = equal == _ALL_EQUAL
    return result


class KeyTable:
    """Finds the row of a key; rows are unique by key.

    Not thread-safe.  Rows handed to :meth:`add` must have their key in the key column,
    which must not change while the row is in the table.
    """

    def __init__(self, keys: Words, max_rows: int) -> None:
        """Create a table over a key column of shape ``[at least max_rows, 4]``."""
        size = 16
        while size < 2 * max_rows:
            size *= 2
        self._keys = keys
        self._mask = size - 1
        self._mask_word = np.uint64(size - 1)
        self._slots = np.zeros(size, np.int32)
        # Memoryviews read and write single items several times faster than arrays do.
        self._slot = self._slots.data
        self._word = keys.reshape(-1).data

    def find(self, keys: Words) -> Rows:
        """Return the row of each key, -1 where it is not in the table."""
        if len(keys) <= _FEW:
            return np.array([self._find_one(key) for key in keys.tolist()], np.int32)
        slots = np.bitwise_and(keys[:, 0], self._mask_word).view(np.int64)
        rows = self._slots.take(slots)
        rows -= 1  # row -1 reads the last key, which no lookup can take for a hit below
        other = ~same_keys(self._keys.take(rows, axis=0), keys)
        other &= rows >= 0
        collided = other.nonzero()[0]
        if collided.size:
            rows[collided] = self._find_from(keys[collided], slots[collided] + 1)
        return rows

    def _find_from(self, keys: Words, slots: NDArray[np.int64]) -> Rows:
        """Return the rows of keys, probing from the given slots."""
        result = np.full(len(keys), -1, np.int32)
        pending = np.arange(len(keys))
        while pending.size > _FEW:
            rows = self._slots.take(slots[pending] & self._mask) - 1
            hit = same_keys(self._keys.take(rows, axis=0), keys[pending]) & (rows >= 0)
            result[pending[hit]] = rows[hit]
            pending = pending[~hit & (rows >= 0)]
            slots[pending] += 1
        for i in pending.tolist():
            result[i] = self._probe(keys[i].tolist(), int(slots[i]) & self._mask)
        return result

    def _find_one(self, key: list[int]) -> int:
        return self._probe(key, key[0] & self._mask)

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
        slots = np.bitwise_and(keys[:, 0], self._mask_word).view(np.int64)
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
        """Take a row out, closing the gap so that no tombstone stays behind."""
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

    def rows(self) -> Rows:
        """Return all rows in the table, ascending."""
        used: Rows = np.sort(self._slots[self._slots != 0] - 1)
        return used
