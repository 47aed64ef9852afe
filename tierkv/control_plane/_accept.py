"""Which prefix lengths a layer group accepts, given the pages that are there."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.identity.spec import GroupKind, LayerGroup

Rows = NDArray[np.int32]


class Acceptor(Protocol):
    """One group's pages and tails, and the lengths they can resume.

    Attributes:
        group: the layer group.
        size: its tokens a page.
        rows: row of each page that a prefix up to the limit may need, -1 where absent.
    """

    group: LayerGroup
    size: int
    rows: Rows

    @property
    def reach(self) -> int:
        """Tokens up to which a tail may help this group."""

    def floor(self, length: int) -> int:
        """Return the largest accepted length up to ``length``; 0 is always accepted."""

    def wants_tail(self, end: int) -> bool:
        """Return whether a tail page that ends at ``end`` may help."""

    def add_tail(self, end: int, row: int) -> None:
        """Learn of a tail page that is there."""

    def last_row(self, length: int) -> int:
        """Return the page used for the end of an accepted length inside a page."""


class _Contiguous:
    """Full and latent groups: any length that an unbroken run of pages covers.

    The page after the run may be a tail.
    """

    def __init__(self, group: LayerGroup, rows: Rows) -> None:
        self.group, self.size, self.rows = group, group.page_tokens, rows
        absent = (rows < 0).nonzero()[0]
        self._run = int(absent[0]) if absent.size else len(rows)
        self._end = self._run * self.size
        self._tail = -1

    @property
    def reach(self) -> int:
        return min(self._run + 1, len(self.rows)) * self.size - 1

    def floor(self, length: int) -> int:
        return min(length, self._end)

    def wants_tail(self, end: int) -> bool:
        page, rest = divmod(end, self.size)
        return rest != 0 and page == self._run < len(self.rows)

    def add_tail(self, end: int, row: int) -> None:
        if end > self._end:
            self._end, self._tail = end, row

    def last_row(self, length: int) -> int:
        page = length // self.size
        return int(self.rows[page]) if page < self._run else self._tail


class _Window:
    """Sliding groups: lengths whose last window is covered by pages.

    The last of them may be a tail.  For the lengths that end inside page p, the window
    begins later the longer they are; so page p accepts the lengths from ``low[p]``, where
    the window begins inside the unbroken run of pages before p, to ``high[p]``.
    """

    def __init__(self, group: LayerGroup, rows: Rows) -> None:
        assert group.window is not None
        self.group, self.size, self.rows = group, group.page_tokens, rows
        pages = np.arange(len(rows))
        run_start = np.zeros(len(rows), np.int64)
        run_start[1:] = np.maximum.accumulate(np.where(rows < 0, pages + 1, 0))[:-1]
        window_start = np.where(run_start > 0, run_start * self.size + group.window - 1, 0)
        self._low = np.maximum(window_start, pages * self.size + 1)
        self._high = np.where(rows < 0, 0, (pages + 1) * self.size)
        self._tails = np.full(len(rows), -1, np.int32)
        self._rank()

    def _rank(self) -> None:
        """Note, for each page, the last page up to it that accepts a length."""
        accepting = np.where(self._high >= self._low, np.arange(len(self.rows)), -1)
        self._last = np.maximum.accumulate(accepting)

    @property
    def reach(self) -> int:
        return len(self.rows) * self.size - 1

    def floor(self, length: int) -> int:
        page = (length - 1) // self.size
        if page >= 0 and min(length, self._high[page]) >= self._low[page]:
            return min(length, int(self._high[page]))
        before = self._last[page - 1] if page > 0 else -1
        return int(self._high[before]) if before >= 0 else 0

    def wants_tail(self, end: int) -> bool:
        page, rest = divmod(end, self.size)
        return rest != 0 and page < len(self.rows) and bool(self.rows[page] < 0)

    def add_tail(self, end: int, row: int) -> None:
        page = end // self.size
        if end > self._high[page]:
            self._high[page], self._tails[page] = end, row
            self._rank()

    def last_row(self, length: int) -> int:
        page = length // self.size
        return int(self.rows[page] if self.rows[page] >= 0 else self._tails[page])


class _Snapshots:
    """Snapshot groups: exactly the ends of pages and tails."""

    def __init__(self, group: LayerGroup, rows: Rows) -> None:
        self.group, self.size, self.rows = group, group.page_tokens, rows
        self._ends: list[int] = (((rows >= 0).nonzero()[0] + 1) * self.size).tolist()
        self._tails: dict[int, int] = {}

    @property
    def reach(self) -> int:
        return len(self.rows) * self.size - 1

    def floor(self, length: int) -> int:
        at = bisect_right(self._ends, length)
        return self._ends[at - 1] if at else 0

    def wants_tail(self, end: int) -> bool:
        page, rest = divmod(end, self.size)
        return rest != 0 and page < len(self.rows)

    def add_tail(self, end: int, row: int) -> None:
        insort(self._ends, end)
        self._tails[end] = row

    def last_row(self, length: int) -> int:
        return self._tails[length]


def make_acceptor(group: LayerGroup, found: Rows, limit: int) -> Acceptor:
    """Return the acceptor of a group.

    Args:
        group: the layer group.
        found: rows of its full pages from the first on, -1 where absent.
        limit: the longest length that will be asked about.
    """
    rows = np.empty(group.pages_for(limit), np.int32)
    rows[: len(found)] = found
    rows[len(found) :] = -1
    if group.kind.needs_every_page:
        return _Contiguous(group, rows)
    if group.kind is GroupKind.SLIDING:
        return _Window(group, rows)
    return _Snapshots(group, rows)
