"""Paged attention in plain PyTorch: the specification that the Triton kernels are tested against.

It gathers each row's tokens, computes every score and masks; it is meant to be read, and to
run on any device in any precision.  See ``paged_decode`` and ``paged_prefill`` for shapes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tierkv.kernels.attention_arguments import AttentionArguments


def reference_attention(
    arguments: AttentionArguments, *, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Attend to pages, one row of the batch at a time.

    The query at position p of a row attends to the tokens t with ``p - window < t <= p``
    (all up to p without a window) whose pages the table holds; the row's last query stands at
    ``length - 1``.  With s = scale * q.k, then cap * tanh(s / cap) where there is a soft cap,
    the weights are softmax(s); a sink is one more logit of the head, whose weight goes nowhere.
    A query that attends to nothing gives zeros.

    Args:
        arguments: checked arguments of a call.
        compute_dtype: dtype of all arithmetic; float64 for tests.

    Returns:
        A tensor ``[total_queries, q_heads, dim]`` of ``compute_dtype``.
    """
    a = arguments
    out = torch.zeros_like(a.q, dtype=compute_dtype)
    starts = a.starts()
    for row, (begin, end) in enumerate(pairwise(starts)):
        length = int(a.lengths[row])
        origin = 0 if a.first_page is None else int(a.first_page[row]) * a.layout.page_tokens
        first = length - (end - begin)
        oldest = origin if a.window is None else max(origin, first - a.window + 1)
        if begin == end or length <= oldest:
            continue
        k, v = _tokens_of(a, row, oldest - origin, length - origin, compute_dtype)
        positions = torch.arange(first, length, device=a.q.device)
        tokens = torch.arange(oldest, length, device=a.q.device)
        out[begin:end] = _attend(a, a.q[begin:end].to(compute_dtype), k, v, positions, tokens)
    return out


def _attend(
    a: AttentionArguments, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, tokens: Tensor
) -> Tensor:
    """Attend with queries ``[n, q_heads, dim]`` to ``[tokens, kv_heads, dim]``."""
    grouped = q.view(len(q), a.layout.heads, a.group, -1)
    scores = torch.einsum("nhgd,thd->nhgt", grouped, k) * a.scale
    if a.softcap is not None:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    allowed = tokens[None, :] <= positions[:, None]
    if a.window is not None:
        allowed &= tokens[None, :] > positions[:, None] - a.window
    scores = scores.masked_fill(~allowed[:, None, None, :], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if a.sinks is not None:
        sinks = a.sinks.to(scores.dtype).view(1, a.layout.heads, a.group, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if a.sinks is not None:
        total = total + torch.exp(sinks - top)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("nhgt,thd->nhgd", weights, v).flatten(1, 2)


def _tokens_of(
    a: AttentionArguments, row: int, begin: int, end: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather K and V ``[end - begin, kv_heads, dim]`` of some tokens of a row's table."""
    size = a.layout.page_tokens
    skipped = begin // size
    pages = a.page_table[row, skipped : -(-end // size)].tolist()
    k = torch.cat([a.read_page(at, 0).to(dtype) for at in pages])
    v = torch.cat([a.read_page(at, 1).to(dtype) for at in pages])
    wanted = slice(begin - skipped * size, end - skipped * size)
    return k[wanted], v[wanted]
