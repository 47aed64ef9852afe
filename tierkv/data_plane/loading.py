"""Brings a prompt's reusable prefix into the device pool.

Pages from disk are read and verified in host memory before they count as found; the
copies from host memory to the device run behind the layer gate.  For callers that can
start over with less, the reads run behind the gate as well (``staged.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.match import GroupMatch, Match, match
from tierkv.control_plane.spilling import pages_needed, plan_spill
from tierkv.control_plane.table import PRIVATE, GroupTable
from tierkv.data_plane.arrivals import Arrival, LoadMeter, await_events
from tierkv.data_plane.bringing import Lane, Move
from tierkv.data_plane.claims import Claims
from tierkv.data_plane.fetching import Fetcher, FetchOutcome
from tierkv.data_plane.planning import Planning
from tierkv.stats import Found
from tierkv.storage.format import PAGE_TAIL
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.load_plan import LoadPlan
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.identity.keys import KeyChain, TokenArray

_IN_MEMORY = 1 << Tier.DEVICE | 1 << Tier.HOST
_ANYWHERE = _IN_MEMORY | 1 << Tier.DISK | 1 << Tier.REMOTE
_MAX_ATTEMPTS = 8


@dataclass(slots=True)
class Loaded:
    """The outcome of a load.

    Attributes:
        tokens: length of the prefix loaded.
        tables: page tables; each shared page is pinned on the device for the sequence.
        arrivals: what is still on its way.
        resumed: where the turn ended whose tail pages were resumed from, 0 when none were.
        found: tokens by the tier that held them.
        spill: pages of each group that must stay in host memory for all tokens to fit.
        meter: what the load takes.
        plan: what was weighed, None where nothing was.
        front: tokens that are to be computed while the pages behind them arrive.
    """

    tokens: int
    tables: list[GroupTable]
    meter: LoadMeter
    arrivals: list[Arrival] = field(default_factory=list)
    resumed: int = 0
    found: Found = field(default_factory=Found)
    spill: Sequence[int] = ()
    plan: LoadPlan | None = None
    front: int = 0


class Loader:
    """Finds and loads prefixes.  Thread-safe; call without the lock."""

    def __init__(self, core: Core, transfers: Transfers) -> None:
        self._core = core
        self._transfers = transfers
        self._low_fetcher = Fetcher(core, transfers, memory=(Tier.HOST,))
        self._stream = core.device.stream("load")
        self._lane = Lane(core, transfers, self._stream)
        traffic = {Tier.HOST: self._stream.traffic, Tier.DISK: transfers.reads.traffic}
        self._planning = Planning(core, traffic)

    def load(
        self,
        chains: Sequence[KeyChain],
        tokens: TokenArray,
        limit: int,
        *,
        total: int = 0,
        device_limit: int | None = None,
        restartable: bool = False,
        can_split: bool = False,
    ) -> Loaded:
        """Load the longest reusable prefix of at most ``limit`` tokens.

        Less, if need be none of it, where disk, host memory or pool cannot give more now.

        Args:
            chains: key chain of each group.
            tokens: the prompt.
            limit: longest prefix wanted.
            total: tokens that the sequence will have in the end; where the device cannot
                hold them all, the first pages stay in host memory.
            device_limit: most device slots that the sequence may take.
            restartable: the caller starts over when a page does not arrive, so that pages on
                disk need not be verified before they count as found.
            can_split: the caller can compute the front while the back loads.
        """
        deadline = self._core.deadline()
        meter = LoadMeter(self._core, self._stream.traffic, self._transfers.reads.traffic)
        within, origin = _ANYWHERE, dict[int, Tier]()
        plan: LoadPlan | None = None
        for attempt in range(_MAX_ATTEMPTS):
            if attempt == _MAX_ATTEMPTS - 1:
                within = _IN_MEMORY
            found, claims = self._match(chains, tokens, limit, within)
            for row, tier in claims.tiers().items():
                origin.setdefault(row, tier)
            try:
                spill = self._spill(found, claims, max(total, len(tokens)), device_limit)
                front = 0
                if plan is None:
                    plan = self._plan(found, claims, len(tokens), restartable, can_split, spill)
                    if plan.prefix_tokens < found.tokens:
                        limit = plan.prefix_tokens
                        claims.release()
                        found, claims = self._match(chains, tokens, limit, within)
                    if found.tokens == plan.prefix_tokens:
                        front, found = plan.front_tokens, self._behind(found, claims, plan)
                loaded = Loaded(found.tokens, self._tables(found, spill), meter, spill=spill)
                loaded.plan, loaded.front = plan, front
                outcome = self._bring_in(loaded, found, claims, restartable, deadline)
            except BaseException:
                claims.release()
                raise
            if outcome is FetchOutcome.READY:
                loaded.found = self._count(found, origin)
                self._touch(found)
                return loaded
            claims.release()
            if outcome is FetchOutcome.UNREADABLE:
                within = _IN_MEMORY
            elif outcome is FetchOutcome.NO_ROOM:
                # Whole pages need no copies of their own beside them; nothing needs no room.
                size = self._core.spec.groups[self._core.spec.anchor].page_tokens
                whole = found.tokens // size * size
                limit = whole if whole < found.tokens else 0
        raise AssertionError("a prefix that is in memory always loads")

    def settle(self, arrivals: Sequence[Arrival]) -> None:
        """Wait for arrivals and take them off the books; drop pages whose copy failed."""
        core = self._core
        for arrival in arrivals:
            await_events(arrival.events.values(), core.deadline(), core.clock)
        with core.lock:
            for arrival in arrivals:
                arrival.settle()

    def check(self) -> None:
        """Raise AssertionError when a page on its way is not resident or not pinned."""
        core = self._core
        with core.lock:
            for row in self._lane.arriving:
                assert core.is_in(row, Tier.DEVICE), f"row {row} arrives but is not resident"
                assert core.index.pins([row], Tier.DEVICE)[0] > 0, f"row {row} arrives unpinned"

    def _match(
        self, chains: Sequence[KeyChain], tokens: TokenArray, limit: int, within: int
    ) -> tuple[Match, Claims]:
        core = self._core
        claims = Claims(core)
        with core.lock:
            found = match(core.index, core.spec, chains, tokens, limit=limit, within=within)
            rows = np.concatenate([group.rows for group in found.groups])
            residency = core.index.residency(rows).tolist()
            claims.add(
                {
                    row: next(tier for tier in Tier if held >> tier & 1)
                    for row, held in zip(rows.tolist(), residency, strict=True)
                }
            )
            return found, claims

    def _plan(
        self,
        found: Match,
        claims: Claims,
        prompt: int,
        restartable: bool,
        can_split: bool,
        spill: Sequence[int],
    ) -> LoadPlan:
        with self._core.lock:
            return self._planning.plan(
                found,
                claims.tiers(),
                prompt,
                restartable=restartable,
                can_split=can_split and not any(spill),
            )

    def _behind(self, found: Match, claims: Claims, plan: LoadPlan) -> Match:
        """Return the match without the pages of the front, which is computed instead."""
        groups = []
        for group, of in zip(found.groups, self._core.spec.groups, strict=True):
            skipped = 0
            if of.kind.needs_every_page:
                skipped = plan.front_tokens // of.page_tokens - group.first_page
            claims.end(group.rows[:skipped].tolist())
            groups.append(
                GroupMatch(group.rows[skipped:], group.first_page + skipped, group.partial)
            )
        return Match(found.tokens, tuple(groups))

    def _tables(self, found: Match, spill: Sequence[int]) -> list[GroupTable]:
        """Return empty page tables that keep the first ``spill`` pages in host memory."""
        tables = [GroupTable(group) for group in self._core.spec.groups]
        for table, group, count in zip(tables, found.groups, spill, strict=True):
            table.spilled = min(count, len(group.rows) - group.partial)
        return tables

    def _bring_in(
        self, loaded: Loaded, found: Match, claims: Claims, restartable: bool, deadline: float
    ) -> FetchOutcome:
        """Load matched pages; not READY when one of them turned out not to be there."""
        partial = [int(g.rows[-1]) for g in found.groups if g.partial]
        low = [
            row
            for table, group in zip(loaded.tables, found.groups, strict=True)
            for row in group.rows[: table.spilled].tolist()
        ]
        with loaded.meter.waiting():
            outcome = self._keep_low(low, claims, deadline)
        if outcome is not FetchOutcome.READY:
            return outcome
        elsewhere = {*low, *partial}
        absent = [
            row
            for row, tier in claims.tiers().items()
            if tier is not Tier.DEVICE and row not in elsewhere
        ]
        move = Move(self._lane, claims, partial, loaded.meter, deadline)
        # What may have to leave the device at once must have arrived there.
        behind = (restartable or loaded.front > 0) and not any(loaded.spill)
        outcome = move.bring(absent, behind=behind)
        if outcome is FetchOutcome.READY:
            spills = zip(loaded.tables, loaded.spill, strict=True)
            if any(table.spilled < count for table, count in spills):
                move.wait()  # a page used in part is going to leave the device again
                if not move.arrived():
                    move.undo()
                    return FetchOutcome.NO_ROOM
            loaded.arrivals = move.arrivals
            if not self._fill_tables(loaded, found, move):
                move.undo()
                return FetchOutcome.GONE
        return outcome

    def _spill(
        self, found: Match, claims: Claims, total: int, device_limit: int | None
    ) -> list[int]:
        """Return how many pages of each group stay in host memory."""
        core, groups = self._core, self._core.spec.groups
        copied = {int(group.rows[-1]) for group in found.groups if group.partial}
        with core.lock:
            # What was found in memory is pinned, by this load at least, but it is there.
            tiers = claims.tiers()
            there, low = (list(tiers.values()).count(t) for t in (Tier.DEVICE, Tier.HOST))
            device = there + self._transfers.obtainable(Tier.DEVICE)
            host = low + self._transfers.obtainable(Tier.HOST)
            beside = sum(tiers[row] is Tier.DEVICE for row in copied)
        pages = pages_needed(core.spec, total)
        device = device if device_limit is None else min(device, device_limit)
        spill = plan_spill(groups, pages, fixed=0, device=device, host=host)
        if spill and any(spill):  # then make room for copies of pages used in part as well
            spill = plan_spill(groups, pages, fixed=beside, device=device, host=host) or spill
        return spill or [0] * len(groups)

    def _keep_low(self, rows: list[int], claims: Claims, deadline: float) -> FetchOutcome:
        """Bring pages into host memory, where they stay for as long as the sequence runs."""
        core = self._core
        with core.lock:
            claimed = [row for row in rows if claims.tier(row) is Tier.DEVICE]
            on_device = [row for row in claimed if core.is_in(row, Tier.DEVICE)]
            there = [row for row in on_device if core.is_in(row, Tier.HOST)]
            alone = [row for row in on_device if not core.is_in(row, Tier.HOST)]
            claims.move(there, Tier.HOST)
            self._transfers.let_go(np.asarray(there, np.int32))
        if alone:
            copied = self._transfers.copy_to_host(np.asarray(alone, np.int32), deadline)
            with core.lock:
                claims.move(copied.tolist(), Tier.HOST)
                core.index.unpin(copied, Tier.HOST)
                self._transfers.let_go(copied)
            if len(copied) < len(alone):
                return FetchOutcome.NO_ROOM
        return self._low_fetcher.fetch(rows, claims, deadline)

    def _fill_tables(self, loaded: Loaded, found: Match, move: Move) -> bool:
        """Enter the pages; False when one that failed to arrive has left the device."""
        core = self._core
        with core.lock:
            for table, group in zip(loaded.tables, found.groups, strict=True):
                for page, row in enumerate(group.rows.tolist(), start=group.first_page):
                    if row not in move.private and not core.is_in(row, table.tier(page)):
                        return False
            for table, group in zip(loaded.tables, found.groups, strict=True):
                for page, row in enumerate(group.rows.tolist(), start=group.first_page):
                    if row in move.private:
                        table.set(page, move.private[row], PRIVATE)
                        move.place(row, table, page)
                        if core.index.flags([row])[0] & PAGE_TAIL:
                            loaded.resumed = int(core.index.end_token([row])[0])
                    else:
                        tier = table.tier(page)
                        table.set(page, core.slot(row, tier), row)
                        if tier is Tier.DEVICE:
                            core.counters.delay_hits += move.join(row)
            return True

    def _touch(self, found: Match) -> None:
        """Record the use: the anchor's path first, then the windows that hang below it."""
        core, anchor = self._core, self._core.spec.anchor
        others = (group for i, group in enumerate(found.groups) if i != anchor)
        paths = [found.groups[anchor], *others]
        with core.lock:
            rows = np.concatenate([group.rows for group in paths])
            core.index.touch(rows, now=int(core.wall_clock()))

    def _count(self, found: Match, origin: Mapping[int, Tier]) -> Found:
        """Count the tokens found by the nearest tier that held their anchor page."""
        core = self._core
        group, anchor = core.spec.groups[core.spec.anchor], found.groups[core.spec.anchor]
        tokens = dict.fromkeys(Tier, 0)
        start = group.first_needed(found.tokens)
        if anchor.rows.size:  # tokens before a sliding anchor's window count with its first page
            tokens[origin[int(anchor.rows[0])]] += start
        for page, row in enumerate(anchor.rows.tolist(), start=anchor.first_page):
            low = max(start, page * group.page_tokens)
            high = min(found.tokens, (page + 1) * group.page_tokens)
            tokens[origin[row]] += high - low
        return Found(**{tier.label: count for tier, count in tokens.items()})
