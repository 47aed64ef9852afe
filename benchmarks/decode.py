"""A decode step over pages in place, against a DynamicCache with stock attention.

One run, one model, one thread.  In each round the same token is fed four times, in an order
that rotates: to a DynamicCache with ``sdpa``, to another one (what a limit gives against
itself), to a tierkv cache whose attention reads the pages (``tierkv``), and to one that
gathers the history for ``sdpa``.  Printed are medians of the paired ratios of CPU time, which
other programs on the machine disturb least; the file has them divided by the ratio of the two
stock caches too.

    python benchmarks/decode.py --tokens 1024 4096 --json benchmarks/results/decode.json
    python benchmarks/decode.py --quick
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from tierkv import CacheSpec
from tierkv.integrations.models import load_model
from tierkv.integrations.transformers import TierKV
from tierkv.integrations.transformers.versions import cache_keyword

METHODS = {"stock": "sdpa", "again": "sdpa", "in_place": "tierkv", "gather": "sdpa"}


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="15 rounds at 1,024 tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = [1024], 15
    torch.set_num_threads(options.threads)
    model, _ = load_model(options.model, dtype=options.dtype)
    rows = []
    print(f"{options.model} {options.dtype}, {options.threads} thread(s), {options.rounds} rounds")
    print(
        f"{'tokens':>7}{'stock ms':>10}{'in place ms':>13}{'gather ms':>11}{'stock/stock':>13}"
        f"{'in place/stock':>16}{'gather/stock':>14}{'logits differ by':>18}"
    )
    for tokens in options.tokens:
        row = measure(model, tokens, options.rounds)
        rows.append({"model": options.model, "dtype": options.dtype, **row})
        print(
            f"{tokens:7}{row['stock_ms']:10.1f}{row['in_place_ms']:13.1f}{row['gather_ms']:11.1f}"
            f"{row['aa_ratio']:13.3f}{row['in_place_ratio']:16.3f}{row['gather_ratio']:14.3f}"
            f"{row['max_logit_difference']:18.1e}"
        )
    if options.json:
        found = {"threads": options.threads, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


@torch.no_grad()
def measure(model, tokens: int, rounds: int) -> dict:
    """Return the medians at a prefix of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (tokens + 1,), generator=generator).tolist()
    model.set_attn_implementation("tierkv")
    size = pool_bytes(model, tokens + rounds + 64)
    with TierKV.attach(model, device=size, host=None, weights_id="benchmark") as kv:
        stock = prefill(model, kv, ids[:tokens])
        caches = {"stock": stock, "again": copy.deepcopy(stock)}
        caches |= {name: kv.cache(ids, rounds + 8) for name in ("in_place", "gather")}
        assert caches["gather"].found.device == tokens
        times: dict[str, list[float]] = {name: [] for name in METHODS}
        differences, token = [], ids[-1]
        for number in range(rounds + 2):
            logits = {}
            for name in rotated(list(METHODS), number):
                model.set_attn_implementation(METHODS[name])
                seconds, logits[name] = step(model, caches[name], token)
                if number >= 2:  # the first rounds warm up
                    times[name].append(seconds)
            differences.append(float((logits["in_place"] - logits["stock"]).abs().max()))
            assert torch.equal(logits["stock"], logits["again"])
            token = int(logits["stock"].argmax())
        for name in ("in_place", "gather"):
            caches[name].abandon()
        kv.check()
    return summary(tokens, times, max(differences))


def pool_bytes(model, tokens: int) -> int:
    """Return the bytes of a pool for one sequence and the own pages of two."""
    spec = CacheSpec.from_config(model.config, dtype=str(model.dtype).removeprefix("torch."))
    return (spec.pages_for(tokens) + 8 * len(spec.groups)) * spec.slot_bytes


def prefill(model, kv: TierKV, ids: list[int]) -> DynamicCache:
    """Compute a prefix into the store's pages; return a stock cache with the same state."""
    stock, keyword = DynamicCache(config=model.config), cache_keyword(model)
    with kv.cache(ids) as cache:
        for start in range(0, len(ids), 1024):
            part = torch.tensor([ids[start : start + 1024]])
            model(part, **{keyword: cache}, use_cache=True, logits_to_keep=1)
        for number, layer in enumerate(stock.layers):
            with cache.sequence.gate.layer(number) as view:
                layer.update(*(state.unsqueeze(0) for state in view.read()))
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = len(ids)
    return stock


def step(model, cache, token: int) -> tuple[float, torch.Tensor]:
    """Feed one token; return the CPU seconds and the logits."""
    given = {cache_keyword(model): cache, "input_ids": torch.tensor([[token]])}
    start = time.process_time()
    logits = model(**given, use_cache=True).logits[0, -1]
    return time.process_time() - start, logits


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names beginning with another one each time."""
    at = number % len(names)
    return names[at:] + names[:at]


def summary(tokens: int, times: dict[str, list[float]], difference: float) -> dict:
    """Return medians of times in ms, and of ratios to the stock step of the same round."""
    ratio = {
        name: statistics.median(a / b for a, b in zip(taken, times["stock"], strict=True))
        for name, taken in times.items()
    }
    return {
        "tokens": tokens,
        **{f"{name}_ms": 1e3 * statistics.median(times[name]) for name in times},
        "aa_ratio": ratio["again"],
        "in_place_ratio": ratio["in_place"],
        "gather_ratio": ratio["gather"],
        "in_place_by_aa": ratio["in_place"] / ratio["again"],
        "gather_by_aa": ratio["gather"] / ratio["again"],
        "max_logit_difference": difference,
    }


if __name__ == "__main__":
    main()
