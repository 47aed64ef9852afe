"""A stand-in for a model: the state of a token is a pure function of the prefix it ends.

So the state that a store gives back can be compared, byte for byte, with what it must be,
without a model and without remembering anything.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import torch

from tierkv import CacheSpec, Component, GroupKind, LayerGroup, Namespace
from tierkv.identity.spec import kv_components


def full_group(name="full", layers=(0, 1), *, page_tokens=4, heads=2, dim=32, dtype="float32"):
    return LayerGroup(
        name=name,
        kind=GroupKind.FULL,
        layers=layers,
        components=kv_components(heads, dim),
        dtype=dtype,
        page_tokens=page_tokens,
    )


def latent_group(name="latent", layers=(0, 1), *, page_tokens=4, dtype="bfloat16"):
    return LayerGroup(
        name=name,
        kind=GroupKind.LATENT,
        layers=layers,
        components=(
            Component(name="latent", heads=1, dim=48),
            Component(name="rope_key", heads=1, dim=16),
        ),
        dtype=dtype,
        page_tokens=page_tokens,
    )


def sliding_group(name="sliding", layers=(2, 3), *, page_tokens=2, window=6, dtype="float32"):
    return LayerGroup(
        name=name,
        kind=GroupKind.SLIDING,
        layers=layers,
        components=kv_components(2, 64),
        dtype=dtype,
        page_tokens=page_tokens,
        window=window,
    )


FULL = CacheSpec(groups=(full_group(),))
MIXED = CacheSpec(groups=(full_group(), sliding_group()))
SLIDING = CacheSpec(groups=(sliding_group(layers=(0, 1)),))
LATENT = CacheSpec(groups=(latent_group(), full_group(layers=(2,), page_tokens=8, heads=1)))
SPECS = {"full": FULL, "mixed": MIXED, "sliding": SLIDING, "latent": LATENT}


def namespace(spec, weights="toy", **parts):
    return Namespace.build(spec, weights=weights, **parts)


def states(spec, layer, tokens, start, stop):
    """Return what a layer holds for tokens [start, stop): one tensor a component, [H, T, D]."""
    group = spec.groups[spec.layer_to_group[layer]]
    made = []
    for number, component in enumerate(group.components):
        rows = [
            _row(tokens, at, f"{group.name}/{layer}/{number}", component.elements)
            for at in range(start, stop)
        ]
        values = np.stack(rows).reshape(stop - start, component.heads, component.dim)
        tensor = torch.from_numpy(values).to(getattr(torch, group.dtype))
        made.append(tensor.transpose(0, 1))
    return tuple(made)


def _row(tokens, at, salt, count):
    return _random_row(salt.encode() + np.asarray(tokens[: at + 1], np.uint32).tobytes(), count)


@functools.lru_cache(maxsize=1 << 15)  # each is compared again at every step
def _random_row(seed, count):
    digest = hashlib.sha256(seed).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).random(count, np.float32)


def feed(sequence, tokens, upto=None):
    """Append the states of ``tokens[sequence.length:upto]`` to every layer, as a model would.

    Checks on the way that every layer holds exactly what it must.
    """
    spec, start = sequence.spec, sequence.length
    stop = len(tokens) if upto is None else upto
    for layer in sorted(spec.layer_to_group):
        with sequence.gate.layer(layer) as view:
            expect_state(spec, layer, tokens, start, view.read())
            view.append(*states(spec, layer, tokens, start, stop))
            if spec.groups[spec.layer_to_group[layer]].kind.needs_every_page:
                expect_state(spec, layer, tokens, stop, view.read())


def expect_state(spec, layer, tokens, length, held):
    group = spec.groups[spec.layer_to_group[layer]]
    start = group.first_needed(length)
    if start == length:
        assert all(part.shape[1] == 0 for part in held)
        return
    for part, right in zip(held, states(spec, layer, tokens, start, length), strict=True):
        assert torch.equal(part, right), f"layer {layer} of {group.name} holds wrong bytes"


def turn(store, tokens, *, cut=None, finish=True):
    """Run one turn over ``tokens``; return what was found."""
    sequence = store.begin(tokens)
    found = sequence.found
    if cut is not None and sequence.length < cut:
        feed(sequence, tokens, cut)
    feed(sequence, tokens)
    store.check()
    if finish:
        sequence.finish(tokens)
    else:
        sequence.abandon()
    store.check()
    return found
