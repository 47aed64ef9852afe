"""Launching paged attention: the path, the configuration, and the split over the history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.attention_arguments import AttentionArguments
from tierkv.kernels.attention_kernel import attend_pages, combine_splits
from tierkv.kernels.attention_reference import reference_attention
from tierkv.kernels.launch import (
    INTERPRETED,
    VECTOR_BYTES,
    Config,
    launch,
    next_power_of_2,
    tl,
    use_triton,
)
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantised import QuantisedLayout


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How ``attend_pages`` is launched.

    Attributes:
        rows: rows (heads of queries) of a program, at least 16 for the tensor cores.
        tokens: tokens of a step.
        num_warps: warps of a program.
        num_stages: tiles that the compiler keeps in flight.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


# By (pages, few rows, head dim rounded up to a power of two).  Chosen for registers without
# spills, 16-byte loads in flight, and shared memory within a block's limit, on all targets; the
# committed table beside tests/kernels/test_attention_compile.py says what each needs.
# Quantised pages take two stages, not three: with more, Triton 3.9 forgets what the offsets
# are multiples of, and loads single bytes.
CONFIGS: dict[tuple[str, bool, int], AttentionConfig] = {
    ("16 bits", True, 64): AttentionConfig(16, 128, 4, 3),
    ("16 bits", True, 128): AttentionConfig(16, 64, 4, 3),
    ("16 bits", True, 256): AttentionConfig(16, 32, 4, 3),
    ("16 bits", False, 64): AttentionConfig(128, 64, 8, 2),
    ("16 bits", False, 128): AttentionConfig(128, 64, 8, 2),
    ("16 bits", False, 256): AttentionConfig(64, 32, 8, 2),
    ("quantised", True, 64): AttentionConfig(16, 64, 4, 2),
    ("quantised", True, 128): AttentionConfig(16, 64, 4, 2),
    ("quantised", True, 256): AttentionConfig(16, 32, 4, 2),
    ("quantised", False, 64): AttentionConfig(64, 64, 8, 2),
    ("quantised", False, 128): AttentionConfig(64, 64, 8, 2),
    ("quantised", False, 256): AttentionConfig(64, 32, 8, 2),
    ("float32", True, 64): AttentionConfig(16, 32, 4, 2),
    ("float32", True, 128): AttentionConfig(16, 32, 4, 2),
    ("float32", True, 256): AttentionConfig(16, 16, 4, 2),
    ("float32", False, 64): AttentionConfig(32, 32, 4, 2),
    ("float32", False, 128): AttentionConfig(32, 32, 4, 2),
    ("float32", False, 256): AttentionConfig(32, 16, 8, 1),
}
# The interpreter's time goes by steps, not by their size; small tiles test more.
INTERPRETER_CONFIG = AttentionConfig(16, 16, 1, 1)

# Splits by programs without a split: (at most this many programs, splits).  They aim at 256
# programs or more, two for each of the 108 to 148 multiprocessors of a large GPU.
SPLITS = ((4, 64), (8, 32), (16, 16), (32, 8), (64, 4), (128, 2))
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256  # below, combining costs more than it brings


def choose_config(dtype: torch.dtype, dim: int, rows: int, *, quantised: bool) -> AttentionConfig:
    """Return how heads of ``dim`` are attended to with ``rows`` rows (queries times group)."""
    if INTERPRETED:
        return INTERPRETER_CONFIG
    pages = "float32" if dtype.itemsize == 4 else "quantised" if quantised else "16 bits"
    return CONFIGS[pages, rows <= 16, max(64, next_power_of_2(dim))]


def choose_splits(programs: int, tokens: int) -> int:
    """Return into how many parts the tokens are split, by numbers known to the host.

    It goes by the width of the page table, not by lengths: those lie on the device.  So the
    same call gives the same bits, and so does one with more rows or wider tables only while
    this number stays the same; pass ``splits`` where that matters.

    Args:
        programs: programs without a split.
        tokens: tokens that a row can attend to at most.
    """
    wanted = next((splits for limit, splits in SPLITS if programs <= limit), 1)
    return max(1, min(wanted, tokens // MIN_SPLIT_TOKENS))


def attend(
    a: AttentionArguments,
    *,
    out: Tensor | None,
    splits: int | None,
    shape: torch.Size | None = None,
) -> Tensor:
    """Attend, by the kernels or the reference, into ``out`` (new when None), and return it.

    Args:
        a: checked arguments.
        out: contiguous, of ``shape`` and q's dtype.
        splits: parts of the history that programs work on side by side; None: chosen.
        shape: shape of the result; q's when None.

    Raises:
        InvalidInputError: an ``out`` that does not fit, or a bad number of splits.
    """
    shape = a.q.shape if shape is None else shape
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise InvalidInputError(f"{a.where}: splits must be 1 to {MAX_SPLITS}, got {splits}")
    if out is None:
        out = a.q.new_empty(shape)
    have, want = (out.shape, out.dtype, out.device), (shape, a.q.dtype, a.q.device)
    if have != want or not out.is_contiguous():
        raise InvalidInputError(
            f"{a.where}: out must be a contiguous {a.q.dtype} tensor {list(shape)} on "
            f"{a.q.device}, got {out.dtype} {list(out.shape)} on {out.device}"
        )
    flat = out.view(a.q.shape)
    if not use_triton(a.q):
        flat.copy_(reference_attention(a))
    elif a.q.shape[0]:
        _launch(a, flat, splits)
    return out


def _launch(a: AttentionArguments, out: Tensor, splits: int | None) -> None:
    layout = a.layout
    queries, heads, dim = a.q.shape
    rows = a.max_queries * a.group
    quantised = isinstance(layout, QuantisedLayout)
    config = choose_config(a.q.dtype, dim, rows, quantised=quantised)
    row_tiles = -(-rows // config.rows)
    programs = a.batch * layout.heads * row_tiles
    if splits is None:
        tokens = a.page_table.shape[1] * layout.page_tokens
        if a.window is not None:
            tokens = min(tokens, a.window + a.max_queries)
        splits = choose_splits(programs, tokens)
    partial = top = total = None
    if splits > 1:
        partial = a.q.new_empty((queries, heads, splits, dim), dtype=torch.float32)
        top = a.q.new_empty((queries, heads, splits), dtype=torch.float32)
        total = torch.empty_like(top)
    padded = max(16, next_power_of_2(dim))
    launch(
        attend_pages,
        (programs, splits),
        a.q,
        a.memory,
        _scales_of(a),
        a.page_table,
        a.lengths,
        a.query_starts,
        a.first_page,
        a.sinks,
        out if partial is None else partial,
        top,
        total,
        a.scale,
        a.page_table.shape[1],
        a.max_queries,
        row_tiles,
        config=Config(config.tokens, config.num_warps, config.num_stages),
        PAGE_TOKENS=layout.page_tokens,
        KV_HEADS=layout.heads,
        GROUP=a.group,
        DIM=dim,
        DIM_P2=padded,
        WINDOW=a.window or 0,
        SOFTCAP=a.softcap or 0.0,
        SPLITS=splits,
        **page_constants(layout, a.memory.element_size()),
        DOT=_dot_dtype(a.q.dtype),
        BLOCK_M=config.rows,
        BLOCK_N=config.tokens,
    )
    if splits > 1:
        launch(
            combine_splits,
            (queries * heads,),
            partial,
            top,
            total,
            out,
            config=Config(splits, 8 if padded > 128 else 4),
            DIM=dim,
            DIM_P2=padded,
            SPLITS=splits,
            SPLITS_P2=next_power_of_2(splits),
        )


def page_constants(layout: PageLayout | QuantisedLayout, itemsize: int) -> dict[str, Any]:
    """Return the kernel's constants that say how pages are read."""
    if isinstance(layout, QuantisedLayout):
        (_, k_scales), (v_offset, v_scales) = layout.offsets
        return {
            "V_OFFSET": v_offset,
            "ALIGNMENT": VECTOR_BYTES,
            "SCHEME": layout.code,
            "GROUPS": layout.dim // layout.group_of(layout.dim),
            "K_SCALES": k_scales,
            "V_SCALES": v_scales,
        }
    return {
        "V_OFFSET": layout.v_offset,
        "ALIGNMENT": layout.hint(itemsize),
        "SCHEME": -1,
        "GROUPS": 0,
        "K_SCALES": 0,
        "V_SCALES": 0,
    }


def _scales_of(a: AttentionArguments) -> Tensor | None:
    """Return quantised pages as the 16-bit units that scales are."""
    if not isinstance(a.layout, QuantisedLayout):
        return None
    return a.memory[: a.memory.numel() // 2 * 2].view(torch.uint16)


def _dot_dtype(dtype: torch.dtype) -> object:
    """Return the type of the operands of matrix products.

    The interpreter computes 16-bit products wrongly; there they are done in float32.
    """
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
