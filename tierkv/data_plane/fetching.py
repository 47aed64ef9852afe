"""Brings pages from the disk tier into host memory before they count as found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from tierkv.storage.types import ReadStatus
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.claims import Claims
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.reads import Read
    from tierkv.data_plane.transfer import Transfers

_BAD = (ReadStatus.MISS, ReadStatus.CORRUPT)


class FetchOutcome(Enum):
    """What became of a fetch."""

    READY = auto()  # every page is in memory
    GONE = auto()  # a page proved bad or missing and is forgotten: match again
    NO_ROOM = auto()  # the device pool has no room for what was found: find less
    UNREADABLE = auto()  # a page could not be read now: make do with what is in memory


class Fetcher:
    """Brings disk pages into host memory, each read once however many ask for it."""

    def __init__(
        self,
        core: Core,
        transfers: Transfers,
        memory: Sequence[Tier] = (Tier.DEVICE, Tier.HOST),
    ) -> None:
        self._core = core
        self._transfers = transfers
        self._reads = transfers.reads
        self._memory = tuple(memory)  # the tiers whose copies will do, the best first

    def fetch(self, rows: Sequence[int], claims: Claims, deadline: float) -> FetchOutcome:
        """Bring claimed pages into memory; claims move with them."""
        core, reads = self._core, self._reads
        with core.lock:
            absent = self.settle_claims(rows, claims)
            if not absent:
                return FetchOutcome.READY
            if core.disk is None:
                return FetchOutcome.UNREADABLE
            needed, own = self.enlist(absent, claims, deadline)
        try:
            if own is not None:
                self.start(own, deadline)
            for read in needed:
                reads.wait(read, deadline)
        finally:
            with core.lock:
                reads.leave(needed)
        with core.lock:
            outcome = judge(needed, absent)
            missing = self.settle_claims(absent, claims)
        lost = outcome is FetchOutcome.READY and missing
        return FetchOutcome.UNREADABLE if lost else outcome

    def settle_claims(self, rows: Sequence[int], claims: Claims) -> list[int]:
        """Move claims to the nearest copies in memory; return the pages that have none.

        Call with the lock held.
        """
        self._reads.note_use(rows)
        residency = self._core.index.residency(rows).tolist()
        absent = list(rows)
        for tier in self._memory:
            there = [row for row, r in zip(rows, residency, strict=True) if r >> tier & 1]
            claims.move([row for row in there if row in absent], tier)
            absent = [row for row in absent if row not in set(there)]
        return absent

    def enlist(
        self, absent: Sequence[int], claims: Claims, deadline: float
    ) -> tuple[list[Read], Read | None]:
        """Use the reads of these pages that are under way, and open one of the others.

        The claims are on the host copies to come.  Call with the lock held.

        Returns:
            All reads in use, to be left in the end; and the one that is still to be started.
        """
        joined = self._reads.join(absent)
        known = {row for rows in joined.values() for row in rows}
        self._core.counters.delay_hits += len(known)
        mine = [row for row in absent if row not in known]
        own = self._reads.open(mine, deadline) if mine else None
        claims.move(absent, Tier.HOST)
        return ([*joined] if own is None else [*joined, own]), own

    def start(self, read: Read, deadline: float, *, in_parts: bool = False) -> None:
        """Start a read once there are host slots for it; it is over where there are none."""
        slots = self._transfers.obtain(Tier.HOST, len(read.rows), deadline=deadline)
        self._reads.start(read, slots, in_parts=in_parts)


def judge(reads: Iterable[Read], rows: Iterable[int]) -> FetchOutcome:
    """Return what became of pages in these reads.  Call with the lock held."""
    outcomes = {row: read.outcome.get(row) for read in reads for row in read.rows if read.over}
    statuses = {outcomes.get(row) for row in rows}
    if statuses <= {ReadStatus.HIT}:
        return FetchOutcome.READY
    if statuses <= {ReadStatus.HIT, *_BAD}:
        return FetchOutcome.GONE
    return FetchOutcome.UNREADABLE
