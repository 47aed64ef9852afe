"""Attention of one new token over pages, where they lie, in plain PyTorch.

The keys of a layer are ``[pages, rows, heads, dim]`` in place, pages at one distance and rows
at another, so the pages of one KV head are a batch of matrices to ``torch.bmm``, which reads
them without copying.  All scores of a token go through one softmax.  Rows of pages that hold
no token, or none of the window, may be anything, not-a-number included: their scores are
overwritten, and their V is cut off.

Every page is multiplied apart, and the products are summed in one order, so that results do not
depend on where the pages lie: a sequence that was loaded, or streams through a ring, gives the
same bits.  Pages that lie scattered one by one (sequences that grew side by side) are copied
together first, page by page, since a call for each would cost more than the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierkv.data_plane.extents import Extent, component_views

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tierkv.data_plane.layer_view import LayerView

# Extents shorter than this, if there are so many in a row, are copied into one.
_SHORT, _MANY = 4, 6


def attend_in_place(
    query: Tensor,
    layer: LayerView,
    out: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attend with the last token of a layer to the tokens in its pages, its own included.

    Args:
        query: float32 ``[heads, dim]``; heads ``h * group`` to ``(h + 1) * group - 1`` share KV
            head h.
        layer: between entering and leaving the gate, the token's K and V appended.
        out: takes the result, ``[heads, V dim]``.
        scale: factor of q.k.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``[heads]``, a logit of each head that takes part in the softmax's denominator
            only.
    """
    size, start, stop = layer.group.page_tokens, layer.attended_from(1), layer.length
    places = _places(layer)
    kv_heads = layer.group.components[0].heads
    grouped = (query * scale).view(kv_heads, -1, query.shape[-1])
    group, begin = grouped.shape[1], places[0][0].start
    pages = sum(extent.pages for extent, _ in places)

    scores = query.new_empty((kv_heads, pages, group, size))
    for extent, (keys, _) in places:
        first = (extent.start - begin) // size
        _multiply_queries(grouped, keys, scores[:, first : first + extent.pages])
    logits = query.new_empty((kv_heads, group, pages * size + (sinks is not None)))
    by_token = logits[..., : pages * size]
    by_token.view(kv_heads, group, pages, size).copy_(scores.transpose(1, 2))
    if softcap is not None:
        by_token.div_(softcap).tanh_().mul_(softcap)
    for outside in (slice(0, start - begin), slice(stop - begin, pages * size)):
        if outside.start < outside.stop:
            logits[..., outside] = -torch.inf
    if sinks is not None:
        logits[..., -1] = sinks.view(kv_heads, -1)
    weights = torch.softmax(logits, dim=-1)

    products = query.new_empty((kv_heads, pages, group, out.shape[-1]))
    for extent, (_, values) in places:
        first = (extent.start - begin) // size
        for page, count, low, high in cuts(extent, start, stop, size):
            at = (first + page) * size + low
            span = weights[..., at : at + count * (high - low)]
            target = products[:, first + page : first + page + count]
            _multiply_weights(span, values[page : page + count, low:high], target)
    torch.sum(products, dim=1, out=out.view(kv_heads, group, -1))


def _places(layer: LayerView) -> list[tuple[Extent, tuple[Tensor, ...]]]:
    """Return extents with K and V ``[pages, rows, heads, dim]``; scattered ones as one copy."""
    places: list[tuple[Extent, tuple[Tensor, ...]]] = []
    scattered: list[Extent] = []
    for extent in layer.extents(queries=1):
        if extent.pages < _SHORT:
            scattered.append(extent)
            continue
        places += _together(layer, scattered)
        scattered = []
        places.append((extent, layer.views(extent)))
    return places + _together(layer, scattered)


def _together(
    layer: LayerView, extents: Sequence[Extent]
) -> list[tuple[Extent, tuple[Tensor, ...]]]:
    """Return adjacent extents with their views: copied into one if they are many."""
    if len(extents) < _MANY:
        return [(extent, layer.views(extent)) for extent in extents]
    group, size = layer.group, layer.memory.element_size()
    elements = group.layer_bytes // size
    pages = sum(extent.pages for extent in extents)
    copied, at = layer.memory.new_empty((pages, elements)), 0
    for extent in extents:
        there = layer.memory.as_strided(
            (extent.pages, elements), (extent.stride // size, 1), extent.offset // size
        )
        copied[at : at + extent.pages].copy_(there)
        at += extent.pages
    one = Extent(0, group.layer_bytes, pages, extents[0].start)
    return [(one, component_views(copied.view(-1), group, one))]


def cuts(extent: Extent, start: int, stop: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first page, pages, first row, last row + 1) of the tokens ``[start, stop)``.

    Each is whole pages of the extent, or some rows of one page.
    """
    low = max(0, start - extent.start)
    high = min(stop - extent.start, extent.pages * size)
    head = min(high, -(-low // size) * size)
    tail = max(head, high // size * size)
    if head > low:
        yield low // size, 1, low % size, low % size + head - low
    if tail > head:
        yield head // size, (tail - head) // size, 0, size
    if high > tail:
        yield tail // size, 1, 0, high - tail


def _multiply_queries(query: Tensor, keys: Tensor, out: Tensor) -> None:
    """Multiply queries ``[KV heads, group, dim]`` with the keys of pages.

    Args:
        query: contiguous.
        keys: ``[pages, rows, KV heads, dim]``, in place.
        out: ``[KV heads, pages, group, rows]``, contiguous but for the first stride.
    """
    kv_heads, group, dim = query.shape
    pages = keys.shape[0]
    if pages < kv_heads:  # fewer calls: a page at a time, the heads as the batch
        for there, span in zip(keys.permute(0, 2, 3, 1).unbind(0), out.unbind(1), strict=True):
            span.copy_(torch.bmm(query, there))
        return
    queries = query.unsqueeze(1).expand(kv_heads, pages, group, dim).unbind(0)
    heads = keys.permute(2, 0, 3, 1).unbind(0)
    for one, there, span in zip(queries, heads, out.unbind(0), strict=True):
        torch.bmm(one, there, out=span)


def _multiply_weights(weights: Tensor, values: Tensor, out: Tensor) -> None:
    """Multiply weights ``[KV heads, group, tokens]`` with the values of pages.

    Args:
        weights: of the tokens of these pages.
        values: ``[pages, rows, KV heads, dim]``, in place.
        out: ``[KV heads, pages, group, dim]``, contiguous but for the first stride.
    """
    pages, rows, kv_heads, _ = values.shape
    by_page = weights.view(kv_heads, -1, pages, rows)
    if pages < kv_heads:
        spans, heads = by_page.unbind(2), values.transpose(1, 2).unbind(0)
        for span, there, target in zip(spans, heads, out.unbind(1), strict=True):
            target.copy_(torch.bmm(span, there))
        return
    spans, heads = by_page.transpose(1, 2).unbind(0), values.permute(2, 0, 1, 3).unbind(0)
    for span, there, target in zip(spans, heads, out.unbind(0), strict=True):
        torch.bmm(span, there, out=target)
