"""Causal attention of the last tokens of each row over paged keys and values."""

from __future__ import annotations

from torch import Tensor

from tierkv.kernels.attention_arguments import AttentionArguments, flat_queries
from tierkv.kernels.attention_launch import attend
from tierkv.kernels.layout import PageLayout


def paged_prefill(
    q: Tensor,
    memory: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    v_offset: int,
    page_tokens: int,
    kv_heads: int,
    scale: float,
    query_starts: Tensor | None = None,
    max_queries: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_page: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    multiple: int | None = None,
) -> Tensor:
    """Attend with the last tokens of each row, whose K and V are in the pages already.

    The last of a row's queries stands at ``lengths[row] - 1``; each attends to its own token
    and those before it.  ``attention_reference`` is the specification.  Few queries over a long
    prefix are split like ``paged_decode``.

    Args:
        q: ``[batch, queries, q_heads, dim]``; or ``[total_queries, q_heads, dim]`` with
            ``query_starts`` where rows have different numbers of queries.
        memory: as in ``paged_decode``, like all arguments not named here.
        page_table: see there.
        lengths: see there; at least the row's queries (or 0, which gives zeros).
        v_offset: see there.
        page_tokens: see there.
        kv_heads: see there.
        scale: see there.
        query_starts: int32 or int64 ``[batch + 1]``: index in ``q`` of each row's first query,
            and the end; ascending.
        max_queries: with ``query_starts``: the most queries that a row has (or more).
        window: see there.
        softcap: see there.
        sinks: see there.
        first_page: see there; the table needs the window of the row's first query.
        out: see there.
        splits: see there.
        multiple: see there.

    Returns:
        A tensor of q's shape, ``out`` when it was given.

    Raises:
        InvalidInputError: see ``paged_decode``.
        UnsupportedError: see there.
    """
    flat, queries = flat_queries("paged_prefill", q, page_table, 4, query_starts, max_queries)
    arguments = AttentionArguments(
        where="paged_prefill",
        q=flat,
        memory=memory,
        page_table=page_table,
        lengths=lengths,
        layout=PageLayout(
            page_tokens=page_tokens,
            heads=kv_heads,
            dim=q.shape[-1],
            value_offset=v_offset,
            multiple=multiple,
        ),
        query_starts=query_starts,
        max_queries=queries,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        first_page=first_page,
    )
    return attend(arguments, out=out, splits=splits, shape=q.shape)
