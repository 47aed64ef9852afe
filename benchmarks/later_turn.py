"""Time to first token of a later turn, against load + compute of what the cache did not hold.

A real model has computed a long prefix; the next turn adds a few tokens.  Measured, in turn
in each round of one run: the turn through tierkv with the prefix in each tier, and the limit:
the same forward pass on a DynamicCache that holds the prefix already, plus the time to move
the prefix's bytes at the bandwidth of a plain copy (host) or of plain reads (disk).

    python benchmarks/later_turn.py --model smollm2 --prefix 2048 --new 64 --rounds 9
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from tierkv import Tier
from tierkv.integrations.models import load_model
from tierkv.integrations.transformers import TierKV

TIERS = ("disk", "device", "host")  # the order in which a round visits them


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        rows = run(options, Path(directory))
    print(f"{options.model} {options.dtype}, prefix {options.prefix}, {options.new} new tokens")
    print(f"{'tier':8}{'ttft s':>9}{'compute s':>11}{'load s':>9}{'ttft / (load + compute)':>25}")
    for row in rows:
        print(
            f"{row['tier']:8}{row['ttft_s']:9.3f}{row['compute_s']:11.3f}{row['load_s']:9.4f}"
            f"{row['ratio']:10.3f}  [{row['ratio_min']:.3f} .. {row['ratio_max']:.3f}]"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def run(options: argparse.Namespace, directory: Path) -> list[dict]:
    """Return one row a tier."""
    model, _ = load_model(options.model, dtype=options.dtype)
    generator = np.random.default_rng(0)
    ids = generator.integers(10, model.config.get_text_config().vocab_size, options.prefix)
    turn = [*ids.tolist(), *generator.integers(10, 1000, options.new).tolist()]
    held = prefill(model, ids.tolist(), directory)
    samples: dict[str, list[tuple[float, float, float]]] = {tier: [] for tier in TIERS}
    for number in range(options.rounds + 1):
        with attach(model, directory, len(turn)) as kv:
            for tier in TIERS:
                if tier == "host":
                    push_out(kv)
                compute = measure_compute(model, held, turn, options.prefix)
                ttft, size = measure_turn(model, kv, turn, tier, options.prefix)
                if number:  # the first round warms up
                    samples[tier].append((ttft, compute, measure_load(kv, tier, size, directory)))
    return [summary(tier, samples[tier]) for tier in ("device", "host", "disk")]


def attach(model, directory: Path, tokens: int) -> TierKV:
    """Open the store with a device pool that holds one sequence and little more."""
    return TierKV.attach(
        model,
        directory / "store",
        device=pool_bytes(model, tokens),
        host="512MiB",
        disk="2GiB",
        weights_id="benchmark",
        prefault=True,
        self_check=False,
    )


def pool_bytes(model, tokens: int) -> int:
    """Return the bytes of a pool for one sequence of so many tokens."""
    from tierkv import CacheSpec

    spec = CacheSpec.from_config(model.config, dtype=str(model.dtype).removeprefix("torch."))
    return (spec.pages_for(tokens) + 4 * len(spec.groups)) * spec.slot_bytes


@torch.no_grad()
def prefill(model, ids: list[int], directory: Path) -> DynamicCache:
    """Compute the prefix once: into the store, and into a cache that stays in memory."""
    held = DynamicCache(config=model.config)
    model(torch.tensor([ids]), past_key_values=held, use_cache=True)
    with attach(model, directory, len(ids) + 128) as kv:
        with kv.cache(ids) as cache:
            model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        assert kv.store.flush().ok
    return held


@torch.no_grad()
def measure_compute(model, held: DynamicCache, turn: list[int], prefix: int) -> float:
    """Return the time of the forward pass on a cache that holds the prefix."""
    cache = copy.deepcopy(held)
    start = time.perf_counter()
    logits = model(torch.tensor([turn[prefix:]]), past_key_values=cache, use_cache=True).logits
    int(logits[0, -1].argmax())
    return time.perf_counter() - start


@torch.no_grad()
def measure_turn(model, kv: TierKV, turn: list[int], tier: str, prefix: int) -> tuple[float, int]:
    """Return the time to the first token through tierkv, and the bytes that were loaded."""
    start = time.perf_counter()
    cache = kv.cache(turn)
    rest = torch.tensor([turn[cache.found.total :]])
    int(model(rest, past_key_values=cache, use_cache=True).logits[0, -1].argmax())
    ttft = time.perf_counter() - start
    found = {name: getattr(cache.found, name) for name in ("device", "host", "disk")}
    assert found[tier] == prefix, f"expected the prefix in {tier}, found {found}"
    cache.abandon()
    spec = kv.store.spec
    size = sum(len(g.needed_pages(prefix)) * g.page_bytes for g in spec.groups)
    return ttft, 0 if tier == "device" else size


def measure_load(kv: TierKV, tier: str, size: int, directory: Path) -> float:
    """Return the time that a plain copy (and read) of so many bytes takes."""
    if tier == "device":
        return 0.0
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    target[:] = 0
    start = time.perf_counter()
    np.copyto(target, source)
    copied = time.perf_counter() - start
    return copied + (read_disk(directory, size) if tier == "disk" else 0.0)


def read_disk(directory: Path, size: int) -> float:
    """Return the time to read so many bytes of the store's slabs with plain O_DIRECT reads."""
    import mmap
    import os

    slab = sorted((directory / "store" / "slabs").iterdir())[0]
    buffer = mmap.mmap(-1, 4 << 20)
    memoryview(buffer)[::4096] = bytes(len(range(0, 4 << 20, 4096)))
    descriptor = os.open(slab, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    try:
        start, at, left = time.perf_counter(), 0, size
        while left > 0:
            count = os.preadv(descriptor, [buffer], at)
            if not count:
                at = 0
                continue
            at, left = at + count, left - count
        return time.perf_counter() - start
    finally:
        os.close(descriptor)


def push_out(kv: TierKV) -> None:
    """Make the device pool give its pages to the host tier."""
    spec, slots = kv.store.spec, kv.store.stats().tiers[Tier.DEVICE.label].capacity_pages
    page = spec.groups[spec.anchor].page_tokens
    most = max(n for n in range(page, (slots + 1) * page, page) if spec.pages_for(n) <= slots)
    kv.store.begin(np.random.default_rng(1).integers(0, 2**31, most)).abandon()


def summary(tier: str, samples: list[tuple[float, float, float]]) -> dict:
    """Return the medians of a tier's rounds."""
    ratios = [ttft / (load + compute) for ttft, compute, load in samples]
    ttfts, computes, loads = zip(*samples, strict=True)
    return {
        "tier": tier,
        "ttft_s": statistics.median(ttfts),
        "compute_s": statistics.median(computes),
        "load_s": statistics.median(loads),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


if __name__ == "__main__":
    main()
