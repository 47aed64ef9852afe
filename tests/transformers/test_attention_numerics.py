"""Attention over pages against float64, in place and by the kernel's path."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tierkv.integrations.transformers.attention_in_place import attend_in_place  # noqa: E402
from tierkv.integrations.transformers.attention_kernel import (  # noqa: E402
    attend_with_kernel,
    kernel_can_attend,
)
from tierkv.kernels.launch import HAS_TRITON  # noqa: E402

WINDOW, PAGE = 8, 4


def poisoned(store: Any) -> None:
    """Fill the whole device pool with bytes that are not a number in any type."""
    store._core.pool.memory.fill_(0xFF)


def make_views(spec: Any, lengths: list[int]) -> Any:
    """Return a store and sequences of random states."""
    store = tierkv.Store.open(
        None,
        spec,
        tierkv.Namespace.build(spec, weights="w"),
        device=60 * spec.slot_bytes,
        host=None,
        disk=None,
    )
    poisoned(store)
    chooser, sequences, held = torch.Generator().manual_seed(1), [], []
    for length in lengths:
        sequence = store.begin([1])
        states = [torch.randn(c.heads, length, c.dim, generator=chooser) for c in parts(spec)]
        for at in range(length):  # one at a time: windows move on
            with sequence.gate.layer(0) as view:
                view.append(*(state[:, at : at + 1] for state in states))
        sequences.append(sequence)
        held.append(states)
    return store, sequences, held


def test_scattered_pages_give_the_same_bits() -> None:
    """Sequences that grew side by side, and one that did not; the end in the middle of a page."""
    components = tuple(tierkv.Component(name=n, heads=2, dim=16) for n in ("k", "v"))
    group = tierkv.LayerGroup(
        name="g",
        kind=tierkv.GroupKind.FULL,
        layers=(0,),
        components=components,
        dtype="float32",
        page_tokens=PAGE,
    )
    spec = tierkv.CacheSpec(groups=(group,), rope="none")
    chooser = torch.Generator().manual_seed(1)
    states = [torch.randn(2, 62, 16, generator=chooser) for _ in range(2)]
    query = torch.randn(6, 16, generator=chooser)
    outs, extents = [], []
    store, (whole, one, other), _ = make_views(spec, [1, 1, 1])
    with store, torch.no_grad():
        for sequence in (whole, one, other):
            sequence.crop(0)
        with whole.gate.layer(0) as view:
            view.append(*states)
        first = 30
        for start, stop in ((0, first), *((at, at + 1) for at in range(first, 62))):
            for sequence in (one, other):
                with sequence.gate.layer(0) as view:
                    view.append(*(state[:, start:stop] for state in states))
        for sequence in (whole, one, other):
            outs.append(torch.empty(6, 16))
            with sequence.gate.layer(0) as view:
                attend_in_place(query, view, outs[-1], scale=0.3)
                extents.append(len(view.extents()))
            sequence.abandon()
    assert extents[0] <= 2
    assert min(extents[1:]) > 6
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert (outs[0] - in_float64(query, states, None, None, None)).abs().max() < 2e-6


def parts(spec: Any) -> Any:
    return spec.groups[0].components


def in_float64(query: Any, states: Any, window: int | None, cap: float | None, sinks: Any) -> Any:
    """Return attention of the last token, the plain way."""
    keys, values = (
        state[:, -window:] if window else state for state in (s.double() for s in states)
    )
    group = query.shape[0] // keys.shape[0]
    logits = torch.einsum("hd,htd->ht", query.double(), keys.repeat_interleave(group, 0)) * 0.3
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], 1)
    weights = torch.softmax(logits, 1)[:, : keys.shape[1]]
    return torch.einsum("ht,htd->hd", weights, values.repeat_interleave(group, 0))


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("window", [None, 2, 3, WINDOW])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_numerics_in_place_and_by_kernel(
    heads: int, kv_heads: int, window: int | None, extra: dict[str, Any]
) -> None:
    """Against float64, rows of different lengths: one token, full pages, windows past pages."""
    kind = tierkv.GroupKind.FULL if window is None else tierkv.GroupKind.SLIDING
    components = tuple(tierkv.Component(name=n, heads=kv_heads, dim=8) for n in ("k", "v"))
    group = tierkv.LayerGroup(
        name="g",
        kind=kind,
        layers=(0,),
        components=components,
        dtype="float32",
        page_tokens=PAGE,
        window=window,
    )
    spec = tierkv.CacheSpec(groups=(group,), rope="none")
    lengths = [1, 4, 5, 8, 11, 15, 16, 17]
    store, sequences, held = make_views(spec, lengths)
    query = torch.randn(len(lengths), heads, 8, generator=torch.Generator().manual_seed(2))
    given = {**extra, "scale": 0.3}
    if extra.get("sinks"):
        given["sinks"] = torch.linspace(-1, 2, heads)
    assert kernel_can_attend(group) == HAS_TRITON
    out = torch.empty(len(lengths), heads, 8)
    with store, torch.no_grad():
        views = [sequence.gate.layer(0) for sequence in sequences]
        for number, view in enumerate(views):
            with view:
                attend_in_place(query[number], view, out[number], **given)
        for view in views:
            view.__enter__()
        by_kernel = attend_with_kernel(query, views, **given)
        for view in views:
            view.__exit__()
        for sequence in sequences:
            sequence.abandon()
    for number, states in enumerate(held):
        expected = in_float64(
            query[number], states, window, extra.get("softcap"), given.get("sinks")
        )
        assert (out[number] - expected).abs().max() < 2e-6
        assert (by_kernel[number] - expected).abs().max() < 2e-6
