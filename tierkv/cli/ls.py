"""``tierkv ls``: which pages, or which sequences, a store holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.cli.namespaces import Names
from tierkv.cli.output import JsonOption, console, counted, format_age, print_json, table
from tierkv.cli.pages import (
    ChainRow,
    PageFilter,
    PageRow,
    SortBy,
    TierName,
    chain_json,
    chains,
    page_json,
    sort_chains,
    sort_pages,
)
from tierkv.units import format_bytes

_KEY_DIGITS = 10
_NAMESPACE_DIGITS = 6


def ls(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The store's directory.")],
    sequences: Annotated[
        bool, typer.Option("--sequences", "-s", help="One row a sequence instead of one a page.")
    ] = False,
    namespace: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this namespace (first hex digits).")
    ] = None,
    sequence: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only the page with this key and those before it."),
    ] = None,
    tier: Annotated[TierName | None, typer.Option(help="Only pages in this tier.")] = None,
    group: Annotated[
        str | None, typer.Option(help="Only this layer group (its name or index).")
    ] = None,
    tail: Annotated[
        bool | None, typer.Option("--tail/--full", help="Only tail pages, or only full ones.")
    ] = None,
    sort: Annotated[SortBy, typer.Option(help="Newest, latest used, ... first.")] = SortBy.USED,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Rows; 0 shows all.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List pages by namespace, sequence, tier, age and hits.

    Works on a store that another process has open: what it has written to disk, and the
    pages in its device and host memory as it published them last.
    """
    wanted = PageFilter(namespace=namespace, sequence=sequence, tier=tier, group=group, tail=tail)
    from tierkv.cli.directory import read_pages

    found, names = read_pages(directory)
    rows = wanted.apply(found, names)
    if sequences:
        _show_chains(directory, sort_chains(chains(rows), sort), names, limit, as_json=as_json)
    else:
        _show_pages(directory, sort_pages(rows, sort), names, limit, as_json=as_json)


def _show_pages(
    directory: Path, rows: list[PageRow], names: Names, limit: int, *, as_json: bool
) -> None:
    shown = rows[:limit] if limit else rows
    total_bytes = sum(row.stored_bytes for row in rows)
    if as_json:
        data = _envelope(directory, [row.info.namespace for row in shown], names)
        data |= {"total": len(rows), "total_bytes": total_bytes}
        print_json(data | {"pages": [page_json(row, names) for row in shown]})
        return
    now = time.time()
    made = table(
        *("KEY", "SPACE", "GROUP", "TOKENS", "TIERS", "BYTES", "AGE", "USED", "HITS"),
        right=("TOKENS", "BYTES", "AGE", "USED", "HITS"),
    )
    for row in shown:
        info = row.info
        first = info.end_token - info.num_tokens
        made.add_row(
            info.key.hex()[:_KEY_DIGITS],
            info.namespace.hex()[:_NAMESPACE_DIGITS],
            names.group(info),
            f"{first}-{info.end_token}" + (" tail" if row.is_tail else ""),
            "+".join(row.tiers),
            format_bytes(row.stored_bytes),
            format_age(now - info.created_s),
            format_age(now - row.last_used),
            str(row.hits),
        )
    _print(made, [row.info.namespace for row in shown], names)
    _print_summary("page", len(shown), len(rows), total_bytes)


def _show_chains(
    directory: Path, rows: list[ChainRow], names: Names, limit: int, *, as_json: bool
) -> None:
    shown = rows[:limit] if limit else rows
    if as_json:
        data = _envelope(directory, [row.leaf.info.namespace for row in shown], names)
        data |= {"total": len(rows)}
        print_json(data | {"sequences": [chain_json(row, names) for row in shown]})
        return
    now = time.time()
    made = table(
        *("LAST PAGE", "SPACE", "GROUP", "TOKENS", "PAGES", "BYTES", "AGE", "USED", "HITS"),
        right=("TOKENS", "PAGES", "BYTES", "AGE", "USED", "HITS"),
    )
    for row in shown:
        info = row.leaf.info
        made.add_row(
            info.key.hex()[:_KEY_DIGITS],
            info.namespace.hex()[:_NAMESPACE_DIGITS],
            names.group(info),
            str(info.end_token),
            str(row.pages),
            format_bytes(row.stored_bytes),
            format_age(now - row.created_s),
            format_age(now - row.last_used),
            str(row.hits),
        )
    _print(made, [row.leaf.info.namespace for row in shown], names)
    _print_summary("sequence", len(shown), len(rows), None)


def _envelope(directory: Path, digests: Sequence[bytes], names: Names) -> dict[str, Any]:
    """Return what both JSON forms start with."""
    described = {d.hex(): names.description(d) for d in sorted(set(digests))}
    return {"directory": str(directory), "namespaces": described}


def _print(made: Any, digests: Sequence[bytes], names: Names) -> None:
    out = console()
    out.print(made)
    for digest in sorted(set(digests)):
        out.print(
            f"namespace {digest.hex()[:_NAMESPACE_DIGITS]}: {names.summary(digest)}", markup=False
        )


def _print_summary(what: str, shown: int, total: int, total_bytes: int | None) -> None:
    text = counted(total, what)
    if total_bytes is not None:
        text += f", {format_bytes(total_bytes)}"
    if shown < total:
        text += f"; {shown} shown, --limit 0 shows all"
    console().print(text, markup=False)
