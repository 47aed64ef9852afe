"""Turn quantised pages back into pages of the model's type.

The format stands in ``quantised``.  Values are those of the reference exactly: a code times
its scale is one float32 multiplication, and bfloat16 is stored as bits that the kernel has
rounded itself (the interpreter cuts them off).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.kernels.launch import CONFIGS, jit, launch, tl, use_triton
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantise import check_codec, unit_constants
from tierkv.kernels.quantised import (
    QuantisedLayout,
    decode_byte,
    decode_high,
    decode_low,
    decode_reference,
    decode_scale,
)


@jit
def round_to(x: tl.tensor, BFLOAT16: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """In a kernel: float32 as what is stored, bfloat16 as bits rounded to even."""
    if BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    if DTYPE.is_fp16():
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(DTYPE)


@jit
def dequantise_pages(
    values: tl.tensor,
    scales: tl.tensor,
    memory: tl.tensor,
    data_table: tl.tensor,
    page_table: tl.tensor,
    rows: tl.tensor,
    SCHEME: tl.constexpr,
    BFLOAT16: tl.constexpr,
    TARGET: tl.constexpr,
    VALUES: tl.constexpr,
    SCALES: tl.constexpr,
    UNITS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    HEAD_UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    HINT: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
) -> None:
    """Turn one component back: program (page, tile of units), units as above."""
    page = tl.program_id(0)
    source = tl.multiple_of(tl.load(data_table + page), 16)
    target = tl.multiple_of(tl.load(page_table + page), HINT) + TARGET
    unit = tl.program_id(1) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    element = tl.arange(0, BLOCK_GROUP)
    filled = (unit < UNITS) & (unit < tl.load(rows + page) * ROW_UNITS)
    inside = filled[:, None] & (element < GROUP)[None, :]
    byte = tl.load(
        values + source + VALUES + (unit * GROUP)[:, None] + element[None, :], mask=inside, other=0
    )
    from_scale = scales + source // 2 + SCALES // 2
    dtype: tl.constexpr = memory.dtype.element_ty
    if SCHEME == 2:
        head = unit // HEAD_UNITS
        part = unit % HEAD_UNITS
        from_scale += head * (2 * HEAD_UNITS) + part
        low_scale = decode_scale(tl.load(from_scale, mask=filled, other=0))
        high_scale = decode_scale(tl.load(from_scale + HEAD_UNITS, mask=filled, other=0))
        start = memory + target + (head * (2 * HEAD_UNITS) + part) * GROUP
        start = start[:, None] + element[None, :]
        low = decode_low(byte) * low_scale[:, None]
        high = decode_high(byte) * high_scale[:, None]
        tl.store(start, round_to(low, BFLOAT16, dtype), mask=inside)
        tl.store(start + HEAD_UNITS * GROUP, round_to(high, BFLOAT16, dtype), mask=inside)
    else:
        scale = decode_scale(tl.load(from_scale + unit, mask=filled, other=0))
        x = decode_byte(byte, SCHEME) * scale[:, None]
        start = memory + target + (unit * GROUP)[:, None] + element[None, :]
        tl.store(start, round_to(x, BFLOAT16, dtype), mask=inside)


def dequantise_reference(
    data: Tensor,
    data_table: Tensor,
    memory: Tensor,
    page_table: Tensor,
    *,
    layout: PageLayout,
    quantised: QuantisedLayout,
    rows: Tensor,
) -> None:
    """Do what ``dequantise`` does, page by page."""
    for source, target, valid in zip(
        data_table.tolist(), page_table.tolist(), rows.tolist(), strict=True
    ):
        for component in range(len(quantised.dims)):
            values, scales = quantised.sections(data, source, component)
            x = decode_reference(values[:valid], scales[:valid], quantised)
            most = torch.finfo(memory.dtype).max
            layout.rows(memory, target, component)[:valid] = x.clamp(-most, most).to(memory.dtype)


def dequantise(
    data: Tensor,
    data_table: Tensor,
    memory: Tensor,
    page_table: Tensor,
    *,
    layout: PageLayout,
    quantised: QuantisedLayout,
    rows: Tensor | None = None,
) -> None:
    """Turn one layer's part of some quantised pages back; the arguments of ``quantise``.

    Rows beyond ``rows[page]`` are left as they are in memory.

    Raises:
        InvalidInputError: shapes, devices, tables or layouts that do not fit each other.
        UnsupportedError: a dtype that is not supported.
    """
    rows = check_codec("dequantise", memory, page_table, data, data_table, layout, quantised, rows)
    if not use_triton(memory, data):
        dequantise_reference(
            data, data_table, memory, page_table, layout=layout, quantised=quantised, rows=rows
        )
        return
    config = CONFIGS["dequantise"]
    scales = data[: data.numel() // 2 * 2].view(torch.uint16)
    bfloat16 = memory.dtype == torch.bfloat16
    for component in range(len(quantised.dims)):
        units, constants = unit_constants(quantised, component, config.block)
        launch(
            dequantise_pages,
            (page_table.shape[0], -(-units // constants["BLOCK_UNITS"])),
            *(data, scales, memory.view(torch.int16) if bfloat16 else memory),
            *(data_table, page_table, rows),
            config=config,
            fp_fusion=False,
            BFLOAT16=bfloat16,
            TARGET=(0, layout.v_offset)[component],
            HINT=layout.hint(memory.element_size()),
            **constants,
        )
