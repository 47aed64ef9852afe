"""``tierkv stat``: capacity, use and traffic of each tier, live or at rest."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.cli.output import JsonOption, console, format_age, print_json, table
from tierkv.units import format_bytes

_TIERS = ("device", "host", "disk")
_COUNTS = (
    "capacity_bytes",
    "used_bytes",
    "capacity_pages",
    "pages",
    "pinned",
    "held",
    "hit_tokens",
    "bytes_in",
    "bytes_out",
)
_LEGEND = (
    "HELD: slots that running sequences hold; FOUND: tokens of prompts found in the tier; "
    "IN, OUT: bytes moved"
)
_TEXT_COLUMNS = 88
_JOINED = "\N{NO-BREAK SPACE}"


def stat(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The store's directory.")],
    as_json: JsonOption = False,
) -> None:
    """Show capacity, use, pins, hits and bytes moved of each tier.

    For a store that another process has open, the figures are that process's own, read
    without disturbing it.  Of a store at rest only the disk tier has anything.
    """
    status = collect(directory)
    if as_json:
        print_json(status)
    else:
        show(status)


def collect(directory: Path) -> dict[str, Any]:
    """Return the status of a store directory as JSON data.

    Raises:
        StoreError: the directory is missing, no store, or of another version.
    """
    from tierkv.cli.directory import disk_stats, live_snapshot, owner_of, read_only

    owner = owner_of(directory)
    live = live_snapshot(directory, owner)
    if live is None:
        with read_only(directory) as ssd:
            tiers = {"disk": disk_stats(ssd)}
    else:
        tiers = live.pop("tiers", {})
    status: dict[str, Any] = {
        "directory": str(directory),
        "open": owner is not None,
        "live": live is not None,
        "owner": owner.as_dict() if owner else None,
        "tiers": {name: dict.fromkeys(_COUNTS, 0) | tiers.get(name, {}) for name in _TIERS},
    }
    return status | (live or {})


def show(status: dict[str, Any]) -> None:
    """Print a status for people."""
    out = console()
    out.print(_headline(status), markup=False, soft_wrap=True)
    live = status["live"]
    # At rest there is no budget, only the slab files that are there.
    size = "CAPACITY" if live else "ALLOCATED"
    numbers = ("USED", size, "FULL", "PAGES", "PINNED", "HELD", "FOUND", "IN", "OUT")
    made = table("TIER", *numbers, right=numbers)
    for name, tier in status["tiers"].items():
        made.add_row(name, *_at_hand(tier, name == "disk" or live), *_since_opening(tier, live))
    out.print(made)
    if live:
        out.print(_LEGEND, style="dim", soft_wrap=True)
        text = _counters(status.get("counters", {}), width=min(out.width, _TEXT_COLUMNS))
        if text:
            out.print(text, markup=False, soft_wrap=True)


def _at_hand(tier: dict[str, Any], known: bool) -> tuple[str, ...]:
    """Return the cells that a tier at rest has too."""
    if not known:
        return ("-", "not open", "-", "-")
    used, capacity = tier["used_bytes"], tier["capacity_bytes"]
    full = f"{100 * used / capacity:.0f}%" if capacity else "-"
    return (format_bytes(used), format_bytes(capacity), full, str(tier["pages"]))


def _since_opening(tier: dict[str, Any], live: bool) -> tuple[str, ...]:
    """Return the cells that only a running store has."""
    if not live:
        return ("-",) * 5
    counts = (str(tier[name]) for name in ("pinned", "held", "hit_tokens"))
    return (*counts, format_bytes(tier["bytes_in"]), format_bytes(tier["bytes_out"]))


def _headline(status: dict[str, Any]) -> str:
    owner = status["owner"]
    if owner is None:
        text = f"{status['directory']}: not open; what is at rest on disk"
        if not status["tiers"]["disk"].get("clean", True):
            text += " (not closed in order: the next open rebuilds its index)"
        return text
    text = f"{status['directory']}: open in {describe_owner(owner)}"
    return text if status["live"] else text + ", which publishes no statistics; what is on disk"


def describe_owner(owner: dict[str, Any]) -> str:
    """Return the process that has a store open in words."""
    text = f"process {owner['pid'] or '(unknown)'}"
    if owner["host"]:
        text += f" on {owner['host']}"
    if owner["since"]:
        text += f" for {format_age(time.time() - owner['since'])}"
    return text


def _counters(counters: dict[str, Any], *, width: int) -> str:
    """Return the counters that are not zero; those kept by tier are in the table."""
    moved = {k: v for k, v in counters.items() if v and not isinstance(v, dict)}
    # A line ends between counters only.
    parts = [f"{k} {v}".replace("_", _JOINED).replace(" ", _JOINED) for k, v in moved.items()]
    return textwrap.fill(", ".join(parts), width).replace(_JOINED, " ")
