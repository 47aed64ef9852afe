"""Overlap of copies and computation on the device: a decoder of real shape through the store.

Each layer does what a layer of Llama-3.1-8B does for 256 new tokens: projections, attention
over the pages of its history through the gate, the feed-forward part.  (All layers share one
layer's weights: what they are does not matter.)  Measured for a prefix in host memory:

* ``l``: the time that the copy stream was busy, by the device's clock, while another sequence
  of the same length, which lies in the pool, is computed;
* ``c``: what that sequence's layers took meanwhile, by the device's clock;
* the time from the begin of a turn to the end of its last layer, overlapped, and with all
  layers waited for before the first is computed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from gpu_check_support import LONG_S, Check
from overlap_rows import make_row
from torch.nn.functional import silu

from tierkv import CacheSpec, GroupKind, LayerGroup, Namespace, Store
from tierkv.identity.spec import kv_components
from tierkv.kernels.paged_prefill import paged_prefill

GOAL = 0.9  # of the optimum


@dataclass(frozen=True)
class Sizes:
    """A decoder's shape."""

    layers: int = 16
    hidden: int = 4096
    inner: int = 14336
    heads: int = 8
    group: int = 4
    dim: int = 128
    page_tokens: int = 32
    new: int = 256
    lengths: tuple[int, ...] = (4096, 16384, 32768)
    rounds: int = 5

    @property
    def spec(self) -> CacheSpec:
        """The store's view of it."""
        group = LayerGroup(
            name="full",
            kind=GroupKind.FULL,
            layers=tuple(range(self.layers)),
            components=kv_components(self.heads, self.dim),
            dtype="bfloat16",
            page_tokens=self.page_tokens,
        )
        return CacheSpec(groups=(group,))


SMALL = Sizes(4, 64, 128, 2, 2, 16, 32, new=16, lengths=(256,), rounds=1)


class Layer:
    """One layer's weights, and its forward pass over pages."""

    def __init__(self, check: Check, sizes: Sizes) -> None:
        self._sizes, self._check = sizes, check
        width = sizes.heads * sizes.group * sizes.dim

        def weight(rows: int, columns: int, seed: int) -> torch.Tensor:
            made = check.random(rows, columns, dtype=torch.bfloat16, seed=seed)
            return made.div_(rows**0.5)

        hidden, keys = sizes.hidden, sizes.heads * sizes.dim
        self._q, self._k = weight(hidden, width, 1), weight(hidden, keys, 2)
        self._v, self._o = weight(hidden, keys, 3), weight(width, hidden, 4)
        self._gate, self._up = weight(hidden, sizes.inner, 5), weight(hidden, sizes.inner, 6)
        self._down = weight(sizes.inner, hidden, 7)

    def forward(self, x: torch.Tensor, view) -> torch.Tensor:
        """Return the layer's output for new tokens ``[tokens, hidden]``, inside the gate."""
        sizes, count = self._sizes, x.shape[0]
        x = x / x.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()
        k, v = (
            (x @ w).view(count, sizes.heads, sizes.dim).transpose(0, 1) for w in (self._k, self._v)
        )
        view.append(k, v)
        q = (x @ self._q).view(1, count, sizes.heads * sizes.group, sizes.dim)
        attended = paged_prefill(
            q,
            view.memory,
            view.page_table(count).unsqueeze(0),
            torch.full((1,), view.length, dtype=torch.int32, device=x.device),
            v_offset=view.component_offsets[1],
            page_tokens=sizes.page_tokens,
            kv_heads=sizes.heads,
            scale=sizes.dim**-0.5,
        )
        x = x + attended.view(count, -1) @ self._o
        return x + (silu(x @ self._gate) * (x @ self._up)) @ self._down


def run(check: Check) -> None:
    """Measure every length."""
    sizes = SMALL if check.small else Sizes()
    layer = Layer(check, sizes)
    with torch.no_grad():
        for tokens in sizes.lengths:
            label = f"turn over {tokens} tokens in host memory"
            with check.guarded(label):
                measure(check, sizes, layer, tokens, label)


def measure(check: Check, sizes: Sizes, layer: Layer, tokens: int, label: str) -> None:
    """Measure one length."""
    bench = Bench(check, sizes, layer, tokens)
    try:
        loads, computes, overlapped, in_turn = [], [], [], []
        for number in range(sizes.rounds + 1):
            ls, cs = bench.side_by_side()
            with_overlap, without = bench.turn(wait=False), bench.turn(wait=True)
            if number:  # the first round compiles and warms up
                loads.append(ls)
                computes.append(cs)
                overlapped.append(with_overlap)
                in_turn.append(without)
        bench.store.check()
    finally:
        bench.close()
    middle = [[statistics.median(x) for x in zip(*many, strict=True)] for many in (loads, computes)]
    row = make_row(check.device, "host", tokens, statistics.median(overlapped), *middle)
    kept = ("tokens", "ttft_s", "optimum_s", "no_overlap_s", "stall_pct", "load_s", "compute_s")
    check.row(
        label,
        row["hidden_pct"],
        "% hidden",
        ratio=row["optimum_s"] / row["ttft_s"],
        goal=GOAL if check.is_cuda else None,
        in_turn_s=statistics.median(in_turn),
        **{key: row[key] for key in kept},
    )


class Bench:
    """A store with one sequence that stays in the pool and a prefix that comes and goes."""

    def __init__(self, check: Check, sizes: Sizes, layer: Layer, tokens: int) -> None:
        self._check, self._sizes, self._layer, self._tokens = check, sizes, layer, tokens
        spec = sizes.spec
        made = np.random.default_rng(tokens)
        self._prefix, self._other = made.integers(0, 1 << 17, (2, tokens))
        self._new = made.integers(0, 1 << 17, sizes.new)
        self._x = check.random(sizes.new, sizes.hidden, dtype=torch.bfloat16, seed=9)
        pages = spec.pages_for(tokens + 2 * sizes.new)
        self._device = check.open_device()
        self.store = Store.open(
            None,
            spec,
            Namespace.build(spec, weights="gpu check"),
            device=(2 * pages + 2) * spec.slot_bytes,
            host=(2 * pages + 16) * spec.slot_bytes,
            torch_device=self._device,
            prefault=True,
        )
        with self.store.begin(self._prefix) as sequence:
            self._fill(sequence)
            sequence.finish(self._prefix)
        self._resident = self.store.begin(self._other)
        self._fill(self._resident)

    def side_by_side(self) -> tuple[list[float], list[float]]:
        """Return the loads and computations of the layers, when neither waits for the other."""
        self._push_out()
        stream = self._device.stream("load")
        before, marks = stream.traffic().seconds, [self._mark()]
        with self.store.begin(self._prompt()):
            for number, x in self._forward(self._resident):
                assert x.shape[0] == self._sizes.new, number
                marks.append(self._mark())
            assert stream.record().wait(LONG_S)
            self._check.sync()
        self._resident.crop(self._tokens)
        loads = (stream.traffic().seconds - before) / self._sizes.layers
        computes = [self._between(a, b) for a, b in pairwise(marks)]
        return [loads] * self._sizes.layers, computes

    def turn(self, *, wait: bool) -> float:
        """Return the time from the begin of a turn to the end of its last layer.

        Args:
            wait: for all layers before the first one is computed.
        """
        self._push_out()
        started = time.perf_counter()
        with self.store.begin(self._prompt()) as sequence:
            assert sequence.found.host == self._tokens, sequence.found
            if wait:
                sequence.gate.await_all()
                self._check.sync()
            for _, x in self._forward(sequence):
                last = x
            self._check.sync()
            seconds = time.perf_counter() - started
            assert bool(last.isfinite().all()), "the forward pass gave no numbers"
        return seconds

    def close(self) -> None:
        """Close the store, and the device with it."""
        self._resident.abandon()
        self.store.close()

    def _prompt(self) -> np.ndarray:
        return np.concatenate([self._prefix, self._new])

    def _forward(self, sequence):
        """Yield each layer's number and output as they are enqueued."""
        x = self._x
        for number in range(self._sizes.layers):
            with sequence.gate.layer(number) as view:
                x = self._layer.forward(x, view)
            yield number, x

    def _fill(self, sequence) -> None:
        """Write the states of a prefix, of any numbers."""
        sizes = self._sizes
        k = self._check.random(sizes.heads, self._tokens, sizes.dim, dtype=torch.bfloat16, seed=8)
        for number in range(sizes.layers):
            with sequence.gate.layer(number) as view:
                view.append(k, k)

    def _push_out(self) -> None:
        """Let the prefix leave the pool, which the other sequence does not."""
        spec, slots = self.store.spec, self.store.stats().tiers["device"].capacity_pages
        left = slots - spec.pages_for(self._tokens)
        ids = np.random.default_rng(3).integers(0, 1 << 17, left * self._sizes.page_tokens)
        self.store.begin(ids).abandon()
        self._check.sync()

    def _mark(self):
        if not self._check.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start, end) -> float:
        return start.elapsed_time(end) / 1e3 if self._check.is_cuda else end - start
