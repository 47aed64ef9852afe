"""Quantise pages: int8, fp8 e4m3 and int4 with scales of groups (``dequantise`` goes back).

The format, its arithmetic included, stands in ``quantised``.  The bytes are those of the
reference exactly, on every GPU and under the interpreter: the kernel is launched without
fused multiply-add, rounds halves to even itself, and makes the bits of e4m3 by hand (the
interpreter cuts them off, and sm_80 has no e4m3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.launch import (
    CONFIGS,
    check_dtype,
    check_int64,
    check_same_device,
    jit,
    launch,
    next_power_of_2,
    tl,
    use_triton,
)
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantised import (
    FP8_E4M3,
    INT8,
    TOP,
    QuantisedLayout,
    scale_of_bits,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TINY = 2.0**-100  # groups below it become zeros
_LARGEST = 2.0**126  # larger magnitudes count as this, so that no product overflows


@jit
def scale_of_group(x: tl.tensor, TOP_CODE: tl.constexpr) -> tl.tensor:
    """In a kernel: a tile's scales, as bits in an int32, and what to multiply by: [groups] each."""
    largest = tl.max(tl.abs(x), axis=1)
    bits = (largest * (1.0 / TOP_CODE)).to(tl.int32, bitcast=True) + 0xFFFF
    bits = tl.where(largest < 7.888609052210118e-31, 0, bits >> 16)  # 2**-100
    scale = (bits << 16).to(tl.float32, bitcast=True)
    one = tl.full(scale.shape, 1.0, tl.float32)
    return bits, tl.where(bits == 0, 0.0, tl.div_rn(one, tl.where(bits == 0, one, scale)))


@jit
def round_even(x: tl.tensor) -> tl.tensor:
    """In a kernel: x rounded to an integer, ties to even; magnitudes below 2**22."""
    # 1.5 * 2**23: the sum has no room for a fraction
    return (x + 12582912.0) - 12582912.0


@jit
def encode(
    x: tl.tensor, inverse: tl.tensor, SCHEME: tl.constexpr, TOP_CODE: tl.constexpr
) -> tl.tensor:
    """In a kernel: the codes of a tile [groups, elements], as int32 (int4: 1 to 15)."""
    code = x * inverse[:, None]
    code = tl.minimum(tl.maximum(code, -TOP_CODE), TOP_CODE)
    if SCHEME == 0:
        return round_even(code).to(tl.int32)
    if SCHEME == 2:
        return round_even(code).to(tl.int32) + 8
    bits = code.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
    small = round_even(tl.abs(code) * 512.0).to(tl.int32)
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)  # below 2**-6


@jit
def load_clean(pointer: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """In a kernel: elements as float32, 0 outside of the mask and for NaN, at most 2**126."""
    x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -8.507059173023462e37), 8.507059173023462e37)


@jit
def quantise_pages(
    memory: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    page_table: tl.tensor,
    out_table: tl.tensor,
    rows: tl.tensor,
    SCHEME: tl.constexpr,
    TOP_CODE: tl.constexpr,
    SOURCE: tl.constexpr,
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
    """Quantise one component: program (page, tile of units).

    A unit is a group of adjacent bytes: a group of elements, or for int4 two of them, half a
    head apart.
    """
    page = tl.program_id(0)
    source = tl.multiple_of(tl.load(page_table + page), HINT) + SOURCE
    target = tl.multiple_of(tl.load(out_table + page), 16)
    unit = tl.program_id(1) * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    element = tl.arange(0, BLOCK_GROUP)
    wanted = unit < UNITS
    filled = wanted & (unit < tl.load(rows + page) * ROW_UNITS)
    inside = wanted[:, None] & (element < GROUP)[None, :]
    valid = filled[:, None] & (element < GROUP)[None, :]
    to_value = values + target + VALUES + (unit * GROUP)[:, None] + element[None, :]
    to_scale = scales + target // 2 + SCALES // 2
    if SCHEME == 2:
        head = unit // HEAD_UNITS
        part = unit % HEAD_UNITS
        start = memory + source + (head * (2 * HEAD_UNITS) + part) * GROUP
        start = start[:, None] + element[None, :]
        low = load_clean(start, valid)
        high = load_clean(start + HEAD_UNITS * GROUP, valid)
        low_bits, low_inverse = scale_of_group(low, TOP_CODE)
        high_bits, high_inverse = scale_of_group(high, TOP_CODE)
        code = encode(low, low_inverse, SCHEME, TOP_CODE) | (
            encode(high, high_inverse, SCHEME, TOP_CODE) << 4
        )
        to_scale += head * (2 * HEAD_UNITS) + part
        tl.store(to_scale, low_bits.to(tl.uint16), mask=wanted)
        tl.store(to_scale + HEAD_UNITS, high_bits.to(tl.uint16), mask=wanted)
    else:
        x = load_clean(memory + source + (unit * GROUP)[:, None] + element[None, :], valid)
        bits, inverse = scale_of_group(x, TOP_CODE)
        code = encode(x, inverse, SCHEME, TOP_CODE)
        tl.store(to_scale + unit, bits.to(tl.uint16), mask=wanted)
    tl.store(to_value, code.to(tl.uint8), mask=inside)


def encode_reference(x: Tensor, layout: QuantisedLayout) -> tuple[Tensor, Tensor]:
    """Return bytes ``[..., bytes]`` (uint8) and scales ``[..., groups]`` (uint16) of heads.

    Args:
        x: ``[..., dim]`` of any floating type.
        layout: scheme and group.
    """
    top, group = TOP[layout.code], layout.group_of(x.shape[-1])
    groups = x.float().nan_to_num(nan=0.0).clamp(-_LARGEST, _LARGEST)
    groups = groups.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    largest = groups.abs().amax(-1)
    bits = ((largest * (1.0 / top)).view(torch.int32) + 0xFFFF) >> 16
    scales = torch.where(largest < _TINY, 0, bits).to(torch.int16).view(torch.uint16)
    scale = scale_of_bits(scales)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (groups * inverse.unsqueeze(-1)).clamp(-top, top).flatten(-2)
    if layout.code == FP8_E4M3:
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), scales
    if layout.code == INT8:
        return codes.round().to(torch.int8).view(torch.uint8), scales
    low, high = (codes.round().to(torch.int32) + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4), scales


def quantise_reference(
    memory: Tensor,
    page_table: Tensor,
    out: Tensor,
    out_table: Tensor,
    *,
    layout: PageLayout,
    quantised: QuantisedLayout,
    rows: Tensor,
) -> None:
    """Do what ``quantise`` does, page by page."""
    for source, target, valid in zip(
        page_table.tolist(), out_table.tolist(), rows.tolist(), strict=True
    ):
        for component in range(len(quantised.dims)):
            x = layout.rows(memory, source, component).clone()
            x[valid:] = 0
            values, scales = quantised.sections(out, target, component)
            codes, bits = encode_reference(x, quantised)
            values.copy_(codes)
            scales.copy_(bits)


def quantise(
    memory: Tensor,
    page_table: Tensor,
    out: Tensor,
    out_table: Tensor,
    *,
    layout: PageLayout,
    quantised: QuantisedLayout,
    rows: Tensor | None = None,
) -> None:
    """Quantise one layer's part of some pages.

    Args:
        memory: flat, float32, bfloat16 or float16.
        page_table: int64 ``[pages]``, where the pages begin, in elements of memory.  For all
            layers at once give a row for each layer of each page.
        out: flat uint8, the quantised pages.
        out_table: int64 ``[pages]``, where the quantised pages begin, in bytes; multiples of
            16, no two of them overlapping.
        layout: where the rows lie in memory.
        quantised: where values and scales go.
        rows: int64 ``[pages]``: how many rows of a page are filled; the rest become zeros
            (None: all are).

    Raises:
        InvalidInputError: shapes, devices, tables or layouts that do not fit each other.
        UnsupportedError: a dtype that is not supported.
    """
    rows = check_codec("quantise", memory, page_table, out, out_table, layout, quantised, rows)
    if not use_triton(memory, out):
        quantise_reference(
            memory, page_table, out, out_table, layout=layout, quantised=quantised, rows=rows
        )
        return
    config = CONFIGS["quantise"]
    scales = out[: out.numel() // 2 * 2].view(torch.uint16)
    for component in range(len(quantised.dims)):
        units, constants = unit_constants(quantised, component, config.block)
        launch(
            quantise_pages,
            (page_table.shape[0], -(-units // constants["BLOCK_UNITS"])),
            *(memory, out, scales, page_table, out_table, rows),
            config=config,
            fp_fusion=False,
            SOURCE=(0, layout.v_offset)[component],
            TOP_CODE=TOP[quantised.code],
            HINT=layout.hint(memory.element_size()),
            **constants,
        )


def unit_constants(
    quantised: QuantisedLayout, component: int, block: int
) -> tuple[int, dict[str, int]]:
    """Return the units of a component and the constants that both codec kernels share."""
    dim = quantised.dims[component]
    group = quantised.group_of(dim)
    head_units = quantised.span(dim) // group
    row_units = quantised.heads * head_units
    units = quantised.page_tokens * row_units
    width = next_power_of_2(group)
    values, scales = quantised.offsets[component]
    return units, {
        "SCHEME": quantised.code,
        "VALUES": values,
        "SCALES": scales,
        "UNITS": units,
        "ROW_UNITS": row_units,
        "HEAD_UNITS": head_units,
        "GROUP": group,
        "BLOCK_UNITS": max(1, min(next_power_of_2(units), block // width)),
        "BLOCK_GROUP": width,
    }


def check_codec(
    where: str,
    memory: Tensor,
    page_table: Tensor,
    data: Tensor,
    data_table: Tensor,
    layout: PageLayout,
    quantised: QuantisedLayout,
    rows: Tensor | None,
) -> Tensor:
    """Check the arguments of a codec and return the rows of each page."""
    check_dtype(where, memory, DTYPES)
    check_same_device(
        where,
        memory=memory,
        page_table=page_table,
        data=data,
        data_table=data_table,
        rows=rows,
    )
    check_int64(where, "page_table", page_table, (None,))
    pages = page_table.shape[0]
    layout.check_table(where, memory, page_table.unsqueeze(0), 1)
    quantised.check_table(where, data, data_table, (pages,))
    dims = (layout.dim, layout.v_dim) if layout.v_dim else (layout.dim,)
    have = (layout.page_tokens, layout.heads, dims)
    want = (quantised.page_tokens, quantised.heads, quantised.dims)
    if have != want:
        raise InvalidInputError(
            f"{where}: the layouts differ: (page_tokens, heads, dims) is {have} in memory and "
            f"{want} quantised"
        )
    for table in (page_table, data_table):
        if table.device.type == "cpu" and bool((table < 0).any()):
            raise InvalidInputError(f"{where}: every page must be there; tables have {table.min()}")
    if rows is None:
        return torch.full_like(page_table, layout.page_tokens)
    check_int64(where, "rows", rows, (pages,))
    return rows
