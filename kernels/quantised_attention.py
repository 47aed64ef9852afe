"""Paged attention that reads quantised pages directly."""

from __future__ import annotations

from torch import Tensor

from tierkv.kernels.attention_arguments import AttentionArguments, flat_queries
from tierkv.kernels.attention_launch import attend
from tierkv.kernels.quantised import QuantisedLayout


def quantised_decode(
    q: Tensor,
    data: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    quantised: QuantisedLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_page: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Do what ``paged_decode`` does, over quantised pages.

    The result is that of ``paged_decode`` over the pages that ``dequantise`` would give, but
    for roundings: where q is float32 codes times scales stay float32.

    Args:
        q: ``[batch, q_heads, dim]``.
        data: flat uint8, holds all pages.
        page_table: int64 ``[batch, max_pages]``: where in ``data`` (in bytes) each page's part
            of this layer begins; multiples of 16.
        lengths: int32 or int64 ``[batch]``: tokens of each row, the query's own included.
        quantised: the format of the pages.
        scale: factor of q.k.
        window: see ``paged_decode``, like all that follow.
        softcap: see there.
        sinks: see there.
        first_page: see there.
        out: see there.
        splits: see there.

    Raises:
        InvalidInputError: see there.
        UnsupportedError: see there; or groups of scales that are no power of two.
    """
    flat, queries = flat_queries("quantised_decode", q, page_table, 3)
    arguments = AttentionArguments(
        where="quantised_decode",
        q=flat,
        memory=data,
        page_table=page_table,
        lengths=lengths,
        layout=quantised,
        query_starts=None,
        max_queries=queries,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        first_page=first_page,
    )
    return attend(arguments, out=out, splits=splits)


def quantised_prefill(
    q: Tensor,
    data: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    quantised: QuantisedLayout,
    scale: float,
    query_starts: Tensor | None = None,
    max_queries: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_page: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Do what ``paged_prefill`` does, over quantised pages; see ``quantised_decode``.

    Args:
        q: ``[batch, queries, q_heads, dim]``, or ``[total_queries, q_heads, dim]`` with
            ``query_starts``.
        data: see ``quantised_decode``.
        page_table: see there.
        lengths: see there.
        quantised: see there.
        scale: see there.
        query_starts: see ``paged_prefill``.
        max_queries: see there.
        window: see ``paged_decode``, like all that follow.
        softcap: see there.
        sinks: see there.
        first_page: see there.
        out: see there.
        splits: see there.

    Raises:
        InvalidInputError: see ``paged_decode``.
        UnsupportedError: see ``quantised_decode``.
    """
    flat, queries = flat_queries("quantised_prefill", q, page_table, 4, query_starts, max_queries)
    arguments = AttentionArguments(
        where="quantised_prefill",
        q=flat,
        memory=data,
        page_table=page_table,
        lengths=lengths,
        layout=quantised,
        query_starts=query_starts,
        max_queries=queries,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        first_page=first_page,
    )
    return attend(arguments, out=out, splits=splits, shape=q.shape)
