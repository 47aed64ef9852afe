"""How rows come and go: keys to rows, parents and children, ghosts."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._columns import (
    BRANCH,
    LISTED,
    PAGE_TAIL,
    PRIVATE_FLAGS,
    PUBLIC_FLAGS,
    UNKNOWN_GROUP,
    Columns,
    RowAllocator,
    Rows,
)
from tierkv.control_plane._ranking import Ranking
from tierkv.control_plane._table import KeyTable, Words, same_keys
from tierkv.control_plane._tails import TailLists
from tierkv.control_plane.policies import EvictionClass
from tierkv.tiers import Tier

Column: TypeAlias = NDArray[np.integer]
Meta: TypeAlias = tuple[Column, Column, Column, Column]


class Forest:
    """The trees of rows; a row exists while it is resident, pinned or has children."""

    def __init__(self, columns: Columns, ranking: Ranking, max_rows: int) -> None:
        self._columns = columns
        self._ranking = ranking
        self.table = KeyTable(columns.keys, max_rows)
        self.allocator = RowAllocator(max_rows)
        self.tails = TailLists(max_rows, columns.group.data, columns.num_tokens.data)

    def insert(
        self, words: Words, parents: Words, meta: Meta, stamps: NDArray[np.int64], now: int
    ) -> Rows:
        """Enter those pages that find room, the earlier ones first; -1 for the others.

        Args:
            words: page keys.
            parents: parent keys, zeros for none.
            meta: group, end_tokens, num_tokens and flags of each page.
            stamps: order of use of each page.
            now: caller's clock.
        """
        count, room = len(words), self.allocator.free_count
        if 2 * count <= room or self._missing(words, parents) <= room:
            return self._enter(words, parents, meta, stamps, now)
        if count == 1:
            return np.array([-1], np.int32)
        parts = []
        for part in (slice(count // 2), slice(count // 2, None)):
            group, ends, tokens, flags = (values[part] for values in meta)
            some = (group, ends, tokens, flags)
            parts.append(self.insert(words[part], parents[part], some, stamps[part], now))
        return np.concatenate(parts)

    def _missing(self, words: Words, parents: Words) -> int:
        """Return how many rows pages and their parents would take."""
        named = np.concatenate([words, parents[parents.any(axis=1)]])
        unknown = named[self.table.find(named) < 0]
        return len({key.tobytes() for key in unknown})

    def _enter(
        self, words: Words, parents: Words, meta: Meta, stamps: NDArray[np.int64], now: int
    ) -> Rows:
        """Enter pages for which there is room."""
        columns = self._columns
        rows = self._place(words)
        fresh = (columns.residency.take(rows) == 0).nonzero()[0]
        if fresh.size:
            new = rows[fresh]
            group, end_tokens, num_tokens, flags = (values[fresh] for values in meta)
            columns.group[new] = group
            columns.end_token[new] = end_tokens
            columns.num_tokens[new] = num_tokens
            columns.flags[new] = (columns.flags.take(new) & PRIVATE_FLAGS) | (flags & PUBLIC_FLAGS)
            columns.used_s[new] = now
            # A page named twice keeps the last of its stamps, like its other columns.
            columns.stamp[new] = stamps[fresh]
            self._ranking.created(new)
        self._link(rows, self._place_parents(words, parents, rows))
        return rows

    def _place(self, words: Words) -> Rows:
        """Return the rows of keys, making new ones for those unknown."""
        rows = self.table.find(words)
        missing = (rows < 0).nonzero()[0]
        if missing.size:
            columns = self._columns
            new = self.allocator.take(missing.size)
            columns.keys[new] = words[missing]
            owners = self.table.add(new)
            rows[missing] = owners
            if (owners != new).any():  # a key named twice in this call
                columns.keys[new[owners != new]] = 0
                self.allocator.give_back(new[owners != new])
            columns.parent[owners] = -1
            columns.group[owners] = UNKNOWN_GROUP
            columns.flags[owners] = 0
            columns.klass[owners] = EvictionClass.NORMAL
            columns.marks[owners] = 0
            columns.end_token[owners] = 0
            columns.num_tokens[owners] = 0
            columns.hits[owners] = 0
        return rows

    def _place_parents(self, words: Words, parents: Words, rows: Rows) -> Rows:
        """Return the parent rows, -1 for none; unknown parents become ghosts."""
        result = np.full(len(rows), -1, np.int32)
        if len(rows) > 1:  # a path: most parents are the page before
            chained = same_keys(parents[1:], words[:-1])
            result[1:][chained] = rows[:-1][chained]
        rest = (result < 0).nonzero()[0]
        rest = rest[parents[rest].any(axis=1)]
        if rest.size:
            result[rest] = self._place(parents[rest])
        return result

    def _link(self, rows: Rows, parents: Rows) -> None:
        """Hang rows that have no parent yet below their parents."""
        columns = self._columns
        loose = ((columns.parent.take(rows) < 0) & (parents >= 0)).nonzero()[0]
        if not loose.size:
            return
        rows, first = np.unique(rows[loose], return_index=True)
        parents = parents[loose][first]
        assert (rows != parents).all(), "a page cannot be its own parent"
        columns.parent[rows] = parents
        np.add.at(columns.children, parents, 1)
        groups, of_parents = columns.group.take(rows), columns.group.take(parents)
        # Nothing is known of a ghost: its children are then taken to be of its group.
        branch = (groups == of_parents) | (of_parents == UNKNOWN_GROUP)
        np.add.at(columns.branches, parents[branch], 1)
        columns.flags[rows[branch]] |= BRANCH
        held = columns.residency.take(rows)
        if held.any():
            self._link_resident(rows, parents, held)
        for i in (columns.flags.take(rows) & PAGE_TAIL).nonzero()[0].tolist():
            row = int(rows[i])
            self.tails.add(int(parents[i]), row)
            columns.flags[row] |= LISTED

    def _link_resident(self, rows: Rows, parents: Rows, held: NDArray[np.uint8]) -> None:
        """Count resident rows that find their parent late."""
        for tier in Tier:
            above = parents[(held & (1 << tier)) != 0]
            if above.size:
                np.add.at(self._columns.kids[tier], above, 1)
                self._ranking.dequeue(above, tier)

    def forget(self, rows: NDArray[np.integer]) -> None:
        """Free those rows that nothing needs, and ghosts above them."""
        columns = self._columns
        needed = columns.residency.take(rows) + columns.pins.take(rows)
        for row in rows[(needed + columns.children.take(rows)) == 0].tolist():
            while row >= 0 and not self._is_needed(row):
                parent = int(columns.parent[row])
                self._free_row(row, parent)
                row = parent

    def _is_needed(self, row: int) -> bool:
        columns = self._columns
        return bool(columns.residency[row] or columns.pins[row] or columns.children[row])

    def _free_row(self, row: int, parent: int) -> None:
        columns = self._columns
        flags = int(columns.flags[row])
        if parent >= 0:
            columns.children[parent] -= 1
            columns.branches[parent] -= bool(flags & BRANCH)
            if flags & LISTED:
                self.tails.remove(parent, row)
        self.table.remove(row)
        self.allocator.give_back([row])

    def path(self, row: int) -> Rows:
        """Return the pages from the root to ``row``; unknown parents are left out."""
        columns, path = self._columns, list[int]()
        while row >= 0:
            if columns.group[row] != UNKNOWN_GROUP:
                path.append(row)
            row = int(columns.parent[row])
        return np.array(path[::-1], np.int32)

    def unshared_path(self, row: int) -> Rows:
        """Return the pages from ``row`` up, the deepest first, that only it continues.

        A page is shared when two children of its own group hang below it.
        """
        columns, path = self._columns, list[int]()
        while row >= 0 and columns.branches[row] <= 1 and columns.group[row] != UNKNOWN_GROUP:
            path.append(row)
            row = int(columns.parent[row])
        return np.array(path, np.int32)
