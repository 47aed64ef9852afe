"""``tierkv stat``: capacity, use and traffic of each tier, live or at rest."""

from __future__ import annotations

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
    made = table(
        *("TIER", "USED", "CAPACITY", "FULL", "PAGES", "PINNED", "FOUND", "IN", "OUT"),
        right=("USED", "CAPACITY", "FULL", "PAGES", "PINNED", "FOUND", "IN", "OUT"),
    )
    for name, tier in status["tiers"].items():
        capacity = tier["capacity_bytes"]
        known = name == "disk" or status["live"]
        made.add_row(
            name,
            format_bytes(tier["used_bytes"]) if known else "-",
            format_bytes(capacity) if known else "not open",
            f"{100 * tier['used_bytes'] / capacity:.0f}%" if capacity else "-",
            str(tier["pages"]),
            str(tier["pinned"]),
            str(tier["hit_tokens"]),
            format_bytes(tier["bytes_in"]),
            format_bytes(tier["bytes_out"]),
        )
    out.print(made)
    out.print("FOUND: tokens of prompts found in the tier; IN, OUT: bytes moved", style="dim")
    counters = _flatten(status.get("counters", {}))
    moved = {name: value for name, value in counters.items() if value}
    if moved:
        text = "  ".join(f"{name} {value}" for name, value in moved.items())
        out.print(text, markup=False)


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


def _flatten(counters: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in counters.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
