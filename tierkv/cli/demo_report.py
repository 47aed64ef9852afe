"""How the demo shows itself: a line a turn, the totals, and the same as JSON."""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.cli.output import counted
from tierkv.stats import Found

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    ("conversation", 12),
    ("turn", 4),
    ("prompt", 7),
    ("device", 7),
    ("host", 7),
    ("disk", 7),
    ("computed", 8),
    ("hidden", 8),
    ("exposed", 8),
    ("first token", 11),
    ("recomputed", 10),
    ("speed-up", 8),
    ("tokens", 9),
)
LEGEND = (
    "hidden: reads and copies that ran while the model computed; "
    "exposed: how long the turn waited for them"
)
_WIDTH = sum(width + 1 for _, width in _COLUMNS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """One turn of one conversation.

    Attributes:
        conversation: which one, from 1.
        turn: which turn of it, from 1.
        prompt_tokens: tokens of the whole prompt.
        found: tokens whose state was found, by tier.
        computed: tokens of the prompt that were computed.
        hidden_load_s: seconds of loading that computing hid.
        exposed_load_s: seconds of loading that somebody waited for.
        ttft_s: seconds to the first token, finding and loading included.
        recompute_s: seconds to the first token without any reuse.
        tokens_equal: whether both ways gave the same tokens.
    """

    conversation: int
    turn: int
    prompt_tokens: int
    found: Found
    computed: int
    hidden_load_s: float
    exposed_load_s: float
    ttft_s: float
    recompute_s: float
    tokens_equal: bool

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came."""
        return self.recompute_s / self.ttft_s

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        tiers = ("device", "host", "disk")
        found = {tier: getattr(self.found, tier) for tier in tiers}
        return asdict(self) | {"found": found, "speedup": self.speedup}


def header() -> str:
    """Return the heading of the lines."""
    groups = " " * 26 + "tokens found in".center(23) + " " * 10 + "loading".center(17)
    names = " ".join(name.rjust(width) for name, width in _COLUMNS)
    return f"{groups}\n{names}\n{'-' * _WIDTH}"


def divider(text: str) -> str:
    """Return a text in the middle of a line as wide as the table."""
    return f" {text} ".center(_WIDTH, "-")


def line(result: TurnResult) -> str:
    """Return one turn as a line."""
    cells = (
        result.conversation,
        result.turn,
        result.prompt_tokens,
        result.found.device,
        result.found.host,
        result.found.disk,
        result.computed,
        f"{1e3 * result.hidden_load_s:.0f} ms" if result.found.total else "-",
        f"{1e3 * result.exposed_load_s:.0f} ms" if result.found.total else "-",
        f"{result.ttft_s:.3f} s",
        f"{result.recompute_s:.3f} s",
        f"{result.speedup:.1f}x" if result.found.total else "-",
        "equal" if result.tokens_equal else "DIFFERENT",
    )
    pairs = zip(cells, _COLUMNS, strict=True)
    return " ".join(str(cell).rjust(width) for cell, (_, width) in pairs)


def summarise(results: list[TurnResult], *, reopened: bool) -> dict[str, Any]:
    """Return the totals; the speed-up is the median over turns after the first."""
    later = [r.speedup for r in results if r.turn > 1] or [r.speedup for r in results]
    return {
        "turns": len(results),
        "tokens_equal": all(r.tokens_equal for r in results),
        "median_speedup": statistics.median(later),
        "reopened": reopened,
        "prompt_tokens": sum(r.prompt_tokens for r in results),
        "found_tokens": sum(r.found.total for r in results),
        "computed_tokens": sum(r.computed for r in results),
    }


def show_summary(out: Console, summary: dict[str, Any]) -> None:
    """Print the totals."""
    share = 100 * summary["found_tokens"] / summary["prompt_tokens"]
    verdict = "all tokens equal" if summary["tokens_equal"] else "SOME TOKENS DIFFER"
    out.print(
        f"\n{counted(summary['turns'], 'turn')}, {verdict}; {share:.0f} % of the "
        "prompts' tokens were found; "
        f"later turns start {summary['median_speedup']:.1f} times sooner (median)",
        style="bold green" if summary["tokens_equal"] else "bold red",
        soft_wrap=True,
    )
    out.print(LEGEND, style="dim", soft_wrap=True)


def show_ways_on(out: Console, place: Path) -> None:
    """Print what can be done with the store that stays behind."""
    directory, program = shlex.quote(str(place)), shlex.quote(_program())
    ways = ", ".join(f"{program} {command} {directory}" for command in ("stat", "ls", "verify"))
    out.print(f"\nThe store stays in {place}: try {ways}", soft_wrap=True, markup=False)


def _program() -> str:
    """Return how to call tierkv from here: by name, or by its path when it is not on PATH."""
    beside = Path(sys.executable).parent / "tierkv"
    if shutil.which("tierkv") or not beside.exists():
        return "tierkv"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def write_json(path: Path, results: list[TurnResult], extra: dict[str, Any]) -> None:
    """Write everything to a file."""
    data = {"turns": [result.as_dict() for result in results], **extra}
    path.write_text(json.dumps(data, indent=2) + "\n")
