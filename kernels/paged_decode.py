"""Attention of one new token a row over paged keys and values."""

from __future__ import annotations

from torch import Tensor

from tierkv.kernels.attention_arguments import AttentionArguments, flat_queries
from tierkv.kernels.attention_launch import attend
from tierkv.kernels.layout import PageLayout


def paged_decode(
    q: Tensor,
    memory: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    v_offset: int,
    page_tokens: int,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_page: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    multiple: int | None = None,
) -> Tensor:
    """Attend with the last token of each row to the tokens that its pages hold.

    ``attention_reference`` is the specification.  The history of a row is split among
    programs, so that one long sequence fills a GPU.  Queues work on the current stream and
    does not wait for it; may be called from any thread.

    Args:
        q: ``[batch, q_heads, dim]``, float32, float16 or bfloat16.  Heads ``h * group`` to
            ``(h + 1) * group - 1`` share KV head h.
        memory: flat, of q's dtype, holds all pages.
        page_table: int64 ``[batch, max_pages]``: where in ``memory`` (in elements) the K block
            of each page begins, with rows ``[token][kv_head][dim]``.
        lengths: int32 or int64 ``[batch]``: tokens of each row, the query's own (already in
            its page) included; 0 for a row that is not in use (gives zeros).
        v_offset: elements from a page's K block to its V block.
        page_tokens: tokens a page.
        kv_heads: heads of K and V.
        scale: factor of q.k.
        window: tokens that the query attends to, its own included; None: all.
        softcap: logits become ``softcap * tanh(logits / softcap)``, as in Gemma 2.
        sinks: ``[q_heads]``: a logit for each head that takes part in the softmax's
            denominator only, as in gpt-oss.
        first_page: ``[batch]``: the page of its row that the table's first column holds, for
            windows; None: page 0.
        out: where the result goes, of q's shape and dtype.
        splits: parts of the history, 1 to 64; None: by a table, from shapes alone.
        multiple: what all entries of the table are multiples of, in elements; None: the power
            of two in ``kv_heads * dim``.  A GPU takes it on trust.

    Returns:
        ``[batch, q_heads, dim]``, ``out`` when it was given.

    Raises:
        InvalidInputError: shapes that do not fit each other; on the CPU also lengths and table
            entries that lead out of memory or to pages that are not there.
        UnsupportedError: a dtype or a head size that the kernels do not handle, or gradients.
    """
    flat, queries = flat_queries("paged_decode", q, page_table, 3)
    arguments = AttentionArguments(
        where="paged_decode",
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
        query_starts=None,
        max_queries=queries,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        first_page=first_page,
    )
    return attend(arguments, out=out, splits=splits)
