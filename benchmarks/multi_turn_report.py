"""What the multi-turn benchmark reports: rows, found tokens by round and tier, verdicts."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from multi_turn_schedule import Workload
from multi_turn_tiers import TIER_METHODS

RIVALS = ("recompute", "dynamic", "torch_save")
_PLACES = ("memory", "device", "host", "disk", "remote")

Record = dict[str, Any]


def percentile(values: list[float], share: float) -> float:
    """Return the value at index ``int(share * n)`` in order, without interpolation."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def make_row(
    name: str, tier: str, records: list[Record], workload: Workload, held: int, peak: int | None
) -> dict[str, Any]:
    """Return a method's row.

    Times and bytes written are of the later rounds, ratios are of the whole run.
    """
    own = [r for r in records if r["method"] == name]
    later = [r for r in own if r["round"] > 1] or own
    times = [r["ttft_s"] for r in later]
    return {
        "method": name,
        "tier": tier,
        "ttft_p50_s": percentile(times, 0.5),
        "ttft_p90_s": percentile(times, 0.9),
        "ttft_p99_s": percentile(times, 0.99),
        "found_ratio": sum(sum(r["found"].values()) for r in own) / workload.sum_of_prompts,
        "ideal_ratio": workload.ideal_ratio,
        "bytes_written": round(statistics.mean(r["written"] for r in later)),
        "bytes_held": held,
        "peak_rss": peak,
    }


def make_detail(name: str, records: list[Record], workload: Workload) -> dict[str, Any]:
    """Return what a row has no room for: medians of the later rounds."""
    own = [r for r in records if r["method"] == name]
    later = [r for r in own if r["round"] > 1] or own
    further = max(1, workload.output_length - 1)
    return {
        "method": name,
        "turns": len(later),
        "next_token_p50_s": percentile([r["rest_s"] for r in later], 0.5) / further,
        "keep_p50_s": percentile([r["keep_s"] for r in later], 0.5),
    }


def by_round(records: list[Record], names: list[str], workload: Workload) -> list[dict[str, Any]]:
    """Return the tokens found by place, the ideal and the computed, by method and round."""
    lines = []
    for name in names:
        for number in range(1, workload.rounds + 1):
            own = [r for r in records if (r["method"], r["round"]) == (name, number)]
            found = {p: sum(r["found"].get(p, 0) for r in own) for p in _PLACES}
            prompts = sum(r["prompt_tokens"] for r in own)
            times = [r["ttft_s"] for r in own if r["ttft_s"] is not None]
            lines.append(
                {
                    "method": name,
                    "round": number,
                    "prompt_tokens": prompts,
                    "ideal_tokens": sum(r["ideal_tokens"] for r in own),
                    "found_tokens": sum(found.values()),
                    **found,
                    "computed_tokens": prompts - sum(found.values()),
                    "ttft_p50_s": percentile(times, 0.5) if times else None,
                    "rest_p50_s": percentile([r["rest_s"] for r in own], 0.5),
                    "keep_p50_s": percentile([r["keep_s"] for r in own], 0.5),
                    "bytes_written": sum(r["written"] for r in own),
                }
            )
    return lines


def verdicts(records: list[Record], names: list[str]) -> list[dict[str, Any]]:
    """Compare tierkv's methods with the rivals: paired ratios of the same turns' times."""
    times = {(r["method"], r["client"], r["round"]): r["ttft_s"] for r in records if r["round"] > 1}
    turns = sorted({key[1:] for key in times})
    found = []
    for ours in (name for name in names if name in TIER_METHODS):
        for rival in (name for name in names if name in RIVALS):
            ratios = sorted(
                times[ours, *turn] / times[rival, *turn]
                for turn in turns
                if (ours, *turn) in times and (rival, *turn) in times
            )
            if not ratios:
                continue
            low, high = percentile(ratios, 0.25), percentile(ratios, 0.75)
            middle = statistics.median(ratios)
            if low <= 1 <= high:
                words = "as quick, within the spread"
            elif middle < 1:
                words = f"{1 / middle:.1f} times as quick"
            else:
                words = f"slower, {middle:.2f} times the time"
            found.append(
                {
                    "method": ours,
                    "rival": rival,
                    "ratio": middle,
                    "quartiles": [low, high],
                    "range": [ratios[0], ratios[-1]],
                    "words": words,
                }
            )
    return found


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {}
    for name in ("torch", "transformers", "numpy", "tierkv-store"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "load_at_start": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }


def _commit() -> str:
    place = Path(__file__).parent
    command = ["git", "-C", str(place), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def show_rows(rows: list[dict[str, Any]], details: list[dict[str, Any]]) -> None:
    """Print the table: times of the later rounds, ratios of the whole run."""
    print(
        f"\n{'method':15}{'state in':>9}{'turns':>6}{'p50':>9}{'p90':>9}{'p99':>9}{'next':>8}"
        f"{'keep':>8}{'found':>8}{'ideal':>8}{'written':>11}{'held':>12}{'peak RSS':>12}"
    )
    for row, more in zip(rows, details, strict=True):
        times = "".join(f"{row[f'ttft_p{p}_s']:8.3f}s" for p in (50, 90, 99))
        print(
            f"{row['method']:15}{row['tier']:>9}{more['turns']:6}{times}"
            f"{more['next_token_p50_s']:7.3f}s{more['keep_p50_s']:7.3f}s"
            f"{row['found_ratio']:8.4f}{row['ideal_ratio']:8.4f}{mib(row['bytes_written']):>11}"
            f"{mib(row['bytes_held']):>12}{mib(row['peak_rss']):>12}"
        )
    print(
        "p50, p90, p99: time to first token; next: time of each further token; keep: saving after "
        "a turn;\nwritten: bytes a turn; medians and means of the turns of the later rounds"
    )


def show_rounds(lines: list[dict[str, Any]]) -> None:
    """Print what was found where, by round."""
    print(
        f"\n{'method':15}{'round':>6}{'prompts':>9}{'ideal':>9}{'found':>9}{'device':>9}{'host':>9}"
        f"{'disk':>9}{'computed':>9}{'ttft p50':>10}"
    )
    for line in lines:
        if line["method"] not in TIER_METHODS:
            continue
        ttft = "-" if line["ttft_p50_s"] is None else f"{line['ttft_p50_s']:.3f}s"
        print(
            f"{line['method']:15}{line['round']:6}{line['prompt_tokens']:9}{line['ideal_tokens']:9}"
            f"{line['found_tokens']:9}{line['device']:9}{line['host']:9}{line['disk']:9}"
            f"{line['computed_tokens']:9}{ttft:>10}"
        )


def show_verdicts(found: list[dict[str, Any]]) -> None:
    """Print the comparisons in words."""
    if found:
        print("\ntime to first token of later turns, paired; median (quartiles):")
    for verdict in found:
        low, high = verdict["quartiles"]
        print(
            f"  {verdict['method']} / {verdict['rival']}: {verdict['ratio']:.3f} "
            f"({low:.3f} .. {high:.3f}): {verdict['words']}"
        )


def mib(count: int | None) -> str:
    """Return a byte count in MiB."""
    return "-" if count is None else f"{count / 2**20:.1f} MiB"
