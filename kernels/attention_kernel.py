"""The Triton kernels of paged attention: one for partial or whole results, one that combines.

Attention with an online softmax over tiles of tokens, and its split over the length of the
history, follow FlashAttention (Dao et al., 2022, arXiv:2205.14135) and Flash-Decoding (Dao,
Haziza, Massa, Sizov, 2023).  A program's rows are the heads of one group for some queries,
packed without gaps: row r is head ``r % GROUP`` of query ``r // GROUP``.  So K and V are read
once for all heads that share them, and one kernel serves one query (decode) and many.

Everything is computed in float32; only where ``DOT`` says so are the operands of a matrix
product rounded to 16 bits for the tensor cores.  ``attention_launch`` launches them.
"""

from __future__ import annotations

from tierkv.kernels.launch import jit, tl
from tierkv.kernels.quantised import decode_byte, decode_high, decode_low, decode_scale


@jit
def soft_cap(scores: tl.tensor, cap: tl.constexpr) -> tl.tensor:
    """Return ``cap * tanh(scores / cap)``; exact at both ends, where exp gives 0 or inf."""
    return cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / cap)) + 1.0))


@jit
def load_plain(
    memory: tl.tensor,
    start: tl.tensor,
    present: tl.tensor,
    element: tl.tensor,
    valid: tl.tensor,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Load a tile ``[BLOCK_N, DIM_P2]``: rows from ``start``; zeros where not present or valid."""
    mask = present[:, None] & valid[None, :]
    return tl.load(memory + start[:, None] + element[None, :], mask=mask, other=0.0).to(DOT)


@jit
def load_quantised(
    data: tl.tensor,
    page_scales: tl.tensor,
    page: tl.tensor,
    slot: tl.tensor,
    present: tl.tensor,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Load a tile like ``load_plain`` from quantised pages, as float32; see ``quantised``.

    ``slot`` counts heads of tokens from the page's first one.  For int4 the halves of a head are
    each padded to a power of two, and the tile holds one beside the other.
    """
    if SCHEME == 2:
        at = tl.arange(0, DIM_P2 // 2)
        start = page + VALUES_AT + slot * (DIM // 2)
        mask = present[:, None] & (at < DIM // 2)[None, :]
        byte = tl.load(data + start[:, None] + at[None, :], mask=mask, other=0)
        halves = tl.permute(tl.join(decode_low(byte), decode_high(byte)), (0, 2, 1))
        code = tl.reshape(halves, (BLOCK_N, DIM_P2))
    else:
        at = tl.arange(0, DIM_P2)
        start = page + VALUES_AT + slot * DIM
        mask = present[:, None] & (at < DIM)[None, :]
        byte = tl.load(data + start[:, None] + at[None, :], mask=mask, other=0)
        code = decode_byte(byte, SCHEME)
    # What is not there has a scale of 0, whatever its code.
    first = ((page + SCALES_AT) >> 1) + slot * GROUPS
    if GROUPS == 1:
        return code * decode_scale(tl.load(page_scales + first, mask=present, other=0))[:, None]
    PARTS: tl.constexpr = 2 if SCHEME == 2 else 1
    COLUMNS: tl.constexpr = DIM_P2 * GROUPS // DIM  # scales of a padded head
    column = tl.arange(0, COLUMNS)
    group = column
    valid = column < GROUPS
    if PARTS == 2 and DIM_P2 != DIM:
        within = column % (COLUMNS // 2)
        group = column // (COLUMNS // 2) * (GROUPS // 2) + within
        valid = within < GROUPS // 2
    mask = present[:, None] & valid[None, :]
    bits = tl.load(page_scales + first[:, None] + group[None, :], mask=mask, other=0)
    code = tl.reshape(code, (BLOCK_N, COLUMNS, DIM // GROUPS)) * decode_scale(bits)[:, :, None]
    return tl.reshape(code, (BLOCK_N, DIM_P2))


@jit
def attend_pages(
    q: tl.tensor,
    memory: tl.tensor,
    page_scales: tl.tensor,
    page_table: tl.tensor,
    lengths: tl.tensor,
    query_starts: tl.tensor,
    first_page: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    scale: float,
    max_pages: int,
    max_queries: int,
    row_tiles: int,
    V_OFFSET: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUPS: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Attend with a tile of rows to one split of its tokens.

    ``SCHEME`` is that of quantised pages, whose scales are ``page_scales`` (the memory again, as
    16-bit units), ``GROUPS`` a head; -1 for pages of numbers.
    Grid: (batch * KV_HEADS * row_tiles, SPLITS).  With one split the result goes to ``out``
    ``[total_queries, q_heads, DIM]``; with more, ``out`` is float32
    ``[total_queries, q_heads, SPLITS, DIM]`` and holds sums weighted relative to the maximum
    (of logits times log2 e) in ``partial_max``; ``partial_sum`` holds the sums of the weights.
    """
    tile = tl.program_id(0) % row_tiles
    kv_head = tl.program_id(0) // row_tiles % KV_HEADS
    batch = tl.program_id(0) // row_tiles // KV_HEADS
    split = tl.program_id(1)

    log2_e: tl.constexpr = 1.4426950408889634  # for weights as powers of two

    # The rows of the tile, and where their queries stand.
    query_start = batch.to(tl.int64) * max_queries
    query_count = max_queries
    if query_starts is not None:
        query_start = tl.load(query_starts + batch).to(tl.int64)
        query_count = (tl.load(query_starts + batch + 1) - query_start).to(tl.int32)
    if tile * BLOCK_M >= query_count * GROUP:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    length = tl.load(lengths + batch).to(tl.int32)
    position = length - query_count + query
    flat_head = (query_start + query) * (KV_HEADS * GROUP) + head
    element = tl.arange(0, DIM_P2)
    valid = element < DIM
    if SCHEME == 2 and DIM_P2 != DIM:  # the padding of int4 lies behind each half
        within = element % (DIM_P2 // 2)
        element = element // (DIM_P2 // 2) * (DIM // 2) + within
        valid = within < DIM // 2
    row_mask = (query < query_count)[:, None] & valid[None, :]
    x = tl.load(q + flat_head[:, None] * DIM + element[None, :], mask=row_mask, other=0.0).to(DOT)

    # A sink is a logit that is there before any token: it enters once, in the first split.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=query < query_count, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sink * log2_e, top)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([BLOCK_M, DIM_P2], tl.float32)

    # The tokens that any row of the tile attends to, counted from the table's first page on,
    # and this split's share of them in whole tiles.
    origin = 0
    if first_page is not None:
        origin = tl.load(first_page + batch).to(tl.int32) * PAGE_TOKENS
    first = length - query_count + tile * BLOCK_M // GROUP
    last = length - query_count + (tile * BLOCK_M + BLOCK_M - 1) // GROUP
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1 - origin, 0)
    end = tl.maximum(tl.minimum(last + 1, length) - origin, 0)
    first_tile = begin // BLOCK_N
    tiles = tl.cdiv(end, BLOCK_N) - first_tile
    share = tl.cdiv(tiles, SPLITS)
    start = first_tile + split * share
    stop = tl.minimum(start + share, first_tile + tiles)

    table = page_table + batch.to(tl.int64) * max_pages
    for step in range(start, stop):
        token = step * BLOCK_N + tl.arange(0, BLOCK_N)
        present = (token >= begin) & (token < end)
        if PAGE_TOKENS % BLOCK_N == 0:  # a tile lies in one page
            page = tl.load(table + step * BLOCK_N // PAGE_TOKENS)
            page = tl.multiple_of(page, ALIGNMENT)
        else:
            page = tl.load(table + token // PAGE_TOKENS, mask=present, other=0)
            page = tl.multiple_of(page, [ALIGNMENT])
        slot = token % PAGE_TOKENS * KV_HEADS + kv_head
        if SCHEME < 0:
            k = load_plain(memory, page + slot * DIM, present, element, valid, DOT)
        else:
            k = load_quantised(
                memory,
                page_scales,
                page,
                slot,
                present,
                VALUES_AT=0,
                SCALES_AT=K_SCALES,
                SCHEME=SCHEME,
                GROUPS=GROUPS,
                DIM=DIM,
                DIM_P2=DIM_P2,
                BLOCK_N=BLOCK_N,
            ).to(DOT)
        scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = soft_cap(scores, SOFTCAP)
        at = origin + token
        allowed = present[None, :] & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            allowed &= at[None, :] > position[:, None] - WINDOW
        scores = tl.where(allowed, scores * log2_e, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # While a row has seen no token of its own, its maximum is -inf: avoid inf - inf.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        if SCHEME < 0:
            v = load_plain(memory, page + V_OFFSET + slot * DIM, present, element, valid, DOT)
        else:
            v = load_quantised(
                memory,
                page_scales,
                page,
                slot,
                present,
                VALUES_AT=V_OFFSET,
                SCALES_AT=V_SCALES,
                SCHEME=SCHEME,
                GROUPS=GROUPS,
                DIM=DIM,
                DIM_P2=DIM_P2,
                BLOCK_N=BLOCK_N,
            ).to(DOT)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(DOT), v, acc, input_precision="ieee")
        top = new_top

    if SPLITS == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = flat_head[:, None] * DIM + element[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=row_mask)
    else:
        part = flat_head * SPLITS + split
        tl.store(out + part[:, None] * DIM + element[None, :], acc, mask=row_mask)
        tl.store(partial_max + part, top, mask=query < query_count)
        tl.store(partial_sum + part, total, mask=query < query_count)


@jit
def combine_splits(
    partial: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    out: tl.tensor,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_P2: tl.constexpr,
) -> None:
    """Combine the splits of one head of one query; grid: (total_queries * q_heads,)."""
    flat_head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_P2)
    dims = tl.arange(0, DIM_P2)
    there = split < SPLITS
    part = flat_head * SPLITS + split
    top = tl.load(partial_max + part, mask=there, other=float("-inf"))
    total = tl.load(partial_sum + part, mask=there, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(top - base)
    mask = there[:, None] & (dims[None, :] < DIM)
    acc = tl.load(partial + part[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    weight = tl.sum(total * shrink, 0)
    result = tl.sum(acc * shrink[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    at = out + flat_head * DIM + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=dims < DIM)
