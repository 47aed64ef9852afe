"""Makes a sequence's pages visible: full pages, the windows of boundaries, tail pages.

Pages of the anchor group form the prefix tree.  Window pages of other groups hang below
the anchor page of the boundary they serve, so that they live and die with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.errors import InvalidInputError
from tierkv.identity.keys import key_array
from tierkv.stats import CommitReport
from tierkv.storage.format import PAGE_TAIL
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.table import GroupTable
    from tierkv.data_plane.core import Core
    from tierkv.identity.keys import KeyChain, TokenArray


@dataclass(slots=True)
class _Tally:
    pages: int = 0
    tail_pages: int = 0
    shared: int = 0
    skipped: int = 0
    bytes: int = 0

    def report(self) -> CommitReport:
        return CommitReport(
            pages=self.pages,
            tail_pages=self.tail_pages,
            shared=self.shared,
            skipped=self.skipped,
            bytes=self.bytes,
        )


@dataclass(frozen=True, slots=True)
class _Page:
    """A page to publish: its place in the table and what the index must know of it."""

    page: int
    key: bytes
    parent: bytes
    end_token: int
    num_tokens: int
    flags: int = 0


class Committer:
    """Publishes the private pages of one sequence.  Call with the store's lock held.

    Published pages stay pinned for the sequence on the device, as its shared pages are.

    Attributes:
        committed: tokens whose pages have been published.
        fresh: keys of the pages that became resident.
    """

    def __init__(
        self,
        core: Core,
        chains: Sequence[KeyChain],
        tables: Sequence[GroupTable],
        *,
        committed: int,
        turn_end: int,
    ) -> None:
        self._core = core
        self._chains = chains
        self._tables = tables
        self.committed = committed
        self._turn_end = turn_end
        self._tokens: TokenArray = np.empty(0, np.uint32)
        self.fresh: list[bytes] = []

    def fork(self, tables: Sequence[GroupTable], length: int) -> Committer:
        """Return a committer for a fork of ``length`` tokens, with page tables of its own."""
        chains = [chain.fork() for chain in self._chains]
        for chain in chains:
            chain.crop(length)  # what follows in the prompt need not follow in the fork
        return Committer(
            self._core, chains, tables, committed=self.committed, turn_end=self._turn_end
        )

    def crop(self, length: int) -> None:
        """Forget tokens from ``length`` on; pages that were published stay published."""
        self.committed = min(self.committed, length)
        if self._turn_end > length:
            self._turn_end = 0  # the turn that ended there is no part of this sequence any more
        for chain in self._chains:
            chain.crop(length)

    def resume(self, length: int, turn_end: int) -> None:
        """Go on behind ``length`` tokens that are published, resumed where a turn ended or not."""
        self.committed, self._turn_end = length, turn_end

    def commit(self, tokens: TokenArray, tails: dict[int, int | None] | None) -> CommitReport:
        """Publish the full pages of ``tokens``, and tail pages if given.

        Args:
            tokens: every token whose state the pages hold.
            tails: at the end of a turn, by group, the device slot that takes the copy of a
                partial page (None hands the sequence's own page over).
        """
        spec, tally = self._core.spec, _Tally()
        self._tokens = tokens
        for chain in self._chains:
            chain.extend(tokens)
        anchor = spec.anchor
        end = len(tokens)
        self._publish(anchor, self._full_pages(anchor, end), tally)
        for number, group in enumerate(spec.groups):
            if number != anchor and group.kind.needs_every_page:
                self._publish(number, self._full_pages(number, end), tally)
        first = self.committed // self._core.boundary_tokens + 1
        for count in range(first, end // self._core.boundary_tokens + 1):
            self._publish_windows(count * self._core.boundary_tokens, tokens, tally)
        if tails is not None:
            self._end_turn(tokens, tails, tally)
        self.committed = end
        self._count(tally)
        return tally.report()

    def _full_pages(self, number: int, end: int) -> list[_Page]:
        """Return the private full pages of a group that needs every page."""
        group, chain, table = (
            self._core.spec.groups[number],
            self._chains[number],
            self._tables[number],
        )
        size = group.page_tokens
        return [
            _Page(page, chain.key(page), chain.parent(page), (page + 1) * size, size)
            for page in range(self.committed // size, end // size)
            if table.is_private(page)
        ]

    def _publish_windows(self, boundary: int, tokens: TokenArray, tally: _Tally) -> None:
        """Publish the full window pages that resuming at ``boundary`` needs."""
        spec = self._core.spec
        parent = self._boundary_key(boundary, tokens)
        for number, group in enumerate(spec.groups):
            if group.kind.needs_every_page:
                continue
            chain, table, size = self._chains[number], self._tables[number], group.page_tokens
            pages = [
                _Page(
                    page,
                    chain.key(page),
                    chain.parent(page) if number == spec.anchor else parent,
                    (page + 1) * size,
                    size,
                )
                for page in group.needed_pages(boundary)
                if (page + 1) * size <= boundary and table.is_private(page)
            ]
            self._publish(number, pages, tally)

    def _boundary_key(self, boundary: int, tokens: TokenArray) -> bytes:
        """Return the key of the anchor page or tail that ends at ``boundary``."""
        chain = self._chains[self._core.spec.anchor]
        if boundary % chain.page_tokens:
            return chain.tail(tokens[:boundary])
        return chain.key(boundary // chain.page_tokens - 1)

    def _end_turn(
        self,
        tokens: TokenArray,
        tails: dict[int, int | None],
        tally: _Tally,
    ) -> None:
        """Save tail pages and the window of the turn's end; drop the tails before them."""
        spec, end = self._core.spec, len(tokens)
        if not end:
            return
        boundary = self._boundary_key(end, tokens)
        order = [spec.anchor, *(i for i in range(len(spec.groups)) if i != spec.anchor)]
        for number in order:
            group, chain = spec.groups[number], self._chains[number]
            if number not in tails:
                continue
            own_tree = number == spec.anchor or group.kind.needs_every_page
            page = _Page(
                end // group.page_tokens,
                chain.tail(tokens),
                chain.parent(end // group.page_tokens) if own_tree else boundary,
                end,
                end % group.page_tokens,
                PAGE_TAIL,
            )
            self._publish_tail(number, page, tails[number], tally)
        self._publish_windows(end, tokens, tally)
        if 0 < self._turn_end < end:
            self._supersede(tokens, self._turn_end)
        self._turn_end = end

    def _publish(self, number: int, pages: list[_Page], tally: _Tally) -> None:
        """Insert private pages; those somebody else has published stay private to us."""
        if not pages:
            return
        core, table = self._core, self._tables[number]
        rows = self._insert(number, pages)
        fresh: list[tuple[int, int]] = []
        for page, row in zip(pages, rows, strict=True):
            if row < 0:
                tally.skipped += 1
            elif core.index.residency([row])[0]:
                tally.shared += 1
            else:
                fresh.append((page.page, row))
        for tier in (Tier.DEVICE, Tier.HOST):
            here = [(page, row) for page, row in fresh if table.tier(page) is tier]
            rows_here = [row for _, row in here]
            slots = [table.slots[page] for page, _ in here]
            if tier is Tier.DEVICE:
                core.fences.put(slots)
            core.planner.install(tier, rows_here, slots)
            for (at, row), slot in zip(here, slots, strict=True):
                table.set(at, slot, row)
            core.index.pin(np.asarray(rows_here, np.int32), tier)
        self.fresh += [core.index.key(row) for _, row in fresh]
        tally.pages += len(fresh)
        tally.bytes += len(fresh) * core.spec.groups[number].page_bytes

    def _publish_tail(self, number: int, page: _Page, slot: int | None, tally: _Tally) -> None:
        """Publish a tail page in ``slot``, or hand the sequence's own page over."""
        core, table = self._core, self._tables[number]
        tier, row = table.tier(page.page), self._insert(number, [page])[0]
        if row < 0 or core.index.residency([row])[0]:
            tally.skipped += row < 0
            tally.shared += row >= 0
            if slot is not None:
                if tier is Tier.DEVICE:
                    core.fences.put([slot])
                core.planner.give_back(tier, [slot])
            return
        if slot is None:
            slot = table.drop(page.page)
        if tier is Tier.DEVICE:
            core.fences.put([slot])
        core.planner.install(tier, [row], [slot])
        self.fresh.append(page.key)
        tally.tail_pages += 1
        tally.bytes += core.spec.groups[number].page_bytes

    def _insert(self, number: int, pages: list[_Page]) -> list[int]:
        rows: list[int] = self._core.index.insert(
            key_array(page.key for page in pages),
            key_array(page.parent for page in pages),
            group=number,
            end_tokens=np.asarray([page.end_token for page in pages], np.int64),
            num_tokens=np.asarray([page.num_tokens for page in pages], np.int64),
            flags=np.asarray([page.flags for page in pages], np.uint8),
            now=int(self._core.wall_clock()),
        ).tolist()
        self._core.planner.note_tokens(rows, self._tokens)
        return rows

    def _supersede(self, tokens: TokenArray, before: int) -> None:
        """Drop the tail pages of the turn that ended at ``before``, and windows only it needed.

        A turn that ended on a page border has no tail; it stays a place to resume at.
        """
        core, spec = self._core, self._core.spec
        if not before % spec.groups[spec.anchor].page_tokens:
            return
        tails = [
            chain.tail(tokens[:before]) for chain in self._chains if before % chain.page_tokens
        ]
        boundary = core.index.lookup(key_array([self._boundary_key(before, tokens)])).tolist()[0]
        needed = {
            row
            for table in self._tables
            for tier in (Tier.DEVICE, Tier.HOST)
            for row in table.shared_rows(tier)
        }
        windows = [
            row
            for number, group in enumerate(spec.groups)
            if number != spec.anchor and not group.kind.needs_every_page
            for row in core.find_rows(
                [
                    self._chains[number].key(page)
                    for page in group.needed_pages(before)
                    if (page + 1) * group.page_tokens <= before
                ]
            )
            if core.index.parent(row) == boundary and row not in needed
        ]
        rows = [*windows, *core.find_rows(tails)]
        core.delete_from_disk(core.planner.drop(rows))
        core.counters.superseded_pages += len(rows)

    def _count(self, tally: _Tally) -> None:
        counters = self._core.counters
        counters.committed_pages += tally.pages
        counters.tail_pages += tally.tail_pages
        counters.shared_pages += tally.shared
        counters.skipped_pages += tally.skipped


def check_fed(tokens: TokenArray, prompt: TokenArray, length: int) -> TokenArray:
    """Return the ids of the ``length`` tokens written so far, checked against the prompt.

    Raises:
        InvalidInputError: too few ids, or others than the sequence was begun with.
    """
    if len(tokens) < length:
        raise InvalidInputError(
            f"commit: {len(tokens)} token ids given, but {length} tokens were written; "
            "pass every id fed so far, the prompt included"
        )
    known = min(length, len(prompt))
    differing = np.flatnonzero(tokens[:known] != prompt[:known])
    if differing.size:
        at = int(differing[0])
        raise InvalidInputError(
            f"commit: token {at} is {tokens[at]}, but the sequence was begun with "
            f"{prompt[at]}; pages are keyed by the ids that were fed"
        )
    return tokens[:length]
