"""The multi-turn workload without a model: made-up states of any geometry, at full speed.

Every turn goes through ``Store.begin``, the gate and ``finish`` as a model's would; the states
are slices of one random tensor, at an offset that conversation and layer decide.  The time to
the first token is the time until every layer's found state is in the pool, computing apart.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from multi_turn_schedule import Workload, WorkloadError
from multi_turn_tiers import TIER_METHODS, Served, TierSide, found_by_tier

from tierkv import CacheSpec, GroupKind, LayerGroup, Namespace, Store
from tierkv.identity.page_size import GroupSize, choose_page_tokens
from tierkv.identity.spec import DTYPE_BYTES, kv_components

PRESETS = {
    "llama-3-8b": "32,8,128,bfloat16",
    "llama-3-70b": "80,8,128,bfloat16",
    "smollm2-135m": "30,3,64,float32",
    "tiny": "2,2,32,float32",
}
_PIECE = 2048  # tokens appended at once
_OFFSETS = 4096  # how many different slices there are


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Full-attention layers, all alike."""

    layers: int
    heads: int
    dim: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """Return the geometry of a preset's name, or of ``layers,heads,dim,dtype``."""
        parts = PRESETS.get(text, text).split(",")
        try:
            layers, heads, dim = (int(part) for part in parts[:3])
            (dtype,) = parts[3:]
        except ValueError:
            raise WorkloadError(
                f"geometry {text!r}: write layers,heads,dim,dtype such as "
                f"{PRESETS['llama-3-8b']}, or one of {', '.join(PRESETS)}"
            ) from None
        if min(layers, heads, dim) < 1 or dtype not in ("float32", "bfloat16", "float16"):
            raise WorkloadError(
                f"geometry {text!r}: layers, heads and dim must be positive, and dtype float32, "
                "bfloat16 or float16"
            )
        return cls(layers=layers, heads=heads, dim=dim, dtype=dtype)

    def spec(self, page_tokens: int | None = None) -> CacheSpec:
        """Return the spec, with automatic page sizes unless told."""
        row = 2 * self.heads * self.dim * DTYPE_BYTES[self.dtype]
        size = GroupSize(name="full", layers=self.layers, row_bytes=row)
        group = LayerGroup(
            name="full",
            kind=GroupKind.FULL,
            layers=tuple(range(self.layers)),
            components=kv_components(self.heads, self.dim),
            dtype=self.dtype,
            page_tokens=page_tokens or choose_page_tokens([size])["full"],
        )
        return CacheSpec(groups=(group,))


class Synthetic:
    """One tierkv method over one store of made-up states."""

    def __init__(
        self,
        name: str,
        spec: CacheSpec,
        workload: Workload,
        path: Path | None,
        *,
        verify_layers: int = 1,
        **options: Any,
    ) -> None:
        self.name, self.tier = name, TIER_METHODS[name]
        self.verified_bytes = 0
        self.appended_tokens = 0
        self._spec = spec
        self._shared = workload.shared_document
        self._verify_layers = verify_layers
        self._pick = random.Random(workload.seed)
        group = spec.groups[0]
        heads, dim = group.components[0].heads, group.components[0].dim
        draw = torch.Generator().manual_seed(workload.seed)
        rows = workload.longest + _OFFSETS
        # Rows of one token hold all heads, as pages do, so that appending copies long runs.
        self._base = (
            torch.rand((rows, heads, dim), generator=draw)
            .to(getattr(torch, group.dtype))
            .transpose(0, 1)
        )
        namespace = Namespace.build(spec, weights="synthetic")

        def open_() -> Any:
            store = Store.open(path, spec, namespace, prefault=True, **options)
            return SimpleNamespace(store=store, close=store.close)

        self.side = TierSide(name, path, open_)
        self._ends: dict[int, int] = {}

    def begin_round(self, number: int) -> None:
        """Restart, where the method is about that."""
        self.side.begin_round(number)

    def serve(self, client: int, prompt: list[int], count: int) -> Served:
        """Find and load, check some of it, append the rest of the turn, commit."""
        tokens = prompt + self.answer(client, len(prompt), count)
        started = time.perf_counter()
        sequence = self.side.store.begin(prompt, max_new_tokens=count)
        with sequence:
            for layer in range(len(self._spec.layer_to_group)):
                with sequence.gate.layer(layer):
                    pass
            served = Served(ttft_s=time.perf_counter() - started, found=found_by_tier(sequence))
            self._verify(client, sequence)
            end = len(tokens) - 1  # the last token generated is never fed
            begun = time.perf_counter()
            self._append(client, sequence, end)
            served.rest_s = time.perf_counter() - begun
            begun = time.perf_counter()
            report = sequence.finish(tokens)
        known = self._ends.get(client, self._shared if self._ends else 0)
        before = min(known, sum(served.found.values()))
        served.written = self.side.keep(report, before, end)
        served.keep_s = time.perf_counter() - begun
        self._ends[client] = end
        served.tokens = tokens[len(prompt) :]
        return served

    def answer(self, client: int, at: int, count: int) -> list[int]:
        """Return made-up generated ids."""
        return [(client * 31 + at + n) % 997 for n in range(count)]

    def held(self) -> dict[str, int]:
        """Return the bytes in use in each tier."""
        return self.side.held()

    def close(self) -> None:
        """Check and close the store."""
        self.side.close()

    def _append(self, client: int, sequence: Any, end: int) -> None:
        at = sequence.length
        self.appended_tokens += end - at
        while at < end:
            stop = min(end, at + _PIECE, self._shared if at < self._shared else end)
            for layer in range(len(self._spec.layer_to_group)):
                with sequence.gate.layer(layer) as view:
                    view.append(*self._states(client, layer, at, stop))
            at = stop

    def _states(self, client: int, layer: int, at: int, stop: int) -> list[torch.Tensor]:
        """Return K and V, ``[heads, tokens, dim]``, of tokens on one side of the document's end."""
        owner = 0 if at < self._shared else client + 1
        starts = [(owner * 613 + layer * 37 + part * 17) % _OFFSETS for part in (0, 1)]
        return [self._base[:, start + at : start + stop] for start in starts]

    def _verify(self, client: int, sequence: Any) -> None:
        """Compare the found state of some layers with what was appended, bit by bit."""
        found = sequence.length
        layers = len(self._spec.layer_to_group)
        chosen = self._pick.sample(range(layers), min(self._verify_layers, layers)) if found else ()
        cuts = sorted({0, min(self._shared, found), found})
        for layer in chosen:
            with sequence.gate.layer(layer) as view:
                held = view.read()
            for at, stop in pairwise(cuts):
                for part, right in zip(held, self._states(client, layer, at, stop), strict=True):
                    same = torch.equal(part[:, at:stop], right)
                    assert same, f"{self.name}: client {client}, layer {layer}: wrong bytes"
                    self.verified_bytes += right.nbytes
