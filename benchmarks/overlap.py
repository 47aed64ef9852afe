"""Time to first token of a reused prefix, against the optimum of a pipeline and no overlap.

    python benchmarks/overlap.py --device sim          # a modelled H100, PCIe 5 and NVMe
    python benchmarks/overlap.py --device cpu          # real threads and copies
    python benchmarks/overlap.py --quick --json FILE   # both, small, under a minute

With l the load and c the computation of each layer, the optimum is the maximum over j of the
sum of l up to layer j and of c from layer j on; without overlap it is the sum of all.  The
stall is what the time exceeds the optimum by, in percent of it; hidden is which share of the
difference between no overlap and the optimum was saved.  What is modelled and what is real
stands in ``overlap_sim.py`` and ``overlap_cpu.py``.

Sources: ``device`` (nothing to load), ``host``, ``disk`` (read and verified in host memory
before the forward), ``disk_gated`` (read behind the gate, for callers that can start over),
``ring`` (from host memory, with a device pool for half of the sequence: the other half passes
through device buffers).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import overlap_cpu
import overlap_sim
import torch
from overlap_rows import HEADER, line

K = 1024
LENGTHS = [1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K]
QUICK_LENGTHS = [1 * K, 4 * K, 16 * K]
STALL_GOAL, HIDDEN_GOAL = 2.0, 60.0


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["sim", "cpu"], help="only this one")
    parser.add_argument("--source", choices=overlap_sim.SOURCES, nargs="+", help="only these")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the prefix")
    parser.add_argument("--ratio", type=float, nargs="+", help="load/compute, on the CPU")
    parser.add_argument("--rounds", type=int, help="measured rounds, on the CPU")
    parser.add_argument("--layer-ms", type=float, help="computation of a layer, on the CPU")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the disk tier lies")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=options.dir) as folder:
        for row in measured(options, Path(folder)):
            rows.append(row)
            print(line(row), flush=True)
    for verdict in verdicts(rows):
        print(verdict)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def measured(options: argparse.Namespace, folder: Path):
    """Yield the rows that were asked for."""
    lengths = options.tokens or (QUICK_LENGTHS if options.quick else LENGTHS)
    if options.device in (None, "sim"):
        sources = options.source or overlap_sim.SOURCES
        yield from overlap_sim.run(lengths, folder / "sim", sources)
    if options.device in (None, "cpu"):
        yield from overlap_cpu.run(
            cpu_settings(options),
            folder / "cpu",
            layer_s=(options.layer_ms or (2.0 if options.quick else 4.0)) / 1e3,
            rounds=options.rounds or (3 if options.quick else 5),
        )


def cpu_settings(options: argparse.Namespace) -> list[tuple[str, int, float]]:
    """Return (source, tokens, ratio) of what is measured on the CPU.

    From host memory every ratio at every length; from disk every ratio at one length, and like
    the others at each length where load and computation are equal.
    """
    lengths = options.tokens or ([4 * K] if options.quick else [1 * K, 8 * K, 32 * K, 128 * K])
    ratios = options.ratio or overlap_cpu.RATIOS
    middle = lengths[len(lengths) // 2]
    asked = options.source is not None or options.ratio is not None
    return [
        (source, tokens, ratio)
        for source in options.source or overlap_cpu.SOURCES
        for tokens in lengths
        for ratio in ratios
        if source in overlap_cpu.SOURCES
        and (
            asked
            or ratio == 1.0
            or source == "host"
            or (source == "disk" and tokens == middle and not options.quick)
        )
    ]


def verdicts(rows: list[dict]):
    """Yield what the columns mean, and the figures that the goals are about."""
    yield "stall: above the optimum of the same source; hidden: of what that optimum hides."
    yield "The optimum of disk reads everything first; that of disk_gated reads beside the forward."
    for source in ("host", "disk", "disk_gated", "ring"):
        stalls = [r["stall_pct"] for r in rows if (r["device"], r["source"]) == ("sim", source)]
        if stalls:
            yield (
                f"sim, {source}: at most {max(stalls):.2f} % above the optimum "
                f"(goal {STALL_GOAL:.0f} %)"
            )
    for source in overlap_cpu.SOURCES:
        hidden = [r["hidden_pct"] for r in rows if (r["device"], r["source"]) == ("cpu", source)]
        if hidden:
            yield (
                f"cpu, {source}: at least {min(hidden):.0f} % of what can be hidden is "
                f"(goal {HIDDEN_GOAL:.0f} %)"
            )


if __name__ == "__main__":
    main()
