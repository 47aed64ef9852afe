"""What the overlap benchmarks share: the geometry, prefixes whose bytes are known, the rows.

The geometry is that of Llama-3.1-8B (32 layers, 8 KV heads of 128, bfloat16: 131,072 bytes a
token), each head and row narrowed so that a token takes 1,024 real bytes and a page of 1 MiB
holds 1,024 tokens.  The number of layers, of copies, and the sizes that the data plane sees
of a page and of a layer's range in it (1 MiB, 32 KiB) are those of real pages of 8 tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from tierkv import CacheSpec, GroupKind, LayerGroup, Namespace
from tierkv.control_plane.pipeline import no_overlap, optimum
from tierkv.identity.spec import kv_components

LAYERS = 32
TOKEN_BYTES = 131_072  # of the model
PAGE_TOKENS = 1024
NEW_TOKENS = 256

SPEC = CacheSpec(
    groups=(
        LayerGroup(
            name="full",
            kind=GroupKind.FULL,
            layers=tuple(range(LAYERS)),
            components=kv_components(1, 8),
            dtype="bfloat16",
            page_tokens=PAGE_TOKENS,
        ),
    )
)
NAMESPACE = Namespace.build(SPEC, weights="overlap")
BYTE_SCALE = TOKEN_BYTES / SPEC.groups[0].token_bytes  # modelled bytes for each real one


def token_ids(tokens: int, seed: int = 0) -> np.ndarray:
    """Return the ids of a prefix, or of anything else with another seed."""
    return np.random.default_rng(seed).integers(0, 1 << 17, tokens)


def prompt_of(prefix: np.ndarray) -> np.ndarray:
    """Return a prefix and the new tokens that follow it."""
    return np.concatenate([prefix, token_ids(NEW_TOKENS, seed=1)])


def states(layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V ``[1, tokens, 8]`` of a layer: any bits, the same at every call."""
    made = torch.Generator().manual_seed(layer)
    bits = torch.randint(-(1 << 15), 1 << 15, (2, 1, tokens, 8), generator=made, dtype=torch.int16)
    k, v = bits.view(torch.bfloat16)
    return k, v


def same_bits(some, others) -> bool:
    """Return whether tensors of 16-bit numbers hold the same bits, NaN included."""
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(some, others, strict=True)
    )


def pages_of(tokens: int) -> int:
    """Return the pages that a prefix and its new tokens take."""
    return SPEC.pages_for(tokens + NEW_TOKENS)


def write_prefix(store, prefix: np.ndarray) -> None:
    """Compute a prefix into the store's device pool."""
    with store.begin(prefix) as sequence:
        for layer in range(LAYERS):
            with sequence.gate.layer(layer) as view:
                view.append(*states(layer, len(prefix)))
        sequence.finish(prefix)


def push_out(store) -> None:
    """Make the device pool give all its pages to the host tier."""
    slots = store.stats().tiers["device"].capacity_pages
    store.begin(token_ids(slots * PAGE_TOKENS, seed=2)).abandon()


def percentages(ttft_s: float, optimum_s: float, no_overlap_s: float) -> tuple[float, float]:
    """Return what a time is above the optimum, and how much of what can be hidden was, in %."""
    stall = 100 * (ttft_s - optimum_s) / optimum_s
    hideable = no_overlap_s - optimum_s
    some = hideable > 1e-9 * no_overlap_s  # more than what rounding makes of nothing
    hidden = 100 * (no_overlap_s - ttft_s) / hideable if some else 100.0
    return round(stall, 6) + 0.0, round(hidden, 6) + 0.0  # without a sign of zero


def make_row(
    device: str, source: str, tokens: int, ttft_s: float, loads, computes, apart_s=None, **more
) -> dict:
    """Return a row, from the times of a forward and of its layers' loads and computes.

    Args:
        device: which one.
        source: where the prefix came from.
        tokens: of the prefix.
        ttft_s: what the forward took from its begin.
        loads: by layer.
        computes: by layer.
        apart_s: the loads without overlap among themselves, where they pass several lanes.
        more: what else stands in the row.
    """
    best, worst = optimum(loads, computes), no_overlap(loads, computes)
    if apart_s is not None:
        worst += apart_s - sum(loads)
    stall, hidden = percentages(ttft_s, best, worst)
    return {
        "device": device,
        "source": source,
        "tokens": tokens,
        "ttft_s": ttft_s,
        "optimum_s": best,
        "no_overlap_s": worst,
        "stall_pct": stall,
        "hidden_pct": hidden,
        "load_s": sum(loads),
        "compute_s": sum(computes),
        "ratio": sum(loads) / sum(computes),
        **more,
    }


HEADER = (
    f"{'device':7}{'source':12}{'tokens':>8}{'load/comp':>10}{'ttft ms':>10}{'optimum':>10}"
    f"{'no overlap':>12}{'stall %':>9}{'hidden %':>10}"
)


def line(row: dict) -> str:
    """Return a row for the table."""
    spread = f"  [{row['hidden_min']:.0f} .. {row['hidden_max']:.0f}]" if "rounds" in row else ""
    return (
        f"{row['device']:7}{row['source']:12}{row['tokens']:8}{row['ratio']:10.2f}"
        f"{1e3 * row['ttft_s']:10.2f}{1e3 * row['optimum_s']:10.2f}"
        f"{1e3 * row['no_overlap_s']:12.2f}{row['stall_pct']:9.2f}{row['hidden_pct']:10.1f}{spread}"
    )
