"""Reads pages from the disk tier into host memory, joining reads already in flight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from tierkv.storage.types import ReadStatus
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.claims import Claims
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers


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
        self._memory = tuple(memory)  # the tiers whose copies will do, the best first
        self._reading: dict[int, threading.Event] = {}

    def fetch(self, rows: Sequence[int], claims: Claims, deadline: float) -> FetchOutcome:
        """Bring claimed pages into memory; claims move with them."""
        core = self._core
        with core.lock:
            absent = self._settle_claims(rows, claims)
            joined = {row: self._reading[row] for row in absent if row in self._reading}
            mine = [row for row in absent if row not in joined]
            over = threading.Event()
            self._reading.update(dict.fromkeys(mine, over))
            core.counters.delay_hits += len(joined)
        try:
            outcome = self._read(mine, deadline) if mine else FetchOutcome.READY
        finally:
            with core.lock:
                for row in mine:
                    del self._reading[row]
            over.set()
        if outcome is not FetchOutcome.READY:
            return outcome
        for event in joined.values():
            event.wait(max(0.0, deadline - core.clock()))
        with core.lock:
            missing = self._settle_claims(absent, claims)
        return FetchOutcome.UNREADABLE if missing else FetchOutcome.READY

    def _settle_claims(self, rows: Sequence[int], claims: Claims) -> list[int]:
        """Move claims to the nearest copies in memory; return the pages that have none."""
        residency = self._core.index.residency(rows).tolist()
        absent = list(rows)
        for tier in self._memory:
            there = [row for row, r in zip(rows, residency, strict=True) if r >> tier & 1]
            claims.move([row for row in there if row in absent], tier)
            absent = [row for row in absent if row not in set(there)]
        return absent

    def _read(self, rows: list[int], deadline: float) -> FetchOutcome:
        core = self._core
        if core.disk is None:
            return FetchOutcome.UNREADABLE
        slots = self._transfers.obtain(Tier.HOST, len(rows), deadline=deadline)
        if slots is None:
            return FetchOutcome.UNREADABLE
        with core.lock:
            keys = [core.index.key(row) for row in rows]
            places = [
                core.arena.slot(slot)[: core.page_bytes(row)]
                for row, slot in zip(rows, slots, strict=True)
            ]
        ticket = core.disk.submit_read(keys, places, namespace=core.namespace.digest)
        statuses = ticket.wait(max(0.0, deadline - core.clock()))
        outcome = self._take_in(rows, slots, statuses)
        late = [slot for slot, s in zip(slots, statuses, strict=True) if s is ReadStatus.TIMEOUT]
        if late:  # the device may still write there
            with core.lock:
                self._transfers.park(
                    ticket.settled, late, partial(core.planner.give_back, Tier.HOST)
                )
        return outcome

    def _take_in(
        self, rows: list[int], slots: list[int], statuses: Sequence[ReadStatus]
    ) -> FetchOutcome:
        """Publish verified pages, forget bad ones, give all other slots back but late ones."""
        core = self._core
        outcome = FetchOutcome.READY
        good: list[tuple[int, int]] = []
        with core.lock:
            for row, slot, status in zip(rows, slots, statuses, strict=True):
                if status is ReadStatus.HIT:
                    good.append((row, slot))
                    continue
                if status is not ReadStatus.TIMEOUT:
                    core.planner.give_back(Tier.HOST, [slot])
                if status in (ReadStatus.MISS, ReadStatus.CORRUPT):
                    core.planner.evict(Tier.DISK, [row])
                    core.counters.disk_misses += status is ReadStatus.MISS
                    core.counters.disk_corrupt += status is ReadStatus.CORRUPT
                    if outcome is FetchOutcome.READY:
                        outcome = FetchOutcome.GONE
                else:
                    core.counters.disk_errors += status is not ReadStatus.TIMEOUT
                    core.counters.disk_timeouts += status is ReadStatus.TIMEOUT
                    outcome = FetchOutcome.UNREADABLE
            core.planner.install(Tier.HOST, [row for row, _ in good], [slot for _, slot in good])
            core.count_bytes([row for row, _ in good], Tier.DISK, Tier.HOST)
        return outcome
