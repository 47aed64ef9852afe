"""Brings a prompt's reusable prefix into the device pool.

Pages from disk are read and verified in host memory before they count as found; the
copies from host memory to the device run behind the layer gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.match import Match, match
from tierkv.control_plane.spilling import pages_needed, plan_spill
from tierkv.control_plane.table import PRIVATE, GroupTable
from tierkv.data_plane.claims import Claims
from tierkv.data_plane.fetching import Fetcher, FetchOutcome
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.stats import Found
from tierkv.storage.format import PAGE_TAIL
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.devices.base import Event
    from tierkv.identity.keys import KeyChain, TokenArray

_IN_MEMORY = 1 << Tier.DEVICE | 1 << Tier.HOST
_ANYWHERE = _IN_MEMORY | 1 << Tier.DISK | 1 << Tier.REMOTE
_MAX_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Arrival:
    """Pages on their way into the pool, layer by layer.

    Attributes:
        rows: committed pages that became device-resident with this arrival.
        sources: the pinned copies read from, to be released when all is over.
        events: by model layer, done when the layer has arrived.
    """

    rows: list[int]
    sources: Claims
    events: Mapping[int, Event]

    def done(self) -> bool:
        """Return whether all layers have arrived or failed."""
        return all(event.done() for event in self.events.values())

    def failed(self) -> bool:
        """Return whether a copy failed or is not over."""
        try:
            return not all(event.wait(0.0) for event in self.events.values())
        except DeviceError:
            return True


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
    """

    tokens: int
    tables: list[GroupTable]
    arrivals: list[Arrival] = field(default_factory=list)
    resumed: int = 0
    found: Found = field(default_factory=Found)
    spill: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Moves:
    """Pages of one group whose slots are adjacent on both sides: one strided copy a layer."""

    group: int
    tier: Tier
    source: int
    target: int
    pages: int

    @classmethod
    def of(cls, core: Core, rows: list[int], tiers: list[Tier], targets: list[int]) -> list[_Moves]:
        """Return the moves of pages to their device slots, joined where slots are adjacent."""
        groups = core.index.group(rows).tolist()
        slots = {t: core.index.slot(rows, t).tolist() for t in (Tier.DEVICE, Tier.HOST)}
        moves: list[_Moves] = []
        for i, (group, tier, target) in enumerate(zip(groups, tiers, targets, strict=True)):
            last, source = (moves[-1] if moves else None), slots[tier][i]
            if (
                last is not None
                and (last.group, last.tier) == (group, tier)
                and last.source + last.pages == source
                and last.target + last.pages == target
            ):
                moves[-1] = cls(group, tier, last.source, last.target, last.pages + 1)
            else:
                moves.append(cls(group, tier, source, target, 1))
        return moves


class Loader:
    """Finds and loads prefixes.  Thread-safe; call without the lock."""

    def __init__(self, core: Core, transfers: Transfers) -> None:
        self._core = core
        self._transfers = transfers
        self._fetcher = Fetcher(core, transfers)
        self._low_fetcher = Fetcher(core, transfers, memory=(Tier.HOST,))
        self._stream = core.device.stream("load")
        self._arriving: dict[int, Arrival] = {}

    def load(
        self,
        chains: Sequence[KeyChain],
        tokens: TokenArray,
        limit: int,
        *,
        total: int = 0,
        device_limit: int | None = None,
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
        """
        deadline = self._core.deadline()
        within, origin = _ANYWHERE, dict[int, Tier]()
        for attempt in range(_MAX_ATTEMPTS):
            if attempt == _MAX_ATTEMPTS - 1:
                within = _IN_MEMORY
            found, claims = self._match(chains, tokens, limit, within)
            for row, tier in claims.tiers().items():
                origin.setdefault(row, tier)
            try:
                spill = self._spill(found, claims, max(total, len(tokens)), device_limit)
                loaded, outcome = self._bring_in(found, claims, spill, deadline)
            except BaseException:
                claims.release()
                raise
            if loaded is not None:
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
        """Take finished arrivals off the books; drop pages whose copy failed."""
        core = self._core
        with core.lock:
            for arrival in arrivals:
                failed = arrival.failed()
                for row in arrival.rows:
                    if self._arriving.get(row) is arrival:
                        del self._arriving[row]
                        if failed:
                            core.planner.evict(Tier.DEVICE, [row])
        for arrival in arrivals:
            arrival.sources.release()

    def check(self) -> None:
        """Raise AssertionError when a page on its way is not resident or not pinned."""
        core = self._core
        with core.lock:
            for row in self._arriving:
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

    def _bring_in(
        self, found: Match, claims: Claims, spill: list[int], deadline: float
    ) -> tuple[Loaded | None, FetchOutcome]:
        """Load matched pages; None when one of them turned out not to be there."""
        core = self._core
        partial = [int(g.rows[-1]) for g in found.groups if g.partial]
        tables = [GroupTable(g) for g in core.spec.groups]
        low: list[int] = []
        for table, group, count in zip(tables, found.groups, spill, strict=True):
            table.spilled = min(count, len(group.rows) - group.partial)
            low += group.rows[: table.spilled].tolist()
        outcome = self._keep_low(low, claims, deadline)
        if outcome is not FetchOutcome.READY:
            return None, outcome
        elsewhere = {*low, *partial}
        absent = [
            row
            for row, tier in claims.tiers().items()
            if tier is not Tier.DEVICE and row not in elsewhere
        ]
        wanted = absent + partial
        slots = self._transfers.obtain(Tier.DEVICE, len(wanted), deadline=deadline)
        if slots is None:
            return None, FetchOutcome.NO_ROOM
        spare = dict(zip(wanted, slots, strict=True))
        private: dict[int, int] = {}
        loaded = Loaded(found.tokens, tables, spill=spill)
        try:
            outcome = self._copy_in(loaded, wanted, spare, private, claims, set(partial), deadline)
        except BaseException:
            self._undo(loaded, spare, private)
            raise
        if outcome is not FetchOutcome.READY:
            self._undo(loaded, spare, private)
            return None, outcome
        with core.lock:  # pages that somebody else brought in meanwhile needed no slot
            core.planner.give_back(Tier.DEVICE, spare.values())
        self._fill_tables(loaded, found, private)
        return loaded, outcome

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
            on_device = [row for row in rows if claims.tier(row) is Tier.DEVICE]
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

    def _copy_in(
        self,
        loaded: Loaded,
        wanted: list[int],
        spare: dict[int, int],
        private: dict[int, int],
        claims: Claims,
        partial: set[int],
        deadline: float,
    ) -> FetchOutcome:
        """Fetch and copy ``wanted`` batch by batch; slots used move out of ``spare``."""
        step = max(1, self._core.planner.capacity(Tier.HOST) // 2)
        for start in range(0, len(wanted), step):
            if loaded.arrivals:  # the host pages of the batch before must come free
                self._await(loaded.arrivals[-1], deadline)
            batch = wanted[start : start + step]
            outcome = self._fetcher.fetch(batch, claims, deadline)
            if outcome is not FetchOutcome.READY:
                return outcome
            loaded.arrivals.append(self._start(batch, spare, private, claims, partial))
        return FetchOutcome.READY

    def _start(
        self,
        batch: list[int],
        spare: dict[int, int],
        private: dict[int, int],
        claims: Claims,
        partial: set[int],
    ) -> Arrival:
        """Enqueue the copies of pages in memory, one event a layer."""
        core, sources = self._core, Claims(self._core)
        with core.lock:
            # A page that somebody else has brought in meanwhile needs no copy.
            there = core.index.residency(batch) >> Tier.DEVICE & 1
            resumed = [row for row in batch if row in partial]
            rows = [
                row
                for row, on_device in zip(batch, there.tolist(), strict=True)
                if not on_device and row not in partial
            ]
            copied = [*rows, *resumed]
            targets = [spare.pop(row) for row in copied]
            fenced = [*targets, *self._on_device(claims, copied)]
            core.fences.order(self._stream, fenced, core.timeout_s)
            moves = _Moves.of(core, copied, [claims.tier(row) for row in copied], targets)
            sources.add({row: claims.tier(row) for row in copied})
            claims.end(resumed)
            private.update(zip(resumed, targets[len(rows) :], strict=True))
            core.planner.install(Tier.DEVICE, rows, targets[: len(rows)])
            claims.move([row for row in batch if row not in partial], Tier.DEVICE)
            core.counters.promoted_pages += len(rows)
            from_host = [row for row in copied if sources.tier(row) is Tier.HOST]
            core.count_bytes(from_host, Tier.HOST, Tier.DEVICE)
            # Enqueued under the lock: whoever sees a page resident also sees it arriving.
            arrival = Arrival(rows, sources, self._copy_layers(moves))
            self._arriving.update(dict.fromkeys(rows, arrival))
        return arrival

    def _on_device(self, claims: Claims, rows: list[int]) -> list[int]:
        """Return the device slots that pages are copied from."""
        above = [row for row in rows if claims.tier(row) is Tier.DEVICE]
        slots: list[int] = self._core.index.slot(above, Tier.DEVICE).tolist()
        return slots

    def _copy_layers(self, moves: list[_Moves]) -> dict[int, Event]:
        """Enqueue the copies layer by layer, one event a layer."""
        core = self._core
        events: dict[int, Event] = {}
        for layer in sorted(core.spec.layer_to_group):
            group, offset, size = core.layer_place(layer)
            ops = [
                CopyOp(
                    core.pool.memory[m.target : m.target + m.pages, offset : offset + size],
                    core.memory(m.tier)[m.source : m.source + m.pages, offset : offset + size],
                )
                for m in moves
                if m.group == group
            ]
            if ops:
                self._stream.copy(ops)
                events[layer] = self._stream.record()
        return events

    def _await(self, arrival: Arrival, deadline: float) -> None:
        """Wait for an arrival; whether it failed is ``settle``'s business."""
        for event in arrival.events.values():
            with suppress(DeviceError):
                event.wait(max(0.0, deadline - self._core.clock()))
        if arrival.done():
            arrival.sources.release()

    def _fill_tables(self, loaded: Loaded, found: Match, private: dict[int, int]) -> None:
        core = self._core
        with core.lock:
            for table, group in zip(loaded.tables, found.groups, strict=True):
                for page, row in enumerate(group.rows.tolist(), start=group.first_page):
                    if row in private:
                        table.set(page, private[row], PRIVATE)
                        if core.index.flags([row])[0] & PAGE_TAIL:
                            loaded.resumed = int(core.index.end_token([row])[0])
                    else:
                        tier = table.tier(page)
                        table.set(page, core.slot(row, tier), row)
                        if tier is Tier.DEVICE:
                            self._join(loaded, row)

    def _join(self, loaded: Loaded, row: int) -> None:
        """Wait, behind the gate, for pages that another sequence is bringing in."""
        arrival = self._arriving.get(row)
        if arrival is not None and arrival not in loaded.arrivals:
            loaded.arrivals.append(Arrival([], Claims(self._core), arrival.events))
            self._core.counters.delay_hits += 1

    def _undo(self, loaded: Loaded, spare: dict[int, int], private: dict[int, int]) -> None:
        """Let what was copied before a failure stay resident; give the other slots back."""
        for arrival in loaded.arrivals:
            self._await(arrival, self._core.deadline())
        self.settle(loaded.arrivals)
        with self._core.lock:
            self._core.planner.give_back(Tier.DEVICE, [*spare.values(), *private.values()])

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
