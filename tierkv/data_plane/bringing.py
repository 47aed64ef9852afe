"""Carries a matched prefix into the device pool: from host memory, and from disk through it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierkv.data_plane.arrivals import (
    Arrival,
    HostArrival,
    LoadMeter,
    Moves,
    arrived,
    await_events,
    copy_layers,
)
from tierkv.data_plane.claims import Claims
from tierkv.data_plane.fetching import Fetcher, FetchOutcome, judge
from tierkv.data_plane.staged import StagedArrival
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Rows
    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.devices.base import Stream


class Lane:
    """What all loads of a store share.

    Attributes:
        arriving: by row, the copies under way of pages that are device-resident already.
    """

    def __init__(self, core: Core, transfers: Transfers, stream: Stream) -> None:
        self.core = core
        self.transfers = transfers
        self.stream = stream
        self.fetcher = Fetcher(core, transfers)
        self.arriving: dict[int, HostArrival] = {}


class Move:
    """One load's pages on their way to the device.  One thread; call without the lock.

    Args:
        lane: what all loads share.
        claims: pins on all pages, one copy each; those of shared pages end up on the device.
        partial: pages used in part, of which the sequence gets copies of its own.
        meter: what the load takes.
        deadline: when to give up.

    Attributes:
        arrivals: what is on its way.
        private: by row, the device slots that belong to the sequence alone.
    """

    def __init__(
        self, lane: Lane, claims: Claims, partial: list[int], meter: LoadMeter, deadline: float
    ) -> None:
        self.arrivals: list[Arrival] = []
        self.private: dict[int, int] = {}
        self._lane = lane
        self._core = lane.core
        self._claims = claims
        self._partial = partial
        self._meter = meter
        self._deadline = deadline
        self._spare: dict[int, int] = {}  # device slots that nothing has been copied to yet
        self._staged: StagedArrival | None = None

    def bring(self, absent: list[int], *, behind: bool) -> FetchOutcome:
        """Bring pages that are not on the device, and copies of the partial ones, there.

        Args:
            absent: the pages.
            behind: read the last batch, which may be all, behind the gate.

        Returns:
            READY, or why it could not be done; then everything was given back.
        """
        core, wanted = self._core, absent + self._partial
        slots = self._lane.transfers.obtain(Tier.DEVICE, len(wanted), deadline=self._deadline)
        if slots is None:
            return FetchOutcome.NO_ROOM
        self._spare = dict(zip(wanted, slots, strict=True))
        outcome: FetchOutcome | None = None
        try:
            outcome = self._bring_batches(wanted, behind=behind)
        finally:
            if outcome is not FetchOutcome.READY:
                self.undo()
        with core.lock:  # pages that somebody else brought in meanwhile needed no slot
            core.planner.give_back(Tier.DEVICE, self._spare.values())
        self._spare.clear()
        return outcome

    def wait(self) -> None:
        """Wait for what was started; whether it failed is told when it is settled."""
        with self._meter.waiting():
            for arrival in self.arrivals:
                await_events(arrival.events.values(), self._deadline, self._core.clock)
                if isinstance(arrival, HostArrival):
                    arrival.release_sources()

    def arrived(self) -> bool:
        """Return whether everything that was started is over and none of it failed."""
        return all(arrived(arrival.events.values()) for arrival in self.arrivals)

    def place(self, row: int, table: GroupTable, page: int) -> None:
        """Say which page of the sequence a private page is, lest it stay so for ever."""
        if self._staged is not None and row not in self._partial:
            self._staged.place(row, table, page)

    def _bring_batches(self, wanted: list[int], *, behind: bool) -> FetchOutcome:
        reads = self._lane.transfers.reads
        step = max(1, self._core.planner.capacity(Tier.HOST) // 2)
        with self._core.lock:
            away = set(self._lane.fetcher.settle_claims(wanted, self._claims))
        here = [row for row in wanted if row not in away]
        wanted = [row for row in wanted if row in away]
        # Only what must be read needs host memory to pass through.
        if here and not self._start(here):
            return FetchOutcome.GONE
        for start in range(0, len(wanted), step):
            batch = wanted[start : start + step]
            with self._core.lock:
                crowded = self._lane.transfers.obtainable(Tier.HOST) < len(batch)
            if start or crowded:  # the host pages of copies under way must come free
                self.wait()
            if behind and start + step >= len(wanted) and reads.trusted:
                return self._stage(batch)
            with self._meter.waiting():
                outcome = self._lane.fetcher.fetch(batch, self._claims, self._deadline)
            if outcome is not FetchOutcome.READY:
                return outcome
            if not self._start(batch):
                return FetchOutcome.GONE
        return FetchOutcome.READY

    def _stage(self, batch: list[int]) -> FetchOutcome:
        """Start copying what is in memory, and reading what is not."""
        core, lane, deadline = self._core, self._lane, self._deadline
        with core.lock:
            away = lane.fetcher.settle_claims(batch, self._claims)
            if away and core.disk is None:
                return FetchOutcome.UNREADABLE
            using, own = lane.fetcher.enlist(away, self._claims, deadline)
            staged = StagedArrival(core, lane.transfers.reads, lane.stream, using, away)
        begun = False
        try:
            if own is not None:
                lane.fetcher.start(own, deadline, in_parts=True)
            started = [read.begun.wait(max(0.0, deadline - core.clock())) for read in using]
            with core.lock:
                over = [read for read in using if read.over]
                outcome = judge(over, {row for read in over for row in read.rows} & {*away})
                if outcome is FetchOutcome.READY and not all(started):
                    outcome = FetchOutcome.UNREADABLE
                if outcome is FetchOutcome.READY:
                    missing = set(away)
                    if self._start([row for row in batch if row not in missing]):
                        self._begin(staged, away)
                        begun = True
                    else:
                        outcome = FetchOutcome.GONE
        finally:
            if not begun:
                staged.settle()
        return outcome

    def _begin(self, staged: StagedArrival, rows: list[int]) -> None:
        """Let the pages that are being read go into slots of the sequence's own."""
        targets = {row: self._spare.pop(row) for row in rows}
        self.private.update(targets)
        self._claims.end(rows)
        self._core.counters.gated_pages += len(rows)
        staged.begin(targets)
        self._staged = staged
        self.arrivals.append(staged)

    def _start(self, rows: Sequence[int]) -> bool:
        """Enqueue the copies of pages in memory, one event a layer; False when one has left it.

        A page that failed to arrive on the device leaves it whoever has pinned it.
        """
        core, claims, sources = self._core, self._claims, Claims(self._core)
        with core.lock:
            if self._lane.fetcher.settle_claims(rows, claims):
                return False
            # A page that somebody else has brought in meanwhile needs no copy.
            there = core.index.residency(rows) >> Tier.DEVICE & 1
            partial = [row for row in rows if row in self._partial]
            whole = [row for row in rows if row not in self._partial]
            here = {row for row, t in zip(rows, there.tolist(), strict=True) if t}
            shared = [row for row in whole if row not in here]
            copied = [*shared, *partial]
            targets = [self._spare.pop(row) for row in copied]
            tiers = [claims.tier(row) for row in copied]
            slots = [core.slot(row, tier) for row, tier in zip(copied, tiers, strict=True)]
            above = [slot for slot, t in zip(slots, tiers, strict=True) if t is Tier.DEVICE]
            core.fences.order(self._lane.stream, [*targets, *above], core.timeout_s)
            groups = core.index.group(copied).tolist()
            moves = Moves.join(zip(groups, tiers, slots, targets, strict=True))
            sources.add(dict(zip(copied, tiers, strict=True)))
            claims.end(partial)
            self.private.update(zip(partial, targets[len(shared) :], strict=True))
            core.planner.install(Tier.DEVICE, shared, targets[: len(shared)])
            claims.move(whole, Tier.DEVICE)
            core.counters.promoted_pages += len(shared)
            from_host = [row for row, tier in zip(copied, tiers, strict=True) if tier is Tier.HOST]
            core.count_bytes(from_host, Tier.HOST, Tier.DEVICE)
            # Enqueued under the lock: whoever sees a page resident also sees it arriving.
            events = copy_layers(core, self._lane.stream, moves, core.spec.layer_to_group)
            self.arrivals.append(HostArrival(core, shared, sources, events, self._lane.arriving))
            for row, tier in zip(copied, tiers, strict=True):
                if tier is Tier.DEVICE:  # what is copied on may itself not have arrived yet
                    self.join(row)
            return True

    def join(self, row: int) -> bool:
        """Wait, behind the gate, for a page that another sequence is bringing in, if one is."""
        arrival = self._lane.arriving.get(row)
        if arrival is None or arrival in self.arrivals:
            return False
        if all(arrival.events is not other.events for other in self.arrivals):
            joined = HostArrival(self._core, [], Claims(self._core), arrival.events, {})
            self.arrivals.append(joined)
        return True

    def undo(self) -> None:
        """Let what was copied before a failure stay resident; give the other slots back."""
        core = self._core
        for arrival in self.arrivals:
            arrival.cancel()
            await_events(arrival.events.values(), core.deadline(), core.clock)
        events = [event for a in self.arrivals for event in a.events.values()]
        rows = [r for a in self.arrivals if isinstance(a, HostArrival) for r in a.rows]
        with core.lock:
            core.planner.give_back(Tier.DEVICE, self._spare.values())
            self._spare.clear()
            # What a late copy may still write to stays held until it is over.
            pinned = np.asarray(rows, np.int32)
            core.index.pin(pinned, Tier.DEVICE)
            put_back = partial(self._put_back, pinned)
            self._lane.transfers.when(lambda: all(event.done() for event in events), put_back)

    def _put_back(self, rows: Rows) -> None:
        """Take arrivals off the books that are over.  Call with the lock held."""
        for arrival in self.arrivals:
            arrival.settle()
        self._core.planner.give_back(Tier.DEVICE, self.private.values())
        self._core.index.unpin(rows, Tier.DEVICE)
