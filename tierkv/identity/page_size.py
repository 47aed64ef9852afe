"""How many tokens a page covers, chosen so that pages are neither small nor uneven.

A page should weigh 1 to 4 MiB (smaller transfers waste PCIe and NVMe, larger ones waste hit
rate), all groups' pages should have the same number of bytes (so that any slot serves any
group), and every layer range should be a multiple of 4 KiB (so that a layer can be read
alone with direct I/O).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierkv.errors import SpecError
from tierkv.identity.spec import ALIGNMENT

MIN_PAGE_BYTES = 1 << 20
MAX_PAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """What decides a layer group's page size.

    Attributes:
        name: the group's name.
        layers: number of layers.
        row_bytes: bytes of one layer's state for one token.
    """

    name: str
    layers: int
    row_bytes: int

    def __post_init__(self) -> None:
        if self.layers <= 0 or self.row_bytes <= 0:
            raise SpecError(
                f"layer group {self.name!r}: layers and row_bytes must be positive, "
                f"got layers={self.layers}, row_bytes={self.row_bytes}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes a token, all layers."""
        return self.layers * self.row_bytes

    def is_aligned(self, tokens: int) -> bool:
        """Whether a layer range of a page of ``tokens`` tokens is a multiple of 4 KiB."""
        return tokens * self.row_bytes % ALIGNMENT == 0

    def tokens_for(self, page_bytes: int) -> int | None:
        """Return the tokens that fill exactly ``page_bytes``, or None when none do."""
        tokens, rest = divmod(page_bytes, self.token_bytes)
        return tokens if tokens and not rest else None


def choose_page_tokens(groups: Sequence[GroupSize]) -> dict[str, int]:
    """Return tokens a page for each group, by name.

    The group with the most bytes a token gets the smallest power of two (else multiple of
    16, else any number) for which pages of all groups have equal bytes, 1 to 4 MiB, and
    aligned layer ranges.  Where no such number exists, each group is sized on its own.
    """
    heaviest = max(groups, key=lambda g: g.token_bytes)
    for tokens in _candidates(heaviest):
        page_bytes = tokens * heaviest.token_bytes
        if not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
            continue
        counts = {g.name: g.tokens_for(page_bytes) for g in groups}
        if all((n := counts[g.name]) is not None and g.is_aligned(n) for g in groups):
            return {name: n for name, n in counts.items() if n is not None}
    return {g.name: _alone(g) for g in groups}


def override_page_tokens(
    groups: Sequence[GroupSize], page_tokens: int | Mapping[str, int]
) -> dict[str, int]:
    """Return tokens a page for each group, as the user asked.

    Args:
        groups: all groups of the spec, in order.
        page_tokens: for the first group, or a map from group name.  Groups that it does not
            name get as many tokens as weigh the same (rounded down, at least one).

    Raises:
        SpecError: an unknown group name, an empty map, or not a positive whole number.
    """
    wanted = page_tokens if isinstance(page_tokens, Mapping) else {groups[0].name: page_tokens}
    names = [g.name for g in groups]
    unknown = sorted(set(wanted) - set(names))
    if unknown or not wanted:
        raise SpecError(
            f"page_tokens: no layer group is named {unknown or 'in an empty map'}; "
            f"this model's groups are {names}"
        )
    for name, tokens in wanted.items():
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens <= 0:
            raise SpecError(
                f"page_tokens: layer group {name!r} needs a whole number of tokens, "
                f"at least 1, got {tokens!r}"
            )
    first = next(g for g in groups if g.name in wanted)
    page_bytes = wanted[first.name] * first.token_bytes
    return {g.name: wanted.get(g.name) or max(1, page_bytes // g.token_bytes) for g in groups}


def _candidates(group: GroupSize) -> Iterable[int]:
    """Yield token counts up to 4 MiB: powers of two, then multiples of 16, then all others."""
    top = MAX_PAGE_BYTES // group.token_bytes
    yield from _powers(top)
    yield from range(16, top + 1, 16)
    yield from range(1, top + 1)


def _alone(group: GroupSize) -> int:
    """Return tokens a page for a group sized without regard to the others."""
    top = MAX_PAGE_BYTES // group.token_bytes

    def first(fits: Callable[[int], bool], counts: Iterable[int]) -> int | None:
        return next((n for n in counts if fits(n)), None)

    def large(tokens: int) -> bool:
        return tokens * group.token_bytes >= MIN_PAGE_BYTES

    def aligned(tokens: int) -> bool:
        return large(tokens) and group.is_aligned(tokens)

    # Aligned ranges come before the upper limit on size; size before alignment only when
    # a single token is so heavy, or so odd, that no page up to 4 MiB has aligned ranges.
    return (
        first(aligned, _candidates(group))
        or first(large, _powers(top))
        or first(large, range(1, top + 2))
        or 1
    )


def _powers(top: int) -> Iterable[int]:
    """Yield the powers of two up to ``top``."""
    tokens = 1
    while tokens <= top:
        yield tokens
        tokens *= 2
