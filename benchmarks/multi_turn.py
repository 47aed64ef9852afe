"""Long conversations over many turns: what reuse gains, method by method.

Clients hold conversations; each turn's prompt is all that was said before and a new question.
Every method serves every turn, one after the other in an order that rotates, with the same ids,
on one thread, greedily.  The loop is closed: --rate only caps how often requests are sent, and
time spent waiting for others is not part of the time to the first token.

    recompute       computes the whole prompt
    dynamic         Transformers' DynamicCache of each conversation, kept in memory
    torch_save      the same, saved with torch.save and fsynced after each turn, loaded before
    tierkv_host     pages in host memory, the pool holds about one conversation
    tierkv_ssd      pages on disk, flushed after each turn; memory holds about one conversation
    tierkv_restart  the same, and the store is closed and opened again before each round

    python benchmarks/multi_turn.py --clients 8 --rounds 4 --request-length 4096
    python benchmarks/multi_turn.py --model none --geometry llama-3-8b --request-length 2048
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import multi_turn_memory as memory
import multi_turn_report as report
from multi_turn_loop import Loop
from multi_turn_plot import PlotError, draw, require_matplotlib
from multi_turn_schedule import Workload, WorkloadError
from multi_turn_tiers import TIER_METHODS, Budgets, describe

from tierkv import TierKVError

QUICK = {"clients": 2, "rounds": 3, "request_length": 256, "output_length": 4, "question": 32}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 when tokens that must be equal are not."""
    options = parse(arguments)
    try:
        if options.plot:
            require_matplotlib()
        result = run(options)
    except (WorkloadError, PlotError, TierKVError) as error:
        print(f"multi_turn: {error}", file=sys.stderr)
        return 2
    report.show_rows(result["rows"], result["details"])
    report.show_rounds(result["rounds"])
    report.show_verdicts(result["verdicts"])
    for note in result["notes"]:
        print(note)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        what = options.geometry if options.model == "none" else f"{options.model} {options.dtype}"
        title = f"{what}: {options.clients} clients, {options.rounds} rounds, "
        draw(options.plot, result["rows"], title + f"first prompt {options.request_length} tokens")
    return 0 if result["tokens_equal"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--clients", type=int, default=8)
    add("--rounds", type=int, default=4)
    add("--request-length", type=int, default=4096, help="tokens of a first prompt")
    add("--output-length", type=int, default=8, help="tokens generated a turn")
    add("--sub-question-input-length", type=int, default=0, metavar="N", dest="question",
        help="tokens of a later question; 0: as many as the first prompt")  # fmt: skip
    add("--shared-document", type=int, default=0, metavar="N",
        help="tokens of the first prompt that all clients share")  # fmt: skip
    add("--rate", type=float, default=0.0, help="requests sent a second, at most; 0: no limit")
    add("--max-parallel", type=int, default=128, help="requests sent and not answered, at most")
    add("--seed", type=int, default=1)
    add("--barrier", action="store_true", help="a round begins when the one before has ended")
    add("--order", choices=["random", "fifo"], default="random", help="which client is next")
    add("--model", default="smollm2", help="smollm2, gemma3, a model directory, or none")
    add("--geometry", default="llama-3-8b", help="without a model: layers,heads,dim,dtype or name")
    add("--page-tokens", type=int, help="without a model: tokens a page")
    add("--verify-layers", type=int, default=1, help="without a model: layers compared a turn")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--methods", help="names with commas between; all by default")
    add("--device", help="budget of the pool; one conversation by default")
    add("--host", help="host budget of tierkv_host; all conversations by default")
    add("--disk-host", help="host budget of tierkv_ssd and tierkv_restart; half a conversation")
    add("--disk", help="budget of the disk; all conversations by default")
    add("--recompute-clients", type=int, metavar="N",
        help="recompute the later turns of so many clients only: they take longest")  # fmt: skip
    add("--cold", choices=["once", "each"], default="once",
        help="first prompts: computed once for all methods, or by each")  # fmt: skip
    add("--files", choices=["cold", "warm"], default="cold",
        help="the page cache forgets the files of torch_save after each turn, or not")  # fmt: skip
    add("--no-memory", action="store_true", help="leave the peak memory of each method out")
    add("--directory", type=Path, default=Path(), help="where files are made")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE.png")
    add("--quick", action="store_true", help=f"small: {QUICK}")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
        options.geometry = "tiny"
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all methods; return everything that is reported."""
    place = report.machine()
    names = _names(options)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="multi-turn-") as folder:
        result = (_synthetic if options.model == "none" else _real)(options, names, Path(folder))
    result["parameters"] = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
    }
    result["machine"] = place
    return result


def _names(options: argparse.Namespace) -> list[str]:
    known = [*TIER_METHODS] if options.model == "none" else [*report.RIVALS, *TIER_METHODS]
    names = options.methods.split(",") if options.methods else known
    wrong = [name for name in names if name not in known]
    if wrong:
        raise WorkloadError(f"--methods {','.join(wrong)}: choose from {', '.join(known)}")
    return names


def _workload(options: argparse.Namespace, vocabulary: int) -> Workload:
    return Workload(
        clients=options.clients,
        rounds=options.rounds,
        request_length=options.request_length,
        output_length=options.output_length,
        question_length=options.question,
        shared_document=options.shared_document,
        rate=options.rate,
        max_parallel=options.max_parallel,
        seed=options.seed,
        barrier=options.barrier,
        order=options.order,
        vocabulary=vocabulary,
    )


def _budgets(options: argparse.Namespace) -> Budgets:
    return Budgets(
        device=options.device, host=options.host, staging=options.disk_host, disk=options.disk
    )


def _real(options: argparse.Namespace, names: list[str], folder: Path) -> dict[str, Any]:
    import torch
    from multi_turn_methods import Recorder, load, make_method

    from tierkv import CacheSpec

    torch.set_num_threads(1)
    if options.cold == "once" and options.rounds < 2:
        raise WorkloadError("--rounds 1 has no later turn to measure; say --cold each, or more")
    if options.recompute_clients is not None and options.recompute_clients < 1:
        raise WorkloadError(f"--recompute-clients must be at least 1: {options.recompute_clients}")
    try:
        model = load(options.model, options.dtype)
    except OSError as error:
        raise WorkloadError(f"--model {options.model} cannot be loaded: {error}") from error
    config = model.config.get_text_config()
    workload, budgets = _workload(options, config.vocab_size), _budgets(options)
    spec = CacheSpec.from_config(model.config, dtype=options.dtype)
    _show_workload(workload, f"{options.model} {options.dtype}", spec)
    peaks = {}
    if not options.no_memory:
        for name in names:
            if sys.stdout.isatty():
                print(f"  peak memory of {name}   ", end="\r", flush=True)
            peaks[name] = memory.measure(
                name, options.model, options.dtype, workload, budgets, str(folder)
            )
    keep_freed_memory()
    methods = [
        make_method(
            name, model, spec, workload, budgets, folder, cold_files=options.files == "cold"
        )
        for name in names
    ]
    for method in methods:
        if method.name == "recompute" and options.recompute_clients is not None:
            method.clients = options.recompute_clients
    loop = Loop(workload, methods, Recorder(model) if options.cold == "once" else None)
    loop.run(progress=sys.stdout.isatty())
    later = [r for r in loop.records if r["round"] > 1 or options.cold == "each"]
    equal = sum(r["equal"] for r in later)
    notes = [
        f"\n{equal} of {len(later)} turns gave the same {workload.output_length} tokens as "
        "the first method listed that served them",
        "first prompts: "
        + (
            "each computed once (reported as recompute's round 1) and its state given to every "
            "method in its own way"
            if options.cold == "once"
            else "computed by every method"
        ),
        f"files of torch_save: fsynced, {options.files}; tierkv on disk: O_DIRECT, flushed after "
        "each turn (outside the time to the first token, as are reopening and prefaulting)",
        "peak RSS: a process of its own for each method, which serves the last round with all "
        f"conversations held; the model alone: {_base(peaks)}",
    ]
    result = _result(loop.records, methods, workload, peaks, notes)
    result["tokens_equal"] = equal == len(later) or options.dtype != "float32"
    result["budgets"] = {
        name: describe(budgets.options(name, spec, workload))
        for name in names
        if name in TIER_METHODS
    }
    return result


def _synthetic(options: argparse.Namespace, names: list[str], folder: Path) -> dict[str, Any]:
    import torch
    from multi_turn_synthetic import Geometry, Synthetic

    torch.set_num_threads(1)
    spec = Geometry.parse(options.geometry).spec(options.page_tokens)
    workload, budgets = _workload(options, vocabulary=32000), _budgets(options)
    _show_workload(workload, options.geometry, spec)
    records, notes, results, peaks = [], ["\nno model: made-up states, nothing computed"], [], {}
    for name in names:
        gc.collect()  # what the method before still holds is not this one's
        memory.reset_peak()
        base = memory.resident("VmRSS")
        method = Synthetic(
            name,
            spec,
            workload,
            None if name == "tierkv_host" else folder / name,
            verify_layers=options.verify_layers,
            **budgets.options(name, spec, workload),
        )
        loop = Loop(workload, [method])
        started = time.perf_counter()
        loop.run(progress=sys.stdout.isatty())
        seconds = time.perf_counter() - started
        records += loop.records
        peaks[name] = {"peak_rss": memory.resident(), "base_rss": base}
        results.append(_result(loop.records, [method], workload, peaks, []))
        notes.append(
            f"{name}: {workload.sum_of_prompts / seconds:,.0f} prompt tokens/s (found ones "
            f"included), {method.appended_tokens / seconds:,.0f} appended; "
            f"{report.mib(method.verified_bytes)} compared bit by bit; resident before: "
            f"{report.mib(base)}"
        )
    merged = {
        key: [line for one in results for line in one[key]]
        for key in ("rows", "details", "rounds", "turns", "notes")
    }
    merged["notes"] = notes + merged["notes"]
    return {**merged, "verdicts": [], "tokens_equal": True}


def _result(
    records: list[report.Record],
    methods: list[Any],
    workload: Workload,
    peaks: dict[str, dict[str, int]],
    notes: list[str],
) -> dict[str, Any]:
    """Close the methods and return what they did."""
    rows, notes = [], list(notes)
    for method in methods:
        held = method.held()
        place = sum(held.values()) if method.tier == "host" else held.get(method.tier, 0)
        peak = peaks.get(method.name, {}).get("peak_rss")
        rows.append(report.make_row(method.name, method.tier, records, workload, place, peak))
        if method.name in TIER_METHODS:
            side = method.side
            notes.append(
                f"{method.name}: {report.mib(side.payload)} of pages written in all; new pages "
                f"once and a tail a group are at most {report.mib(side.allowed)} (asserted each "
                "turn)" + (f"; opened again in {max(side.reopen_s):.2f} s" if side.reopen_s else "")
            )
        method.close()
    names = [method.name for method in methods]
    return {
        "rows": rows,
        "details": [report.make_detail(name, records, workload) for name in names],
        "rounds": report.by_round(records, names, workload),
        "turns": records,
        "verdicts": report.verdicts(records, names),
        "notes": notes,
    }


def _show_workload(workload: Workload, what: str, spec: Any) -> None:
    pages = ", ".join(f"{g.name}: {g.page_tokens} tokens" for g in spec.groups)
    token = sum(group.token_bytes for group in spec.groups)
    print(
        f"{what}: {workload.clients} clients, {workload.rounds} rounds, first prompt "
        f"{workload.request_length}, question {workload.question}, output "
        f"{workload.output_length}, shared {workload.shared_document}, seed {workload.seed}\n"
        f"prompts {workload.sum_of_prompts:,} tokens in all, last one "
        f"{workload.prompt_tokens(workload.rounds):,}; unique {workload.unique_tokens:,} tokens = "
        f"{report.mib(round(workload.unique_tokens * token))}; ideal hit ratio "
        f"{workload.ideal_ratio:.4f}; pages of {spec.slot_bytes >> 10} KiB ({pages})"
    )


def _base(peaks: dict[str, dict[str, int]]) -> str:
    return report.mib(max((p["base_rss"] for p in peaks.values()), default=None))


def keep_freed_memory() -> None:
    """Make malloc keep what is freed, so that no method's times contain first touches of memory.

    On some virtual machines those are slower than everything else a turn does.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: nothing from mmap, which would go back at once
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


if __name__ == "__main__":
    sys.exit(main())
