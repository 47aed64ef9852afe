"""Paged pools as engines lay them out, and a bench that drives one through its store.

The bytes of a block are a pure function of its page's key, its layer and its place, so what
comes back can be compared with what it must be without remembering anything.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tierkv import CacheSpec, GroupKind, Namespace, OpaqueGroup, Store


def full(layers, *, name="full", block_bytes=512, block_tokens=4, blocks_per_page=2):
    return OpaqueGroup(
        name=name,
        kind=GroupKind.FULL,
        layers=layers,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
    )


def sliding(layers, *, name="sliding", block_bytes=512, block_tokens=4, pages=1, window=10):
    return OpaqueGroup(
        name=name,
        kind=GroupKind.SLIDING,
        layers=layers,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        blocks_per_page=pages,
        window=window,
    )


def snapshots(layers, *, name="state", block_bytes=1000, every=8):
    return OpaqueGroup(
        name=name,
        kind=GroupKind.SNAPSHOT,
        layers=layers,
        block_bytes=block_bytes,
        block_tokens=every,
    )


# -- layouts -----------------------------------------------------------------------------


def kv_apart(blocks):
    """Layer outermost, one K and one V tensor a layer, float16 [blocks, tokens, heads, dim]."""
    return {
        layer: tuple(torch.zeros(blocks, 4, 2, 16, dtype=torch.float16) for _ in "kv")
        for layer in range(3)
    }


def kv_in_one(blocks):
    """One tensor [2, layers, blocks, ...] for everything."""
    kv = torch.zeros(2, 3, blocks, 4, 2, 16, dtype=torch.float16)
    return {layer: (kv[0, layer], kv[1, layer]) for layer in range(3)}


def block_first(blocks):
    """Block outermost: all layers of a block are one run."""
    pool = torch.zeros(blocks, 3, 512, dtype=torch.uint8)
    return {layer: pool[:, layer] for layer in range(3)}


def padded(blocks):
    """Blocks a little larger than what they hold."""
    return {
        layer: torch.zeros(blocks, 576, dtype=torch.int8).narrow(1, 0, 512) for layer in range(3)
    }


def heads_first(blocks):
    """Heads outermost: the inside of a block is strided."""
    return {
        layer: torch.zeros(2, blocks, 4, 32, dtype=torch.float16).permute(1, 0, 2, 3)
        for layer in range(3)
    }


def hybrid(blocks):
    """Full and sliding layers in tensors of their own, groups of unequal page sizes."""
    return {layer: torch.zeros(blocks, 256, dtype=torch.bfloat16) for layer in range(4)}


def overlaid(blocks):
    """Layer i of each group lies in the same bytes; a block belongs to one group at a time."""
    first, second = (torch.zeros(blocks, 256, dtype=torch.bfloat16) for _ in range(2))
    return {0: first, 1: first, 2: second, 3: second}


def with_states(blocks):
    """Attention blocks beside recurrent states, the states padded."""
    attention = torch.zeros(blocks, 512, dtype=torch.uint8)
    states = [torch.zeros(blocks, 1024, dtype=torch.int8).narrow(1, 0, 1000) for _ in range(2)]
    return {0: attention, 1: states[0], 2: states[1]}


@dataclass(frozen=True)
class EngineCase:
    """A pool in some layout: what a store must be told of it, and how to make it."""

    name: str
    groups: tuple[OpaqueGroup, ...]
    make: Callable

    @property
    def spec(self):
        return CacheSpec.opaque(f"toy/{self.name}", self.groups)


LAYERS = (0, 1, 2)
CASES = [
    EngineCase("kv-apart", (full(LAYERS),), kv_apart),
    EngineCase("kv-in-one", (full(LAYERS, blocks_per_page=3),), kv_in_one),
    EngineCase("block-first", (full(LAYERS, blocks_per_page=1),), block_first),
    EngineCase("padded", (full(LAYERS),), padded),
    EngineCase("heads-first", (full(LAYERS),), heads_first),
    EngineCase("hybrid", (full((0, 3), blocks_per_page=4), sliding((1, 2), pages=2)), hybrid),
    EngineCase("overlaid", (full((0, 2)), sliding((1, 3))), overlaid),
    EngineCase("states", (full((0,)), snapshots((1, 2))), with_states),
]
BY_NAME = {case.name: case for case in CASES}


# -- the bench ---------------------------------------------------------------------------


def block_bytes(tensors, layer, block):
    """Return the bytes of one layer's block, its parts one after the other."""
    given = tensors[layer]
    parts = [given] if isinstance(given, torch.Tensor) else given
    return b"".join(part[block].contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def set_block(tensors, layer, block, data):
    """Write the bytes of one layer's block."""
    given, at = tensors[layer], 0
    for part in [given] if isinstance(given, torch.Tensor) else given:
        inside = part[block]
        size = inside.numel() * inside.element_size()
        values = torch.from_numpy(np.frombuffer(data[at : at + size], np.uint8).copy())
        inside.copy_(values.view(part.dtype).view(inside.shape))
        at += size


class Bench:
    """An engine without a model over a store: fills blocks, saves, loads, compares."""

    def __init__(self, case, path, *, blocks=96, host=64, disk=64, weights="toy", **options):
        self.case, self.spec = case, case.spec
        slot = self.spec.slot_bytes
        self.store = Store.open(
            path,
            self.spec,
            Namespace.build(self.spec, weights=weights),
            device=None,
            host=host * slot,
            disk=None if disk is None else disk * (slot + 4096),
            **options,
        )
        self.blocks = blocks
        self.tensors = case.make(blocks)
        self.pool = self.store.attach_pool(self.tensors, layout=self.spec.layout)
        self.unit = math.lcm(*(group.page_tokens for group in self.spec.groups))
        self.free = list(range(blocks))
        random.Random(7).shuffle(self.free)

    def close(self):
        if not self.store.closed:
            self.store.check()
        self.store.close()

    # -- keys and blocks

    def keys(self, talk, units, *, shared=0):
        """Return the keys of a talk of so many units; the first ``shared`` are common to all."""
        every = math.gcd(*(group.page_tokens for group in self.spec.groups))
        hashes, value = [], b"root"
        for at in range(units * self.unit // every):
            name = "all" if at * every < shared * self.unit else str(talk)
            value = hashlib.sha256(value + f"{name}/{at}".encode()).digest()
            hashes.append(value)
        return self.pool.keys_from_hashes(hashes, hash_tokens=every)

    def all_pages(self, keys):
        return [page for group in range(len(self.spec.groups)) for page in keys.pages(group)]

    def take(self, count, *, adjacent=False):
        """Return ids of blocks nobody uses; one block is one group's at a time."""
        if adjacent:
            self.free.sort()
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the toy engine is out of blocks"
        return taken

    def give(self, blocks):
        self.free += [block for ids in blocks for block in ids]

    def take_for(self, pages, **how):
        return [self.take(self.per_page(page.group), **how) for page in pages]

    def per_page(self, group):
        return self.spec.groups[group].blocks_per_page

    # -- bytes

    def content(self, page, layer, position):
        """Return what a layer's block of a page must hold."""
        group = self.spec.groups[page.group]
        size = group.layer_bytes // group.blocks_per_page
        digest = hashlib.sha256(page.key + bytes([layer, position])).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        # No 0xff: those are the bytes of a NaN, which a copy through floats may change.
        return generator.integers(0, 0x3C, size, dtype=np.uint8).tobytes()

    def compute(self, pages, blocks, layers=None):
        """Write what a model would into the blocks of pages."""
        for page, ids in zip(pages, blocks, strict=True):
            for layer in self.spec.groups[page.group].layers:
                if layers is None or layer in layers:
                    for position, block in enumerate(ids):
                        data = self.content(page, layer, position)
                        set_block(self.tensors, layer, block, data)

    def wipe(self):
        """Overwrite every block, as an engine that has reused them all."""
        for given in self.tensors.values():
            for part in [given] if isinstance(given, torch.Tensor) else given:
                part.fill_(0)

    def holds(self, page, ids, layers=None):
        """Return whether blocks hold exactly what a page must."""
        return all(
            block is None
            or block_bytes(self.tensors, layer, block) == self.content(page, layer, position)
            for layer in self.spec.groups[page.group].layers
            if layers is None or layer in layers
            for position, block in enumerate(ids)
        )

    def image(self):
        """Return the bytes of every block of every layer."""
        return {
            (layer, block): block_bytes(self.tensors, layer, block)
            for layer in self.tensors
            for block in range(self.blocks)
        }

    # -- turns

    def save(self, keys, pages=None, **how):
        """Compute and save pages (all of ``keys``); return the results, blocks free again."""
        pages = self.all_pages(keys) if pages is None else pages
        blocks = self.take_for(pages)
        self.compute(pages, blocks)
        results = self.pool.save(pages, blocks, **how).wait()
        self.give(blocks)
        self.store.check()
        return results

    def leased_pages(self, lease, keys):
        return [
            keys.pages(group, numbers.start, numbers.stop) if numbers else []
            for group, numbers in enumerate(lease.groups)
        ]

    def take_lease(self, lease, **how):
        return [
            self.take(len(numbers) * self.per_page(group), **how)
            for group, numbers in enumerate(lease.groups)
        ]

    def expect_loaded(self, lease, keys, blocks, layers=None):
        """Assert that every leased page lies in its blocks."""
        for group, pages in enumerate(self.leased_pages(lease, keys)):
            size = self.per_page(group)
            for at, page in enumerate(pages):
                ids = blocks[group][at * size : (at + 1) * size]
                assert self.holds(page, ids, layers), f"page {page.number} of group {group}"

    def resume(self, keys, *, layerwise=False, **how):
        """Match and load a prefix, check every byte; return its tokens."""
        with self.pool.match(keys, **how) as lease:
            blocks = self.take_lease(lease)
            self.wipe()
            ticket = self.pool.load(lease, blocks, layerwise=layerwise)
            results = ticket.wait()
            assert {str(r) for group in results for r in group} <= {"loaded"}
            self.expect_loaded(lease, keys, blocks)
            self.give(blocks)
            self.store.check()
        self.store.check()
        return lease.tokens

    def resume_tokens(self, keys, **how):
        """Return how much of a prefix is there now; nothing is loaded."""
        with self.pool.match(keys, **how) as lease:
            return lease.tokens
