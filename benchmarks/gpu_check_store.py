"""The store's essentials on the device: turns through all tiers, and a ring, byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from gpu_check_support import Check, same_bits

from tierkv import CacheSpec, GroupKind, LayerGroup, Namespace, Store
from tierkv.identity.spec import kv_components

LAYERS, HEADS, DIM, WINDOW = 8, 2, 64, 48


def spec(dtype: str) -> CacheSpec:
    """Return full and sliding layers whose pages have equal bytes."""
    half = LAYERS // 2
    full = LayerGroup(
        name="full",
        kind=GroupKind.FULL,
        layers=tuple(range(half)),
        components=kv_components(HEADS, DIM),
        dtype=dtype,
        page_tokens=32,
    )
    sliding = LayerGroup(
        name="sliding",
        kind=GroupKind.SLIDING,
        layers=tuple(range(half, LAYERS)),
        components=kv_components(HEADS, DIM),
        dtype=dtype,
        page_tokens=32,
        window=WINDOW,
    )
    return CacheSpec(groups=(full, sliding))


def run(check: Check) -> None:
    """Go through the tiers, then stream a sequence that the pool cannot hold."""
    for dtype in ("bfloat16", "float32"):
        with check.guarded(f"turns in {dtype}"), tempfile.TemporaryDirectory() as folder:
            turns(check, spec(dtype), Path(folder))
    with check.guarded("a sequence longer than the pool"):
        longer_than_the_pool(check)


def states(check: Check, group: LayerGroup, layer: int, ids, start: int, stop: int):
    """Return K and V ``[heads, stop - start, dim]``: a function of layer, position and id."""
    at = torch.arange(start, stop).view(1, -1, 1)
    token = torch.as_tensor(ids[start:stop]).view(1, -1, 1)
    head, dim = torch.arange(HEADS).view(-1, 1, 1), torch.arange(DIM).view(1, 1, -1)
    made = []
    for component in range(2):
        bits = (
            token * 7919 + at * 104729 + head * 31 + dim * 613 + layer * 2741 + component
        ) % 4093
        made.append((bits.float() / 256 - 8).to(getattr(torch, group.dtype)).to(check.device))
    return made


def feed(check: Check, sequence, ids, stop: int) -> None:
    """Append tokens up to ``stop`` to every layer, as a model would, checking what is held."""
    start = sequence.length
    for layer, number in sorted(sequence.spec.layer_to_group.items()):
        group = sequence.spec.groups[number]
        with sequence.gate.layer(layer) as view:
            first = group.first_needed(start)
            held = states(check, group, layer, ids, first, start)
            for got, want in zip(view.read(), held, strict=True):
                assert same_bits(got, want), f"layer {layer} holds wrong bytes"
            view.append(*states(check, group, layer, ids, start, stop))


def open_store(check: Check, cache: CacheSpec, folder: Path | None, pages: int) -> Store:
    """Open a store with a pool of so many pages."""
    return Store.open(
        folder,
        cache,
        Namespace.build(cache, weights="gpu check"),
        device=pages * cache.slot_bytes,
        host=2 * pages * cache.slot_bytes,
        disk=None if folder is None else 4 * pages * (cache.slot_bytes + 4096),
        torch_device=check.device,
    )


def turns(check: Check, cache: CacheSpec, folder: Path) -> None:
    """Run turns whose prefix lies in the pool, in host memory, and on disk."""
    tokens, pages = 300, 40
    ids = np.random.default_rng(0).integers(0, 1000, 2 * tokens)
    others = np.random.default_rng(1).integers(0, 1000, pages * 16)
    name = cache.groups[0].dtype
    with open_store(check, cache, folder / "store", pages) as store:
        found = []
        for stop in (tokens, tokens + 40, tokens + 75):
            with store.begin(ids[:stop]) as sequence:
                found.append(sequence.found)
                feed(check, sequence, ids, stop)
                sequence.finish(ids[:stop])
            store.check()
        assert [f.total for f in found] == [0, tokens, tokens + 40], found
        check.row(f"turns from the pool, {name}", ok=found[1].device == tokens)
        with store.begin(others) as sequence:  # takes the pool
            feed(check, sequence, others, len(others))
        with store.begin(ids[: tokens + 100]) as sequence:
            feed(check, sequence, ids, tokens + 100)
            check.row(f"turn from host memory, {name}", ok=sequence.found.host > 0)
            other = sequence.fork()
            feed(check, sequence, ids, tokens + 120)
            feed(check, other, ids, tokens + 110)
            other.abandon()
            sequence.finish(ids[: tokens + 120])
        check.row(f"a fork beside it, {name}", ok=True)
        assert store.flush().ok
        store.check()
    with open_store(check, cache, folder / "store", pages) as store:
        with store.begin(ids[: tokens + 130]) as sequence:
            feed(check, sequence, ids, tokens + 130)
            found = sequence.found
        check.row(f"turn from disk, {name}", ok=found.disk == tokens + 120)
        store.check()


def longer_than_the_pool(check: Check) -> None:
    """Let pages stream through the ring at every step; the bytes are those that were written."""
    full = spec("bfloat16").groups[0]
    cache = CacheSpec(groups=(full,))
    pages, tokens = 12, 20 * full.page_tokens
    ids = np.random.default_rng(2).integers(0, 1000, tokens + 8)
    with open_store(check, cache, None, pages) as store:
        with store.begin(ids[:tokens], max_new_tokens=8) as sequence:
            for stop in (tokens // 2, tokens, *range(tokens + 1, tokens + 9)):
                feed(check, sequence, ids, stop)
            assert sequence.spilled_pages, "everything fitted"
            sequence.finish(ids)
        store.check()
        with store.begin(ids) as sequence:
            feed(check, sequence, ids, len(ids))
            check.row("a sequence longer than the pool", ok=sequence.found.total == len(ids) - 1)
        store.check()
