"""Peak memory of each way to serve a turn, in a process of its own for each.

The resident set of one process that runs all methods is nobody's, so each method gets a child:
it is handed made-up states of every conversation as they are before the last round, the peak is
reset, and it serves the last round with the real model.  Without a model, methods run one after
the other, and the peak is reset before each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multi_turn_schedule import Workload
from multi_turn_tiers import Budgets


def reset_peak() -> None:
    """Make the peak begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str = "VmHWM") -> int:
    """Return the peak (``VmHWM``) or present (``VmRSS``) resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(
    name: str, model: str, dtype: str, workload: Workload, budgets: Budgets, folder: str
) -> dict[str, int]:
    """Run a child for one method; return its ``peak_rss`` and the ``base_rss`` of the model."""
    task = {
        "name": name,
        "model": model,
        "dtype": dtype,
        "workload": asdict(workload),
        "budgets": asdict(budgets),
        "folder": folder,
    }
    command = [sys.executable, __file__, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"the memory pass of {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(task: dict[str, Any]) -> dict[str, int]:
    """Serve the last round with one method; return the peak."""
    import torch
    from multi_turn_methods import load, make_method

    from tierkv import CacheSpec

    torch.set_num_threads(1)
    workload, budgets = Workload(**task["workload"]), Budgets(**task["budgets"])
    model = load(task["model"], task["dtype"])
    spec = CacheSpec.from_config(model.config, dtype=task["dtype"])
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))  # weights are mapped and become resident as they are used
    base = resident("VmRSS")
    with tempfile.TemporaryDirectory(dir=task["folder"]) as scratch:
        method = make_method(
            task["name"], model, spec, workload, budgets, Path(scratch), cold_files=True
        )
        last, count = workload.rounds, workload.output_length
        history = workload.prompt_tokens(last) - (workload.question if last > 1 else 0)
        conversations = [
            (prompt * (history // len(prompt) + 1))[:history] for prompt in workload.first_prompts()
        ]
        if last > 1:
            for client, ids in enumerate(conversations):
                method.adopt(client, ids[:-1], _states(spec, history - 1, client))
        method.begin_round(last)
        reset_peak()
        questions = workload.questions()
        # Recomputing keeps nothing: one turn shows its peak.
        served = conversations[:1] if task["name"] == "recompute" else conversations
        for client, ids in enumerate(served):
            method.serve(client, ids + (next(questions) if last > 1 else []), count)
        peak = resident()
        method.close()
    return {"peak_rss": peak, "base_rss": base}


def _states(spec: Any, tokens: int, client: int) -> list:
    import torch

    bases: dict[tuple, torch.Tensor] = {}
    states = []
    for layer in sorted(spec.layer_to_group):
        group = spec.groups[spec.layer_to_group[layer]]
        shapes = [(1, c.heads, tokens + 64, c.dim) for c in group.components]
        for shape in shapes:
            if shape not in bases:
                draw = torch.Generator().manual_seed(client)
                bases[shape] = torch.rand(shape, generator=draw).to(getattr(torch, group.dtype))
        at = layer % 64
        states.append(tuple(bases[shape][:, :, at : at + tokens] for shape in shapes))
    return states


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]))))
