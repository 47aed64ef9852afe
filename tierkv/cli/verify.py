"""``tierkv verify``: read and check every page at rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli.errors import EXIT_PROBLEMS
from tierkv.cli.output import JsonOption, console, counted, print_json

if TYPE_CHECKING:
    from tierkv.storage.ssd import SsdTier, VerifyReport

_SHOWN_KEYS = 20
_WORDS = {
    "unreadable": "unreadable",
    "repaired": "dropped",
    "index_mismatches": "index records wrong",
}


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The store's directory.")],
    repair: Annotated[bool, typer.Option("--repair", help="Drop the pages that are bad.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every page on disk and check it against its checksums and the index.

    Exits with 1 when any page is bad.  With --repair the bad ones are dropped, so that they
    are computed again when needed, and the rest stays: the status is 0 when that worked.
    --repair needs a store that nobody has open.
    """
    from tierkv.cli.directory import read_only, read_write

    opened = read_write(directory) if repair else read_only(directory, direct=True)
    with opened as ssd:
        report = _run(ssd, repair=repair, quiet=as_json)
    if as_json:
        print_json({"directory": str(directory), **report})
    else:
        _show(report)
    if not report["ok"]:
        raise typer.Exit(EXIT_PROBLEMS)


def _run(ssd: SsdTier, *, repair: bool, quiet: bool) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("pages", total=None)
        report = ssd.verify(
            repair=repair,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return report_json(report, repair=repair)


def report_json(report: VerifyReport, *, repair: bool) -> dict[str, Any]:
    """Return a verify report as JSON data, keys in hexadecimal."""
    left = report.bad - report.repaired if repair else report.bad
    damaged = not repair and bool(report.index_mismatches or report.damaged_slabs)
    return {
        "ok": not (left or report.unreadable or damaged),
        "pages": report.pages,
        "bad": report.bad,
        "bad_keys": [key.hex() for key in report.bad_keys],
        "unreadable": report.unreadable,
        "repaired": report.repaired,
        "index_mismatches": report.index_mismatches,
        "damaged_slabs": list(report.damaged_slabs),
        "unknown_files": list(report.unknown_files),
    }


def _show(report: dict[str, Any]) -> None:
    out = console()
    for key in report["bad_keys"][:_SHOWN_KEYS]:
        out.print(f"bad page {key}", style="red", markup=False, soft_wrap=True)
    hidden = len(report["bad_keys"]) - _SHOWN_KEYS
    if hidden > 0:
        out.print(f"... and {hidden} more; --json lists all", markup=False)
    for text in report["damaged_slabs"]:
        out.print(text, style="red", markup=False)
    for name in report["unknown_files"]:
        out.print(f"unknown file {name} (left alone)", style="yellow", markup=False)
    parts = [f"{counted(report['pages'], 'page')} checked", f"{report['bad']} bad"]
    parts += [f"{report[name]} {words}" for name, words in _WORDS.items() if report[name]]
    text = ", ".join(parts)
    if not report["ok"]:
        text += "; 'tierkv verify --repair' drops what is bad"
    out.print(text, style="green" if report["ok"] else "red", markup=False, soft_wrap=True)
