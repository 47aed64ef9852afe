"""Scatter the tokens of our pages into another engine's paged pool.

One launch moves K and V of one layer.  It is a copy: the bits arrive as they are.  ``gather``
is the way back.
"""

from __future__ import annotations

from torch import Tensor

from tierkv.kernels.foreign import ForeignLayer, slot_offset
from tierkv.kernels.launch import CONFIGS, as_words, jit, launch, next_power_of_2, tl, use_triton
from tierkv.kernels.layout import PageLayout, page_rows


@jit
def scatter_rows(
    k: tl.tensor,
    v: tl.tensor,
    memory: tl.tensor,
    page_table: tl.tensor,
    slots: tl.tensor,
    pages: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    k_block: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
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
    """Program (tile of rows): a row is one head of one token."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // HEADS
    head = row % HEADS
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    base, at, valid = page_rows(page_table, pages, start + token, slot >= 0, PAGE_TOKENS, HINT)
    dim = tl.arange(0, BLOCK_DIM)
    inside = valid[:, None] & (dim < DIM)[None, :]
    theirs = slot_offset(slot, head, k_block, k_token, k_head, BLOCK_TOKENS)
    ours = base + (at * HEADS + head) * DIM
    x = tl.load(memory + ours[:, None] + dim[None, :], mask=inside)
    tl.store(k + theirs[:, None] + dim[None, :], x, mask=inside)
    if V_DIM > 0:
        dim = tl.arange(0, BLOCK_V_DIM)
        inside = valid[:, None] & (dim < V_DIM)[None, :]
        theirs = slot_offset(slot, head, v_block, v_token, v_head, BLOCK_TOKENS)
        ours = base + V_OFFSET + (at * HEADS + head) * V_DIM
        x = tl.load(memory + ours[:, None] + dim[None, :], mask=inside)
        tl.store(v + theirs[:, None] + dim[None, :], x, mask=inside)


def scatter_reference(
    layer: ForeignLayer,
    slots: Tensor,
    memory: Tensor,
    page_table: Tensor,
    *,
    layout: PageLayout,
    start: int,
) -> None:
    """Do what ``scatter`` does, page by page."""
    for page, first, end, done in layout.parts(start, slots.shape[0]):
        slot = slots[done : done + end - first]
        there = slot >= 0
        block, row = slot[there] // layer.block_tokens, slot[there] % layer.block_tokens
        for component, theirs in enumerate(layer.parts):
            ours = layout.rows(memory, int(page_table[page]), component)[first:end]
            theirs[block, row] = ours[there]


def scatter(
    layer: ForeignLayer,
    slots: Tensor,
    memory: Tensor,
    page_table: Tensor,
    *,
    layout: PageLayout,
    start: int = 0,
) -> None:
    """Copy tokens of one layer from our pages into another engine's pool.

    Args:
        layer: the engine's tensors of one layer.
        slots: int64 ``[tokens]``: where each token lies there; negative: not written.
        memory: flat, of the same type.
        page_table: int64 ``[pages]``: element offsets of our pages in memory.
        layout: where rows lie in our pages.
        start: position of the first token, counted from the first page of the table.

    No slot may come twice.  On a GPU tokens whose page the table does not have are left out
    (their number is not known here without waiting).

    Raises:
        InvalidInputError: shapes, types or devices that do not fit; on the host, tokens that
            have no page, or slots beyond the engine's pool.
    """
    layer.check("scatter", memory, page_table, slots, layout, start)
    if not use_triton(memory):
        scatter_reference(layer, slots, memory, page_table, layout=layout, start=start)
        return
    first, last = as_words(layer.k), as_words(layer.parts[-1])
    config = CONFIGS["scatter"]
    tokens, block = slots.shape[0], layout.tile_rows(config.block)
    launch(
        scatter_rows,
        (-(-tokens * layout.heads // block),),
        *(first, last, as_words(memory), page_table, slots),
        *(page_table.shape[0], tokens, start, *first.stride()[:3], *last.stride()[:3]),
        config=config,
        BLOCK_TOKENS=layer.block_tokens,
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
