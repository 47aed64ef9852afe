"""Overlap in real time: real threads, real copies, a decoder whose layers multiply matrices.

The copy stream carries so many bytes a second that loading the prefix takes 0.5, 1 or 2 times
as long as computing; in the rest of the time its thread sleeps, as a copy engine leaves the
processor alone.  A layer's computation is a real product of matrices on the calling thread.

Each round measures, in an order that rotates:

* ``overlapped``: a turn through the gate, from its begin to the end of its last layer;
* ``in turn``: the same, but all layers are waited for before the first is computed;
* ``side by side``: the loads run, and the layers of another sequence, which has nothing to
  load, append and compute meanwhile.  This gives the l and c of the formula under the
  contention that they cause each other: when each layer arrived, and how long each layer took.
  What comes before the first copy (the look-up, and the reads of a prefix on disk) counts with
  the first layer's load: none of it can be hidden.

Of a sequence that streams through its ring, the loads are driven by the layers, so l is the
time that its copy stream was busy, and c what its layers took, waiting apart, in the same turn.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from overlap_rows import (
    LAYERS,
    NAMESPACE,
    NEW_TOKENS,
    SPEC,
    make_row,
    pages_of,
    percentages,
    prompt_of,
    push_out,
    same_bits,
    states,
    token_ids,
    write_prefix,
)

from tierkv import Store
from tierkv.control_plane.pipeline import no_overlap, optimum
from tierkv.devices.cpu import CpuDevice

SOURCES = ("host", "disk", "disk_gated", "ring")
RATIOS = (0.5, 1.0, 2.0)
LOOKING_S = 3e-4  # between two looks at what has arrived


class Layer:
    """What stands for a layer's computation: products of matrices, about so many seconds."""

    def __init__(self, seconds: float, width: int = 192) -> None:
        made = torch.Generator().manual_seed(0)
        self._a, self._b = torch.randn(2, width, width, generator=made) / width**0.5
        self._out = torch.empty(width, width)
        self._times = 1
        self.new = [states(LAYERS + layer, NEW_TOKENS) for layer in range(LAYERS)]
        for _ in range(3):
            self._times = max(1, round(self._times * seconds / self._fastest()))

    def compute(self) -> float:
        """Compute one layer; return the seconds."""
        started = time.perf_counter()
        for _ in range(self._times):
            torch.mm(self._a, self._b, out=self._out)
        return time.perf_counter() - started

    def _fastest(self) -> float:
        return min(self.compute() for _ in range(9))


@dataclass
class Samples:
    """What the rounds of one setting gave."""

    ttft: list[float] = field(default_factory=list)
    in_turn: list[float] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)
    computes: list[list[float]] = field(default_factory=list)

    def row(self, source: str, tokens: int, ratio: float) -> dict:
        """Return medians, and how the hidden share of single rounds spreads."""
        loads, computes = by_layer(self.loads), by_layer(self.computes)
        shares = [
            percentages(ttft, optimum(ls, cs), no_overlap(ls, cs))[1]
            for ttft, ls, cs in zip(self.ttft, self.loads, self.computes, strict=True)
        ]
        return make_row(
            "cpu",
            source,
            tokens,
            statistics.median(self.ttft),
            loads,
            computes,
            asked_ratio=ratio,
            rounds=len(self.ttft),
            in_turn_s=statistics.median(self.in_turn) if self.in_turn else None,
            hidden_median=statistics.median(shares),
            hidden_min=min(shares),
            hidden_max=max(shares),
        )


def by_layer(rounds: list[list[float]]) -> list[float]:
    """Return the median of each layer's times."""
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def run(settings, folder: Path, *, layer_s: float, rounds: int):
    """Yield a row for each (source, tokens, ratio)."""
    layer = Layer(layer_s)
    for number, (source, tokens, ratio) in enumerate(settings):
        yield measure(source, tokens, ratio, layer, folder / str(number), rounds)


def measure(source: str, tokens: int, ratio: float, layer: Layer, path: Path, rounds: int) -> dict:
    """Return the row of one setting; a first round warms up and checks the bytes."""
    on_disk, prefix = source.startswith("disk"), token_ids(tokens)
    seconds = LAYERS * statistics.median(layer.compute() for _ in range(LAYERS))
    rate = -(-tokens // SPEC.groups[0].page_tokens) * SPEC.slot_bytes / (ratio * seconds)
    samples = Samples()
    if on_disk:
        with opened(CpuDevice(), tokens, path) as store:
            write_prefix(store, prefix)
            assert store.flush().ok
        for number in range(rounds + 1):
            for kind in kinds(source, number):
                with opened(CpuDevice(bandwidth=rate), tokens, path) as store:
                    one(kind, store, source, prefix, layer, samples, first=not number)
        return samples.row(source, tokens, ratio)
    device = CpuDevice(bandwidth=rate)
    with opened(device, tokens, None) as store:
        write_prefix(store, prefix)
        for number in range(rounds + 1):
            for kind in kinds(source, number):
                push_out(store)
                one(kind, store, source, prefix, layer, samples, first=not number)
        store.check()
    return samples.row(source, tokens, ratio)


def kinds(source: str, number: int) -> list[str]:
    """Return what a round measures, beginning with another one each time."""
    names = ["ring"] if source == "ring" else ["overlapped", "in turn", "side by side"]
    at = number % len(names)
    return names[at:] + names[:at]


def one(kind: str, store, source: str, prefix, layer: Layer, samples: Samples, *, first: bool):
    """Measure one turn; the first round's are not kept."""
    into = Samples() if first else samples
    given = {"restartable": True} if source == "disk_gated" else {}
    if source == "ring":
        given = {"device_pages": pages_of(len(prefix)) // 2}
    load = store._core.device.stream("load")  # the device is the benchmark's own
    before, started = load.traffic().seconds, time.perf_counter()
    with store.begin(prompt_of(prefix), **given) as sequence:
        tier = {"disk_gated": "disk", "ring": "host"}.get(source, source)
        assert getattr(sequence.found, tier) == len(prefix), sequence.found
        if kind == "side by side":
            with store.begin(token_ids(NEW_TOKENS, seed=3)) as other:
                loads, computes = side_by_side(sequence, other, layer, started)
            into.loads.append(loads)
            into.computes.append(computes)
            return
        if kind == "in turn":
            sequence.gate.await_all()
        computes = forward(sequence, layer, len(prefix) if first else None)
        ttft = time.perf_counter() - started
        (into.in_turn if kind == "in turn" else into.ttft).append(ttft)
        if kind == "ring":
            into.loads.append([(load.traffic().seconds - before) / LAYERS] * LAYERS)
            into.computes.append(computes)


def forward(sequence, layer: Layer, check: int | None = None) -> list[float]:
    """Run the layers through the gate; return what each took, its waiting apart.

    Args:
        sequence: just begun.
        layer: what computes.
        check: how many tokens of known bytes each layer must hold; None to look at none.
    """
    seconds = []
    for number in range(LAYERS):
        with sequence.gate.layer(number) as view:
            if check is not None:
                assert same_bits(view.read(), states(number, check)), f"layer {number}"
            started = time.perf_counter()
            view.append(*layer.new[number])
            layer.compute()
            seconds.append(time.perf_counter() - started)
    return seconds


def side_by_side(sequence, other, layer: Layer, started: float) -> tuple[list[float], list[float]]:
    """Return each layer's load of one sequence, and computation of another meanwhile."""
    arrivals: list[float] = []

    def watch() -> None:
        for number in range(LAYERS):
            while not sequence.gate.arrived(number):
                time.sleep(LOOKING_S)
            arrivals.append(time.perf_counter() - started)

    watcher = threading.Thread(target=watch)
    watcher.start()
    computes = forward(other, layer)
    watcher.join(60.0)
    assert len(arrivals) == LAYERS, "layers did not arrive"
    loads = [now - before for before, now in zip([0.0, *arrivals], arrivals, strict=False)]
    return loads, computes


@contextmanager
def opened(device: CpuDevice, tokens: int, path: Path | None):
    """Open a store in whose tiers the prefix fits, its memory taken at once."""
    slots = pages_of(tokens) + 4
    with Store.open(
        path,
        SPEC,
        NAMESPACE,
        device=slots * SPEC.slot_bytes,
        host=max(8, 2 * slots) * SPEC.slot_bytes,
        disk=None if path is None else 2 * slots * (SPEC.slot_bytes + 4096),
        torch_device=device,
        prefault=True,
    ) as store:
        yield store
