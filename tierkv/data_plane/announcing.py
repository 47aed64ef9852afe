"""Announcements: disk pages of a prompt read into host memory before the prompt is begun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from tierkv.control_plane.match import match
from tierkv.data_plane.claims import Claims
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.reads import Read, Reads
    from tierkv.data_plane.transfer import Transfers
    from tierkv.identity.keys import KeyChain, TokenArray

# Of the host tier, what announced reads may take together while they are under way.
SHARE = 0.5
_PAGES_A_READ = 16  # whoever needs the first pages need not wait for the last


class Announcement:
    """Pages on their way from disk into host memory for a prompt that will come.

    Made by :meth:`tierkv.Store.announce`.  It need not be collected: a later ``begin`` joins
    the reads, and what nobody wants stays in host memory as any other page, until it must
    make room.  Thread-safe.  As a context manager it is cancelled on leaving.

    Attributes:
        tokens: length of the prefix that was found, wherever its pages were.
        pages: pages of it that are being read, for this announcement or others.
    """

    def __init__(self, core: Core, reads: Reads, tokens: int = 0, pages: int = 0) -> None:
        self.tokens = tokens
        self.pages = pages
        self._core = core
        self._reads = reads
        self._using: list[Read] = []

    @classmethod
    def all_of(cls, announcements: Sequence[Announcement]) -> Announcement:
        """Return one announcement in place of several of one store, at least one."""
        first = announcements[0]
        made = cls(first._core, first._reads)
        with made._core.lock:
            for one in announcements:
                made.tokens += one.tokens
                made.pages += one.pages
                made._using += one._using
                one._using = []
        return made

    def done(self) -> bool:
        """Return whether nothing of it is on its way any more; never blocks."""
        with self._core.lock:
            for read in self._using:
                self._reads.take_in(read)
            return all(read.over for read in self._using)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done; False when the time is up, which changes nothing.

        Args:
            timeout_s: how long; the store's ``io_timeout_s`` when None.
        """
        core = self._core
        deadline = core.clock() + (core.timeout_s if timeout_s is None else timeout_s)
        return all(self._reads.wait(read, deadline) for read in list(self._using))

    def cancel(self) -> None:
        """Give up what has not arrived and nobody else waits for; idempotent.

        What has arrived stays in host memory, and what the disk is busy with at this moment
        keeps its place there until the disk lets go of it.
        """
        with self._core.lock:
            using, self._using = self._using, []
            self._reads.leave(using)

    def use(self, reads: Iterable[Read]) -> None:
        """Take over uses of reads.  Call with the lock held."""
        self._using += reads

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel."""
        self.cancel()


def announce(
    core: Core, transfers: Transfers, chains: Sequence[KeyChain], tokens: TokenArray
) -> Announcement:
    """Start reading the disk pages of the longest prefix that ``begin`` would find.

    Returns at once: it takes host slots that are free, or whose pages lie on disk as well,
    at most ``SHARE`` of the tier for all announcements together, and reads the beginning of
    the prefix where that is not enough.  Thread-safe; call without the lock.
    """
    reads, most = transfers.reads, max(0, len(tokens) - 1)
    deadline = core.deadline()
    with core.lock:
        found = match(core.index, core.spec, chains, tokens, limit=most)
        anchor = core.spec.anchor
        others = [group.rows for g, group in enumerate(found.groups) if g != anchor]
        rows = np.concatenate([found.groups[anchor].rows, *others])
        core.index.touch(rows, now=int(core.wall_clock()))
        residency = core.index.residency(rows).tolist()
        nearest = [next(tier for tier in Tier if held >> tier & 1) for held in residency]
        claims = Claims(core)  # room is not to be made by what is announced
        claims.add(dict(zip(rows.tolist(), nearest, strict=True)))
        away = [r for r, tier in zip(rows.tolist(), nearest, strict=True) if tier > Tier.HOST]
        joined = reads.join(away)
        known = {row for mine in joined.values() for row in mine}
        wanted = _in_order(core, [row for row in away if row not in known])
        room = int(core.planner.capacity(Tier.HOST) * SHARE) - reads.slots_ahead()
        count = max(0, min(len(wanted), room)) if core.disk is not None else 0
        slots = transfers.obtain_now(Tier.HOST, count)
        batches = [
            (reads.open(wanted[at:stop], deadline, ahead=True), slots[at:stop])
            for at in range(0, len(slots), _PAGES_A_READ)
            for stop in (min(at + _PAGES_A_READ, len(slots)),)
        ]
        core.counters.announced_pages += len(slots)
        claims.release()
        made = Announcement(core, reads, found.tokens, len(slots) + len(known))
        made.use([*joined, *(read for read, _ in batches)])
    started = 0
    try:
        for read, taken in batches:
            started += 1
            reads.start(read, taken)
    except BaseException:
        with core.lock:
            for _, taken in batches[started:]:
                core.planner.give_back(Tier.HOST, taken)
        made.cancel()
        raise
    return made


def _in_order(core: Core, rows: list[int]) -> list[int]:
    """Return pages in the order of the prefix."""
    ends = core.index.end_token(rows)
    return [rows[at] for at in np.argsort(ends, kind="stable").tolist()]
