"""Finds the longest prefix and brings it into host memory: verified first, then promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.match import Match, match_pages
from tierkv.data_plane.claims import Claims
from tierkv.data_plane.fetching import Fetcher, FetchOutcome
from tierkv.stats import Found
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.keys import PageKeys
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers

_IN_MEMORY = 1 << Tier.HOST
_ANYWHERE = _IN_MEMORY | 1 << Tier.DISK
_MAX_ATTEMPTS = 8
_BATCH_PAGES = 32  # read at once; what a deadline cuts off is at most the last batches


@dataclass(frozen=True, slots=True)
class Staged:
    """A prefix in host memory, pinned there.

    Attributes:
        match: its length and pages.
        claims: the pins.
        found: tokens by the tier that held them before.
    """

    match: Match
    claims: Claims
    found: Found


class Stager:
    """Matches prefixes and stages their pages.  Thread-safe; call without the lock."""

    def __init__(self, core: Core, transfers: Transfers) -> None:
        self._core = core
        self._transfers = transfers
        self._fetcher = Fetcher(core, transfers, memory=(Tier.HOST,))

    def stage(self, keys: PageKeys, *, limit: int, computed: int, wait_s: float) -> Staged:
        """Return the longest prefix that is in host memory within ``wait_s`` seconds.

        Pages on disk are read in prefix order; what does not arrive in time, does not check
        out or finds no room makes the prefix shorter.
        """
        core = self._core
        deadline = core.clock() + wait_s
        within = _ANYWHERE if wait_s > 0 and core.disk is not None else _IN_MEMORY
        origin: dict[int, Tier] = {}
        claims: Claims | None = None
        for attempt in range(_MAX_ATTEMPTS):
            if attempt == _MAX_ATTEMPTS - 1 or core.clock() >= deadline:
                within = _IN_MEMORY
            found, claims = self._claim(keys, limit, computed, within, instead_of=claims)
            for row, tier in claims.tiers().items():
                origin.setdefault(row, tier)
            try:
                outcome = self._fetch(found, claims, deadline)
            except BaseException:
                claims.release()
                raise
            if outcome is FetchOutcome.READY:
                self._touch(found)
                return Staged(found, claims, self._count(found, computed, origin))
            if outcome is not FetchOutcome.GONE:
                within = _IN_MEMORY
        raise AssertionError("a prefix that is in memory needs no reading")

    def _claim(
        self, keys: PageKeys, limit: int, computed: int, within: int, instead_of: Claims | None
    ) -> tuple[Match, Claims]:
        """Match, and pin the copies in host memory, or on disk where there is none."""
        core, claims = self._core, Claims(self._core)
        with core.lock:
            found = self._match(keys, limit, computed, within)
            rows = _rows(found)
            in_host = (core.index.residency(rows) & _IN_MEMORY) != 0
            tiers = (Tier.HOST if there else Tier.DISK for there in in_host.tolist())
            claims.add(dict(zip(rows.tolist(), tiers, strict=True)))
            if instead_of is not None:
                instead_of.release()
        return found, claims

    def _match(self, keys: PageKeys, limit: int, computed: int, within: int) -> Match:
        """Return the longest prefix whose pages host memory can hold.  With the lock held."""
        core, spec = self._core, self._core.spec
        arrays = [keys.array(g, group.pages_for(limit)) for g, group in enumerate(spec.groups)]
        unit = int(np.lcm.reduce([group.page_tokens for group in spec.groups]))
        while True:
            found = match_pages(
                core.index, spec, arrays, limit=limit, computed=computed, within=within
            )
            excess = self._excess(_rows(found))
            if excess <= 0:
                return found
            a_unit = sum(unit // group.page_tokens for group in spec.groups)  # pages, at most
            limit = max(0, found.tokens - unit * -(-excess // a_unit))

    def _excess(self, rows: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        """Return how many pages more than host memory can give these would pin there."""
        index = self._core.index
        pinned = (index.residency(rows) & _IN_MEMORY != 0) & (index.pins(rows, Tier.HOST) > 0)
        room = self._transfers.obtainable(Tier.HOST)
        return int(np.count_nonzero(~pinned)) - room

    def _fetch(self, found: Match, claims: Claims, deadline: float) -> FetchOutcome:
        """Read what is not in host memory, the beginning of the prefix first."""
        core = self._core
        absent = [row for row, tier in claims.tiers().items() if tier is not Tier.HOST]
        with core.lock:
            ends = core.index.end_token(absent)
        order = np.argsort(ends, kind="stable").tolist()
        step = max(1, min(_BATCH_PAGES, core.planner.capacity(Tier.HOST) // 4))
        for start in range(0, len(order), step):
            batch = [absent[at] for at in order[start : start + step]]
            outcome = self._fetcher.fetch(batch, claims, deadline)
            if outcome is not FetchOutcome.READY:
                return outcome
        return FetchOutcome.READY

    def _touch(self, found: Match) -> None:
        """Record the use: the anchor's path first, then the pages that hang below it."""
        core, anchor = self._core, self._core.spec.anchor
        others = [group.rows for g, group in enumerate(found.groups) if g != anchor]
        with core.lock:
            rows = np.concatenate([found.groups[anchor].rows, *others])
            core.index.touch(rows, now=int(core.wall_clock()))

    def _count(self, found: Match, computed: int, origin: Mapping[int, Tier]) -> Found:
        """Count the tokens found by the tier that held their anchor page."""
        spec = self._core.spec
        group, anchor = spec.groups[spec.anchor], found.groups[spec.anchor]
        tokens = dict.fromkeys(Tier, 0)
        at = computed
        for page, row in enumerate(anchor.rows.tolist(), start=anchor.first_page):
            # Tokens before a sliding anchor's window count with its first page.
            end = min(found.tokens, (page + 1) * group.page_tokens)
            tokens[origin[row]] += end - at
            at = end
        return Found(**{tier.label: count for tier, count in tokens.items()})


def _rows(found: Match) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([group.rows for group in found.groups])
