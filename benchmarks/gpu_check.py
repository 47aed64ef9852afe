"""Everything that only a GPU can show, in one go of under 8 minutes.

    python benchmarks/gpu_check.py                  # on a GPU; writes results/<gpu>.json
    python benchmarks/gpu_check.py --device cpu     # a rehearsal, small, with the references

Runs the device tests, every kernel against its reference, the bandwidth between host and
device by page size and method, the overlap of copies and computation, decode attention
against the memory's bandwidth and SDPA, the store through all its tiers, and
compute-sanitizer where it is installed.  Each part runs in a process of its own with a time
of its own: one that fails, or breaks the GPU for its process, is reported and the others go
on.  Without a GPU every part is skipped, with the reason.

Ratios are to a limit measured in the same part.  Kernels are compiled on their first call,
which is most of the time of the parts that compare them; those run side by side.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_check_process import Outcome, collect
from gpu_check_support import Check

RESULTS = Path(__file__).with_name("results")
TOTAL_S = 470


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: for ``--part`` and the table.
        where: module and function.
        budget_s: when it is ended.
        timed: it measures time, so nothing runs beside it.
    """

    name: str
    where: str
    budget_s: float
    timed: bool = False


PARTS = [
    Part("device tests", "gpu_check_tools:run_device_tests", 120),
    Part("store", "gpu_check_store:run", 90),
    Part("copies", "gpu_check_kernels:run_copies", 120),
    Part("codecs", "gpu_check_kernels:run_codecs", 120),
    Part("decode kernels", "gpu_check_attention:run_decode", 150),
    Part("prefill kernels", "gpu_check_attention:run_prefill", 150),
    Part("quantised attention", "gpu_check_attention:run_quantised", 150),
    Part("transfers", "gpu_check_transfers:run", 75, timed=True),
    Part("overlap", "gpu_check_overlap:run", 75, timed=True),
    Part("decode", "gpu_check_decode:run", 75, timed=True),
    Part("sanitizer", "gpu_check_tools:run_sanitizer", 80, timed=True),
]


def main(arguments: list[str] | None = None) -> int:
    """Run the check; return 1 when something came out wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a rehearsal")
    parser.add_argument("--part", choices=[p.name for p in PARTS], nargs="+", help="only these")
    parser.add_argument("--small", action="store_true", help="small sizes, on a GPU too")
    parser.add_argument("--one-process", action="store_true", help="no process for each part")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.small = options.small or options.device == "cpu"
    if options.child:
        return run_part(part_of(options.child), options)
    parts = [p for p in PARTS if options.part is None or p.name in options.part]
    reason = why_not(options.device)
    started = time.monotonic()
    if reason is None:
        outcomes = run_all(parts, options)
    else:
        outcomes = {p.name: Outcome("skipped", reason) for p in parts}
    result = {**machine(options.device), "seconds": time.monotonic() - started}
    result["parts"] = [outcomes[p.name].as_dict(p.name) for p in parts]
    for text in table(result):
        print(text)
    if reason is not None:
        print("nothing was checked; --device cpu rehearses the script on the CPU")
    for path in places(options, result, complete=parts == PARTS and reason is None):
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes.values()))


def part_of(name: str) -> Part:
    """Return a part by its name."""
    return next(p for p in PARTS if p.name == name)


def why_not(device: str) -> str | None:
    """Return why the check cannot run here, None where it can."""
    if device == "cpu" or torch.cuda.is_available():
        return None
    return f"torch.cuda.is_available() is False (PyTorch {torch.__version__})"


def run_all(parts: list[Part], options: argparse.Namespace) -> dict[str, Outcome]:
    """Run parts: those that measure no time side by side, then the others one by one."""
    deadline = time.monotonic() + TOTAL_S
    kept = sum(part.budget_s for part in parts if part.timed)
    with tempfile.TemporaryDirectory() as folder:

        def one(part: Part) -> tuple[str, Outcome]:
            left = deadline - time.monotonic() - (0.0 if part.timed else kept)
            if left <= 0:
                return part.name, Outcome("skipped", "no time was left")
            out = Path(folder) / f"{part.name}.jsonl"
            if options.one_process:
                return part.name, run_here(part, options)
            command = [sys.executable, __file__, "--child", part.name, "--device", options.device]
            command += ["--out", str(out), *(["--small"] if options.small else [])]
            outcome = collect(command, out, min(part.budget_s, left))
            print(f"{part.name}: {outcome.status} in {outcome.seconds:.0f} s", file=sys.stderr)
            return part.name, outcome

        workers = 1 if options.one_process else max(2, min(8, os.cpu_count() or 2))
        with ThreadPoolExecutor(workers) as pool:
            outcomes = dict(pool.map(one, (p for p in parts if not p.timed)))
        outcomes.update(one(p) for p in parts if p.timed)
    return outcomes


def run_part(part: Part, options: argparse.Namespace) -> int:
    """Run one part in this process, its rows going to a file."""
    torch.set_num_threads(1 if options.device == "cpu" else 4)
    outcome = run_here(part, options)
    if outcome.error:
        print(outcome.error, file=sys.stderr)
    return int(bool(outcome.error))


def run_here(part: Part, options: argparse.Namespace) -> Outcome:
    """Run one part in this process."""
    started, rows, error = time.monotonic(), [], ""
    try:
        check = Check(options.device, small=options.small, out=options.out)
        rows = check.rows
        module, _, name = part.where.partition(":")
        getattr(importlib.import_module(module), name)(check)
    except Exception:  # whatever it is, it is this part's result
        error = traceback.format_exc()
    return Outcome.of(rows, error, time.monotonic() - started)


def machine(device: str) -> dict:
    """Return what ran."""
    found = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("triton", "cuda.bindings"):
        try:
            found[name] = getattr(importlib.import_module(name), "__version__", "installed")
        except ImportError:
            found[name] = "not installed"
    if device == "cpu" or not torch.cuda.is_available():
        return {"gpu": None, **found}
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "gpu": properties.name,
        **found,
        "cuda": torch.version.cuda,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def places(options: argparse.Namespace, result: dict, *, complete: bool) -> list[Path]:
    """Return where the result goes: what was asked for, and after a whole check of a GPU."""
    found = [options.json] if options.json else []
    if complete and result["gpu"] and not options.small:
        slug = re.sub(r"[^a-z0-9]+", "_", result["gpu"].lower()).strip("_")
        found.append(RESULTS / f"{slug}.json")
    return found


def table(result: dict):
    """Yield the lines of the report."""
    yield f"{result['gpu'] or 'no GPU'} ({result['device']}), PyTorch {result['torch']}"
    for part in result["parts"]:
        reason = part.get("error", "").strip().splitlines()
        why = f": {reason[-1]}" if reason else ""
        yield f"\n== {part['part']}: {part['status']} in {part['seconds']:.0f} s{why}"
        for row in part["rows"]:
            yield line(row)


def line(row: dict) -> str:
    """Return a row for the table."""
    value = f"{row['value']:.4g} {row['unit']}" if "value" in row else ""
    ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
    goal = ""
    if "goal" in row:
        goal = f"goal {row['goal']}: {'met' if row['ratio'] >= row['goal'] else 'MISSED'}"
    told = "FAILED" if "error" in row else {True: "right", False: "WRONG"}.get(row.get("ok"), "")
    notes = " ".join(str(row[key]) for key in ("skipped", "error") if key in row)
    return f"  {row['what']:<58}{value:>22}{ratio:>8}  {goal or told} {notes}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
