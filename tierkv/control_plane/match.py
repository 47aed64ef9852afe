"""The longest prefix of a sequence that every layer group can resume.

Each group says which lengths it accepts, given the pages that are there (``_accept``).
The answer is the largest length that all accept: starting from the limit, each group in
turn lowers it to the largest length it accepts, until none does.  A page that reaches
beyond the answer is used in part.

Tails are looked for below the pages of the groups that have trees of their own (the
anchor, and all that need every page): the lengths of the tails there say where turns have
ended, and for these ends every group's tail key is computed and looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.control_plane._accept import Acceptor, make_acceptor
from tierkv.control_plane.index import ANYWHERE, PrefixIndex
from tierkv.identity.keys import KeyArray, KeyChain, TokenArray, key_array
from tierkv.identity.spec import CacheSpec

# Turn ends tried, the farthest first; each costs one hash a group.
MAX_ENDS = 256
_ELSEWHERE = 0  # stands in the row of a page that the caller holds; any row that is not -1


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """The pages of one layer group that resume a prefix.

    Attributes:
        rows: index rows of the group's needed pages, in order.
        first_page: page number of the first of them.
        partial: the last one is a tail page or only used in part, so it must be copied
            before anything is appended to it.
    """

    rows: NDArray[np.int32]
    first_page: int
    partial: bool


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix that can be resumed: its length in tokens, and its pages by group."""

    tokens: int
    groups: tuple[GroupMatch, ...]


def match(
    index: PrefixIndex,
    spec: CacheSpec,
    chains: Sequence[KeyChain],
    tokens: TokenArray,
    *,
    limit: int,
    within: int = ANYWHERE,
) -> Match:
    """Return the longest prefix that all layer groups can resume.

    Reads the index only: touching and pinning the rows is the caller's decision.

    Args:
        index: the prefix index.
        spec: the layer groups.
        chains: key chain of each group, extended over all ``tokens``.
        tokens: the whole sequence.
        limit: longest prefix wanted; at most the length of ``tokens``.
        within: the tiers whose pages count, as bits ``1 << tier``.
    """
    limit = min(limit, len(tokens))
    groups = [
        make_acceptor(
            group, index.find(chain.array(0, group.pages_for(limit)), within=within), limit
        )
        for group, chain in zip(spec.groups, chains, strict=True)
    ]
    length = _longest(groups, limit)
    if length < limit:
        ends = _turn_ends(index, spec, chains, groups, (length, len(tokens)))
        if _add_tails(index, chains, groups, tokens, ends, within):
            length = _longest(groups, limit)
    return Match(length, tuple(_select(group, length) for group in groups))


def match_pages(
    index: PrefixIndex,
    spec: CacheSpec,
    keys: Sequence[KeyArray],
    *,
    limit: int,
    computed: int = 0,
    within: int = ANYWHERE,
) -> Match:
    """Return the longest prefix of whole pages that all layer groups can resume.

    For callers with keys of their own and pages to copy whole; tails are not looked for.

    Args:
        index: the prefix index.
        spec: the layer groups.
        keys: keys of each group's pages, from the first on.
        limit: longest prefix wanted.
        computed: tokens that the caller holds already; pages before them are not looked for
            and not part of the answer, which is shorter than this only when it is empty.
        within: the tiers whose pages count, as bits ``1 << tier``.
    """
    groups = []
    for group, array in zip(spec.groups, keys, strict=True):
        rows = index.find(array[: group.pages_for(limit)], within=within)
        rows[: computed // group.page_tokens] = _ELSEWHERE
        groups.append(make_acceptor(group, rows, limit))
    unit = int(np.lcm.reduce([group.page_tokens for group in spec.groups]))
    length = _longest(groups, limit, unit)
    if length <= computed:
        return Match(0, tuple(GroupMatch(_no_rows(), 0, False) for _ in groups))
    return Match(
        length, tuple(_beyond(_select(group, length), group, computed) for group in groups)
    )


def _beyond(found: GroupMatch, group: Acceptor, computed: int) -> GroupMatch:
    """Leave the pages out that end within the first ``computed`` tokens."""
    skipped = max(0, computed // group.size - found.first_page)
    return GroupMatch(found.rows[skipped:], found.first_page + skipped, False)


def _no_rows() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _longest(groups: Sequence[Acceptor], limit: int, unit: int = 1) -> int:
    """Return the largest multiple of ``unit`` up to ``limit`` that all groups accept."""
    length, before = limit, -1
    while length != before:
        before = length
        for group in groups:
            length = group.floor(length)
        length -= length % unit
    return length


def _select(group: Acceptor, length: int) -> GroupMatch:
    pages = group.group.needed_pages(length)
    rows = group.rows[pages.start : pages.stop].copy()
    partial = length % group.size != 0
    if partial:
        rows[-1] = group.last_row(length)
    return GroupMatch(rows, pages.start, partial)


def _turn_ends(
    index: PrefixIndex,
    spec: CacheSpec,
    chains: Sequence[KeyChain],
    groups: Sequence[Acceptor],
    between: tuple[int, int],
) -> list[int]:
    """Return the lengths in (first, last] at which turns may have ended, farthest first."""
    first, last = between
    farthest = max(group.reach for group in groups)
    if len(groups) > 1:  # a tail of one group may reach beyond what another needs
        farthest = max(len(group.rows) * group.size for group in groups)
    ends: set[int] = set()
    for g, group in enumerate(groups):
        if g != spec.anchor and not group.group.kind.needs_every_page:
            continue  # its tails hang below the anchor's
        pages = range(first // group.size, min(farthest, last) // group.size + 1)
        for at, kind, tokens in index.tail_ends(_parents(index, chains[g], group.rows, pages)):
            # Another group's tail hangs below the page with which its turn ended.
            ends.add(pages[at] * group.size + (tokens if kind == g else 0))
    return sorted((end for end in ends if first < end <= last), reverse=True)[:MAX_ENDS]


def _parents(
    index: PrefixIndex, chain: KeyChain, found: NDArray[np.int32], pages: range
) -> list[int]:
    """Return the rows before pages: those found, and others (ghosts too) by their keys."""
    rows = [-1] if pages.start == 0 else []
    rows += found[max(pages.start - 1, 0) : pages.stop - 1].tolist()
    rows += [-1] * (len(pages) - len(rows))
    unknown = [i for i, row in enumerate(rows) if row < 0]
    if unknown:
        ghosts = index.lookup(key_array(chain.parent(pages[i]) for i in unknown)).tolist()
        for i, row in zip(unknown, ghosts, strict=True):
            rows[i] = row
    return rows


def _add_tails(
    index: PrefixIndex,
    chains: Sequence[KeyChain],
    groups: Sequence[Acceptor],
    tokens: TokenArray,
    ends: Sequence[int],
    within: int,
) -> bool:
    """Look up every group's tails at these ends; return whether any is there."""
    wanted = [(g, end) for end in ends for g, group in enumerate(groups) if group.wants_tail(end)]
    if not wanted:
        return False
    keys = key_array(chains[g].tail(tokens[:end]) for g, end in wanted)
    rows = index.find(keys, within=within).tolist()
    there = [(g, end, row) for (g, end), row in zip(wanted, rows, strict=True) if row >= 0]
    for g, end, row in there:
        groups[g].add_tail(end, row)
    return bool(there)
