"""Pages of a store directory as ``ls`` shows them: filters, orders and chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from tierkv.cli.namespaces import Names
    from tierkv.storage.format import PageInfo

PAGE_TAIL = 1


@dataclass(frozen=True, slots=True)
class PageRow:
    """One page, wherever it is.

    Attributes:
        info: what its header says.
        stored_bytes: bytes it takes: on disk, after the codec.
        hits: how often it was found.
        last_used: Unix seconds of the last hit, or of its creation.
        tiers: the tiers that hold it, nearest first.
    """

    info: PageInfo
    stored_bytes: int
    hits: int
    last_used: int
    tiers: tuple[str, ...] = ("disk",)

    @property
    def is_tail(self) -> bool:
        """Whether this is the partial page saved at the end of a turn."""
        return bool(self.info.flags & PAGE_TAIL)


@dataclass(frozen=True, slots=True)
class ChainRow:
    """A sequence as far as it is stored: the chain of pages that ends in one leaf.

    Attributes:
        leaf: the last page.
        pages: pages of the chain that are stored.
        stored_bytes: bytes of them all; pages shared with other chains count here too.
        hits: hits of the leaf.
        created_s: Unix seconds at which its oldest page was written.
        last_used: Unix seconds of the last hit of any page.
    """

    leaf: PageRow
    pages: int
    stored_bytes: int
    hits: int
    created_s: int
    last_used: int


class TierName(StrEnum):
    """Tiers of one machine, by name."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class SortBy(StrEnum):
    """What ``ls`` sorts by; biggest, newest or most used first, but tokens ascending."""

    AGE = "age"
    USED = "used"
    HITS = "hits"
    BYTES = "bytes"
    TOKENS = "tokens"


_PAGE_ORDER: dict[SortBy, Callable[[PageRow], int]] = {
    SortBy.AGE: lambda row: -row.info.created_s,
    SortBy.USED: lambda row: -row.last_used,
    SortBy.HITS: lambda row: -row.hits,
    SortBy.BYTES: lambda row: -row.stored_bytes,
    SortBy.TOKENS: lambda row: row.info.end_token,
}
_CHAIN_ORDER: dict[SortBy, Callable[[ChainRow], int]] = {
    SortBy.AGE: lambda row: -row.leaf.info.created_s,
    SortBy.USED: lambda row: -row.last_used,
    SortBy.HITS: lambda row: -row.hits,
    SortBy.BYTES: lambda row: -row.stored_bytes,
    SortBy.TOKENS: lambda row: row.leaf.info.end_token,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFilter:
    """Which pages to show; None lets everything through.

    Attributes:
        namespace: the first hex digits of a namespace's digest.
        sequence: the first hex digits of a page's key: that page and those before it.
        tier: a tier's name.
        group: a layer group's name or index.
        tail: only tail pages, or only full ones.
    """

    namespace: str | None = None
    sequence: str | None = None
    tier: TierName | None = None
    group: str | None = None
    tail: bool | None = None

    def apply(self, rows: Iterable[PageRow], names: Names) -> list[PageRow]:
        """Return the rows that pass.

        Raises:
            InvalidInputError: a prefix that is not hexadecimal, or no page or more than one
                has the key prefix of ``sequence``.
        """
        kept = list(rows)
        if self.sequence is not None:
            kept = chain_of(kept, self.sequence)
        if self.namespace is not None:
            prefix = hex_prefix(self.namespace, "--namespace")
            kept = [r for r in kept if r.info.namespace.hex().startswith(prefix)]
        if self.tier is not None:
            kept = [r for r in kept if self.tier in r.tiers]
        if self.group is not None:
            kept = [r for r in kept if self.group in (names.group(r.info), str(r.info.group))]
        if self.tail is not None:
            kept = [r for r in kept if r.is_tail is self.tail]
        return kept


def sort_pages(rows: Iterable[PageRow], by: SortBy) -> list[PageRow]:
    """Return the pages in order; equal ones by namespace, group and position."""
    order = _PAGE_ORDER[by]
    return sorted(
        rows,
        key=lambda r: (order(r), r.info.namespace, r.info.group, r.info.end_token, r.info.key),
    )


def sort_chains(rows: Iterable[ChainRow], by: SortBy) -> list[ChainRow]:
    """Return the chains in order; equal ones by their leaf's key."""
    order = _CHAIN_ORDER[by]
    return sorted(rows, key=lambda r: (order(r), r.leaf.info.key))


def hex_prefix(text: str, option: str) -> str:
    """Return a lower-case prefix of hexadecimal digits, or raise InvalidInputError."""
    prefix = text.lower()
    if not prefix or set(prefix) - set("0123456789abcdef"):
        raise InvalidInputError(f"{option}: expected hexadecimal digits, got {text!r}")
    return prefix


def chain_of(rows: Iterable[PageRow], key: str) -> list[PageRow]:
    """Return the page whose key starts with ``key`` and the stored pages before it."""
    prefix = hex_prefix(key, "--sequence")
    by_key = {row.info.key: row for row in rows}
    found = [k for k in by_key if k.hex().startswith(prefix)]
    if len(found) != 1:
        counted = "no page has" if not found else f"{len(found)} pages have"
        raise InvalidInputError(
            f"--sequence: {counted} a key that starts with {prefix}; "
            "'tierkv ls --sequences' lists the keys that end sequences"
        )
    return _walk(by_key, by_key[found[0]])[::-1]


def chains(rows: Iterable[PageRow]) -> list[ChainRow]:
    """Return one row for each leaf: a page that no other stored page continues."""
    by_key = {row.info.key: row for row in rows}
    parents = {row.info.parent for row in by_key.values()}
    return [_chain_row(_walk(by_key, row)) for k, row in by_key.items() if k not in parents]


def _walk(by_key: Mapping[bytes, PageRow], leaf: PageRow) -> list[PageRow]:
    """Return the leaf and the pages before it, up to the first that is not stored."""
    path, seen = [leaf], {leaf.info.key}
    while (parent := by_key.get(path[-1].info.parent)) is not None:
        if parent.info.key in seen:  # only damaged data has a circle
            break
        seen.add(parent.info.key)
        path.append(parent)
    return path


def _chain_row(path: list[PageRow]) -> ChainRow:
    return ChainRow(
        leaf=path[0],
        pages=len(path),
        stored_bytes=sum(row.stored_bytes for row in path),
        hits=path[0].hits,
        created_s=min(row.info.created_s for row in path),
        last_used=max(row.last_used for row in path),
    )


def page_json(row: PageRow, names: Names) -> dict[str, Any]:
    """Return a page as JSON data."""
    info = row.info
    return {
        "key": info.key.hex(),
        "parent": info.parent.hex(),
        "namespace": info.namespace.hex(),
        "group": names.group(info),
        "start_token": info.end_token - info.num_tokens,
        "end_token": info.end_token,
        "tail": row.is_tail,
        "tiers": list(row.tiers),
        "bytes": row.stored_bytes,
        "created_s": info.created_s,
        "last_used_s": row.last_used,
        "hits": row.hits,
    }


def chain_json(row: ChainRow, names: Names) -> dict[str, Any]:
    """Return a sequence as JSON data."""
    info = row.leaf.info
    return {
        "leaf": info.key.hex(),
        "namespace": info.namespace.hex(),
        "group": names.group(info),
        "tokens": info.end_token,
        "tail": row.leaf.is_tail,
        "pages": row.pages,
        "bytes": row.stored_bytes,
        "created_s": row.created_s,
        "last_used_s": row.last_used,
        "hits": row.hits,
    }
