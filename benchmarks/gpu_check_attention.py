"""Attention kernels against the reference in float64, on the GPU."""

from __future__ import annotations

import torch
from gpu_check_kernels import SMALL, quantised_layout
from gpu_check_pages import LLAMA, SHAPES, Pages, Shape
from gpu_check_support import DTYPES, Check

from tierkv.kernels.attention_arguments import AttentionArguments
from tierkv.kernels.attention_reference import reference_attention
from tierkv.kernels.paged_decode import paged_decode
from tierkv.kernels.paged_prefill import paged_prefill
from tierkv.kernels.quantise import quantise
from tierkv.kernels.quantised import SCHEMES
from tierkv.kernels.quantised_attention import quantised_decode, quantised_prefill

# A unit in the last place of the result's type, for float32 what sums of thousands lose.
# The weights are rounded to the type as well before they meet V, whose elements are about 1.
UNIT = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def run_decode(check: Check) -> None:
    """One query a row: every dtype, model shape, with and without a split history."""
    for label, shape, dtype in _shapes(check):
        lengths = [45, 1, 130] if check.small else [4097, 16, 1, 777]
        with check.guarded(f"decode {label}"):
            pages = Pages(check, shape, lengths, dtype)
            for splits in (None, 1):
                error = decode_error(check, pages, splits)
                check.row(f"decode {label}, splits {splits}", error, "of bound", ok=error <= 1)


def run_prefill(check: Check) -> None:
    """Several queries a row over a history."""
    for label, shape, dtype in _shapes(check):
        lengths, queries = ([45, 40], 7) if check.small else ([2048, 130], 128)
        with check.guarded(f"prefill {label}"):
            pages = Pages(check, shape, lengths, dtype)
            error = prefill_error(check, pages, queries)
            check.row(f"prefill {label}", error, "of bound", ok=error <= 1)


def run_quantised(check: Check) -> None:
    """Both over quantised pages, against the reference over the same codes."""
    shape = SMALL if check.small else LLAMA
    for name, dtype in DTYPES.items():
        for scheme in SCHEMES:
            if name != "bf16" and scheme != "int8":
                continue
            with check.guarded(f"{scheme} {name}"):
                errors = quantised_errors(check, scheme, shape, dtype)
                for what, error in errors.items():
                    label = f"{what} {scheme} {name} {shape.name}"
                    check.row(label, error, "of bound", ok=error <= 1)


def _shapes(check: Check):
    for name, shapes in SHAPES.items():
        for shape in [SMALL] if check.small else shapes:
            yield f"{name} {shape.name}", shape, DTYPES[name]


def excess(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest error as a multiple of what is allowed."""
    allowed = UNIT[dtype] * (want.abs() + 0.5)
    assert bool(got.isfinite().all()), "the result is not finite"
    return float(((got.double() - want).abs() / allowed).max())


def expected(memory, table, lengths, layout, q, queries: int, options: dict) -> torch.Tensor:
    """Return the reference's result in float64, on the CPU."""
    options = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    arguments = AttentionArguments(
        where="check",
        q=q.cpu(),
        memory=memory.cpu(),
        page_table=table.cpu(),
        lengths=lengths.cpu(),
        layout=layout,
        query_starts=None,
        max_queries=queries,
        first_page=None,
        **options,
    )
    return reference_attention(arguments, compute_dtype=torch.float64)


def paged(shape: Shape, layout) -> dict:
    """Return the arguments of a kernel that say where K and V lie."""
    return {
        "v_offset": layout.v_offset,
        "page_tokens": shape.page_tokens,
        "kv_heads": shape.heads,
    }


def queries_of(check: Check, shape: Shape, batch: int, queries: int, dtype: torch.dtype):
    """Return queries ``[batch * queries, q_heads, dim]`` whose weights are far from even."""
    heads = shape.heads * shape.group
    return 2 * check.random(batch * queries, heads, shape.dim, dtype=dtype, seed=4)


def decode_error(check: Check, pages: Pages, splits: int | None) -> float:
    """Return how far decode is from the reference, as a multiple of the bound."""
    shape, options = pages.shape, pages.options(check)
    q = queries_of(check, shape, len(pages.lengths), 1, pages.dtype)
    where = paged(shape, pages.layout)
    got = paged_decode(
        q, pages.memory, pages.table, pages.lengths, splits=splits, **where, **options
    )
    want = expected(pages.memory, pages.table, pages.lengths, pages.layout, q, 1, options)
    return excess(got.cpu(), want, pages.dtype)


def prefill_error(check: Check, pages: Pages, queries: int) -> float:
    """Return how far prefill is from the reference, as a multiple of the bound."""
    shape, options, batch = pages.shape, pages.options(check), len(pages.lengths)
    q = queries_of(check, shape, batch, queries, pages.dtype)
    where = paged(shape, pages.layout)
    rows = q.view(batch, queries, *q.shape[1:])
    got = paged_prefill(rows, pages.memory, pages.table, pages.lengths, **where, **options)
    want = expected(pages.memory, pages.table, pages.lengths, pages.layout, q, queries, options)
    return excess(got.cpu().flatten(0, 1), want, pages.dtype)


def quantised_errors(
    check: Check, scheme: str, shape: Shape, dtype: torch.dtype
) -> dict[str, float]:
    """Return how far both are from the reference over quantised pages."""
    lengths, queries = ([45, 17], 5) if check.small else ([2048, 300], 64)
    pages, quantised = Pages(check, shape, lengths, dtype), quantised_layout(scheme, shape)
    places = pages.places
    entries = torch.arange(places.shape[0], device=check.device) * quantised.layer_bytes
    data = torch.zeros(entries.shape[0] * quantised.layer_bytes, dtype=torch.uint8)
    data = data.to(check.device)
    quantise(pages.memory, places, data, entries, layout=pages.layout, quantised=quantised)
    table = torch.full_like(pages.table, -1)
    table[pages.table >= 0] = entries
    options, batch = pages.options(check), len(lengths)
    errors = {}
    for what, count in (("quantised_decode", 1), ("quantised_prefill", queries)):
        q = queries_of(check, shape, batch, count, dtype)
        want = expected(data, table, pages.lengths, quantised, q, count, options)
        given = {"quantised": quantised, **options}
        if count == 1:
            got = quantised_decode(q, data, table, pages.lengths, **given)
        else:
            rows = q.view(batch, count, *q.shape[1:])
            got = quantised_prefill(rows, data, table, pages.lengths, **given).flatten(0, 1)
        errors[what] = excess(got.cpu(), want, dtype)
    return errors
