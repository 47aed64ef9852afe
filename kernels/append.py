"""Append new keys and values to pages, through a page table.

One launch writes K and V of all rows of a batch.  It is a copy: the bits arrive as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.launch import (
    CONFIGS,
    as_words,
    check_int64,
    check_same_device,
    jit,
    launch,
    next_power_of_2,
    tl,
    use_triton,
)
from tierkv.kernels.layout import PageLayout, page_rows


@jit
def append_rows(
    k: tl.tensor,
    v: tl.tensor,
    memory: tl.tensor,
    page_table: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    pages: tl.tensor,
    tokens: tl.tensor,
    k_batch: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_batch: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HINT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
) -> None:
    """Program (tile of rows, batch): a row is one head of one new token."""
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    count = tl.minimum(tl.load(counts + batch), tokens)
    base, at, valid = page_rows(
        page_table + batch * pages,
        pages,
        tl.load(starts + batch) + token,
        token < count,
        PAGE_TOKENS,
        HINT,
    )
    dim = tl.arange(0, BLOCK_DIM)
    inside = valid[:, None] & (dim < DIM)[None, :]
    source = batch * k_batch + token * k_token + head * k_head
    target = base + (at * HEADS + head) * DIM
    x = tl.load(k + source[:, None] + dim[None, :], mask=inside)
    tl.store(memory + target[:, None] + dim[None, :], x, mask=inside)
    if V_DIM > 0:
        dim = tl.arange(0, BLOCK_V_DIM)
        inside = valid[:, None] & (dim < V_DIM)[None, :]
        source = batch * v_batch + token * v_token + head * v_head
        target = base + V_OFFSET + (at * HEADS + head) * V_DIM
        x = tl.load(v + source[:, None] + dim[None, :], mask=inside)
        tl.store(memory + target[:, None] + dim[None, :], x, mask=inside)


def append_reference(
    memory: Tensor,
    page_table: Tensor,
    components: list[Tensor],
    *,
    layout: PageLayout,
    starts: Tensor,
    counts: Tensor,
) -> None:
    """Do what ``append`` does with components ``[batch, tokens, heads, dim]``, page by page."""
    for batch, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        for page, row, end, done in layout.parts(start, count):
            at = int(page_table[batch, page])
            for component, x in enumerate(components):
                rows = layout.rows(memory, at, component)
                rows[row:end] = x[batch, done : done + end - row]


def append(
    memory: Tensor,
    page_table: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    layout: PageLayout,
    starts: Tensor | int,
    counts: Tensor | None = None,
    tokens_first: bool = False,
) -> None:
    """Write new tokens of one layer into their pages.

    Args:
        memory: flat, of any type; k and v have the same.
        page_table: int64 ``[batch, pages]``, or ``[pages]`` for one sequence: element offsets.
        k: ``[batch, heads, tokens, dim]``, or without batch for one sequence; strides are free,
            but elements of a head are adjacent.
        v: the same with V's dim; None where the layout has none.
        layout: where rows lie in a page.
        starts: int64 ``[batch]``: position of the first new token, counted from the first page
            of the table; a number for one sequence.
        counts: int64 ``[batch]``: how many of the tokens are written; None: all.
        tokens_first: k and v are ``[..., tokens, heads, dim]``.

    On a GPU tokens whose page the table does not have are left out (their number is not known
    here without waiting).

    Raises:
        InvalidInputError: shapes, types or devices that do not fit; on the host, tokens that
            have no page.
    """
    if page_table.dim() == 1:
        page_table = page_table.unsqueeze(0)
    batch = page_table.shape[0]
    components = [
        _component(x, dim, batch, layout, memory, tokens_first=tokens_first)
        for x, dim in ((k, layout.dim), (v, layout.v_dim))
        if x is not None
    ]
    if (
        len(components) != (2 if layout.v_dim else 1)
        or components[0].shape[:3] != (components[-1].shape[:3])
    ):
        raise InvalidInputError(
            f"append: k {list(k.shape)} and v {None if v is None else list(v.shape)} do not fit "
            f"each other and a layout with value_dim {layout.v_dim}"
        )
    tokens = components[0].shape[1]
    if isinstance(starts, int):
        starts = torch.full((batch,), starts, dtype=torch.int64, device=memory.device)
    if counts is None:
        counts = torch.full_like(starts, tokens)
    check_int64("append", "starts", starts, (batch,))
    check_int64("append", "counts", counts, (batch,))
    layout.check_table("append", memory, page_table, batch)
    check_same_device(
        "append", memory=memory, page_table=page_table, k=k, v=v, starts=starts, counts=counts
    )
    if page_table.device.type == "cpu":
        for row, start, count in zip(page_table, starts.tolist(), counts.tolist(), strict=True):
            if not 0 <= count <= tokens:
                raise InvalidInputError(f"append: count {count} is not within 0 to {tokens}")
            layout.check_rows("append", row, start, count)
    if not use_triton(memory):
        append_reference(
            memory, page_table, components, layout=layout, starts=starts, counts=counts
        )
        return
    first, last = as_words(components[0]), as_words(components[-1])
    config = CONFIGS["append"]
    rows = tokens * layout.heads
    block = layout.tile_rows(config.block)
    launch(
        append_rows,
        (-(-rows // block), batch),
        *(first, last, as_words(memory), page_table, starts, counts),
        *(page_table.shape[1], tokens, *first.stride()[:3], *last.stride()[:3]),
        config=config,
        PAGE_TOKENS=layout.page_tokens,
        HEADS=layout.heads,
        DIM=layout.dim,
        V_DIM=layout.v_dim,
        V_OFFSET=layout.v_offset,
        HINT=layout.hint(memory.element_size()),
        BLOCK_ROWS=block,
        BLOCK_DIM=next_power_of_2(layout.dim),
        BLOCK_V_DIM=next_power_of_2(layout.v_dim),
    )


def _component(
    x: Tensor, dim: int, batch: int, layout: PageLayout, memory: Tensor, *, tokens_first: bool
) -> Tensor:
    """Return a view ``[batch, tokens, heads, dim]`` of new keys or values."""
    view = x.unsqueeze(0) if x.dim() == 3 else x
    if view.dim() == 4 and not tokens_first:
        view = view.transpose(1, 2)
    fits = view.dim() == 4 and (view.shape[0], *view.shape[2:]) == (batch, layout.heads, dim)
    if not fits or (view.numel() and dim > 1 and view.stride(3) != 1):
        order = "tokens, heads" if tokens_first else "heads, tokens"
        raise InvalidInputError(
            f"append: expected [batch, {order}, dim] with batch {batch}, {layout.heads} heads, "
            f"dim {dim} and adjacent elements, got {list(x.shape)} with strides "
            f"{list(x.stride())}"
        )
    if x.dtype != memory.dtype:
        raise InvalidInputError(f"append: got {x.dtype} for a memory of {memory.dtype}")
    return view
