"""Begins saves: which pages must be copied, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.attached.copies import Run, runs
from tierkv.attached.keys import EnginePage, check_pages
from tierkv.attached.saves import SaveTicket
from tierkv.data_plane.claims import Claims
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.pool import AttachedPool
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.devices.base import Stream

_HELD = 1 << Tier.HOST | 1 << Tier.DISK


class Saver:
    """Begins the saves of one attached pool.  Thread-safe; call without the lock."""

    def __init__(self, core: Core, transfers: Transfers, pool: AttachedPool) -> None:
        self._core = core
        self._transfers = transfers
        self._pool = pool
        self._stream: Stream = core.device.stream("engine-save")

    def begin(
        self, pages: Sequence[EnginePage], blocks: Sequence[Sequence[int]], wait_s: float
    ) -> SaveTicket:
        """Return a save with host slots for the pages that must be copied.

        Raises:
            InvalidInputError: pages or block ids that cannot be saved.
            StoreClosedError: the pool is closed.
        """
        core, pool = self._core, self._pool
        check_pages(pages, core.spec)
        groups = [page.group for page in pages]
        ids = pool.blocks.whole(groups, blocks)
        pool.blocks.named("save", list(zip(groups, ids, strict=True)))
        with core.lock:
            pool.must_be_open()
            wanted = self._not_held(pages)
            named = pool.blocks.named("save", [(groups[at], ids[at]) for at in wanted])
            claims = Claims(core)
            ticket = SaveTicket(core, pool, self._stream, pages, wanted, claims, named)
            pool.flights.begin(ticket)
            self._hold_ancestors(pages, claims)
        try:
            self._place(ticket, wanted, ids, wait_s)
        except BaseException:
            ticket.abort()
            raise
        return ticket

    def _not_held(self, pages: Sequence[EnginePage]) -> list[int]:
        """Return the positions of pages that must be copied; the others count as used."""
        core = self._core
        rows = core.index.find(key_array(page.key for page in pages), within=_HELD)
        core.index.touch(rows[rows >= 0], now=int(core.wall_clock()))
        saving = self._pool.flights.saving()
        return [
            at
            for at, (page, row) in enumerate(zip(pages, rows.tolist(), strict=True))
            if row < 0 and page.key not in saving
        ]

    def _hold_ancestors(self, pages: Sequence[EnginePage], claims: Claims) -> None:
        """Pin what these pages continue, so that it is not dropped to make room for them.

        With a disk below nothing is dropped: what leaves is written down first, and a prefix
        longer than host memory can be saved piece by piece.
        """
        if self._core.disk is not None:
            return
        named = dict.fromkeys([p.key for p in pages] + [p.parent for p in pages])
        rows = self._core.index.find(key_array(named), within=1 << Tier.HOST)
        claims.add(dict.fromkeys(rows[rows >= 0].tolist(), Tier.HOST))

    def _place(
        self,
        ticket: SaveTicket,
        wanted: Sequence[int],
        ids: Sequence[Sequence[int]],
        wait_s: float,
    ) -> None:
        """Obtain host slots, for the beginning of the prefixes first, and plan the copies."""
        core, pages = self._core, ticket.pages
        order = sorted(wanted, key=lambda at: pages[at].end_token)
        slots = self._obtain(len(order), wait_s)
        with core.lock:
            ticket.place(order[: len(slots)], slots)
        moves: list[list[Run]] = []
        for group in range(len(core.spec.groups)):
            mine = [
                (slot, ids[at])
                for at, slot in zip(order, slots, strict=False)
                if pages[at].group == group
            ]
            moves.append(runs([slot for slot, _ in mine], [page_ids for _, page_ids in mine]))
        ticket.plan(moves)

    def _obtain(self, count: int, wait_s: float) -> list[int]:
        """Return held host slots, up to ``count``, evicting what nobody uses."""
        core, planner = self._core, self._core.planner
        with core.lock:
            count = max(0, min(count, self._transfers.obtainable(Tier.HOST)))
        slots = self._transfers.obtain(Tier.HOST, count, deadline=core.clock() + wait_s)
        if slots is None:
            with core.lock:
                slots = planner.take(Tier.HOST, min(planner.free(Tier.HOST), count))
        return slots or []
