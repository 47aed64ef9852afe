"""The kernels of paged attention, interpreted, against the float64 reference.

Whatever they must not read is NaN, or lies outside of memory that kills the process.
"""

import pytest
import torch
from attention_cases import Case, assert_close
from guard import guarded, sparse

from tierkv.kernels import attention_launch
from tierkv.kernels.paged_decode import paged_decode
from tierkv.kernels.paged_prefill import paged_prefill
from tierkv.kernels.quantise import encode_reference
from tierkv.kernels.quantised import QuantisedLayout
from tierkv.kernels.quantised_attention import quantised_decode, quantised_prefill

BF16, FP16 = torch.bfloat16, torch.float16

DECODE = {
    "one_token": (Case([1]), 1),
    "one_token_split": (Case([1]), 3),
    "rows_of_any_length": (Case([33, 0, 1, 16, 17], heads=1), 1),
    "more_splits_than_tiles": (Case([33, 0, 17]), 5),
    "two_splits": (Case([49, 31], group=1), 2),
    "shared_pages": (Case([40, 35], shared=True), 1),
    "small_pages": (Case([21, 6], page_tokens=4), 2),
    "page_of_several_tiles": (Case([70, 31], page_tokens=64, heads=1), 2),
    "page_no_multiple_of_a_tile": (Case([30, 13], page_tokens=12), 1),
    "window_smaller_than_page": (Case([45, 3, 34], window=5, heads=1), 1),
    "window_across_pages": (Case([45, 3, 60], page_tokens=12, window=30, heads=1), 2),
    "window_of_one": (Case([45, 1], window=1), 1),
    "group_1": (Case([20], heads=2, group=1), 1),
    "group_3": (Case([20], heads=1, group=3), 2),
    "group_4": (Case([20], group=4, dtype=BF16), 1),
    "group_16": (Case([20], heads=1, group=16), 1),
    "group_20": (Case([20], heads=1, group=20), 2),
    "dim_16": (Case([20], dim=16), 2),
    "dim_96": (Case([20, 9], dim=96), 2),
    "dim_128_bf16": (Case([20], dim=128, dtype=BF16), 2),
    "dim_256_fp16": (Case([20], heads=1, dim=256, dtype=FP16), 1),
    "softcap": (Case([35], softcap=2.0), 2),
    "sinks": (Case([35, 1, 0], sinks=True, heads=1), 1),
    "sinks_split": (Case([35, 1], sinks=True, window=20, dtype=BF16), 2),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(name):
    case, splits = DECODE[name]
    out = case.out()
    got = paged_decode(
        case.q,
        case.memory,
        case.table,
        case.lens,
        out=out,
        splits=splits,
        **case.pages,
        **case.options,
    )
    assert got is out
    assert_close(got, case.expected(), case.dtype)


PREFILL = {
    "whole_prompt": (Case([19], queries=19), 1),
    "over_a_prefix": (Case([37, 20], queries=5), 1),
    "over_a_prefix_split": (Case([60, 20], queries=3, heads=1), 3),
    "ragged": (Case([37, 1, 9, 22], queries=[5, 1, 0, 22], heads=1), 2),
    "rows_in_many_tiles": (Case([22], queries=22, heads=1, group=3), 1),
    "window_smaller_than_page": (Case([45, 20], queries=9, window=4, heads=1), 1),
    "window_across_pages": (Case([45, 50], queries=[20, 3], window=14, page_tokens=12, heads=1), 2),
    "bf16_96": (Case([25], queries=9, dim=96, dtype=BF16, heads=1), 1),
    "fp16_256": (Case([25], queries=9, dim=256, dtype=FP16, heads=1, group=1), 1),
    "softcap_and_sinks": (Case([25], queries=9, softcap=3.0, sinks=True), 2),
}


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name):
    case, splits = PREFILL[name]
    ragged = {}
    q, out = case.q, case.out()
    if case.starts is None:
        q = q.unflatten(0, (len(case.lengths), case.queries))
        out = out.view(q.shape)
    else:
        ragged = {"query_starts": case.starts, "max_queries": case.max_queries}
    got = paged_prefill(
        q,
        case.memory,
        case.table,
        case.lens,
        out=out,
        splits=splits,
        **ragged,
        **case.pages,
        **case.options,
    )
    assert got.shape == q.shape
    assert_close(got.flatten(0, -3), case.expected(), case.dtype)


QUANTISED = {
    "int8": ("int8", 0, Case([21, 33], dim=64), 2),
    "int8_groups": ("int8", 32, Case([21], dim=96, dtype=BF16), 1),
    "int8_96": ("int8", 0, Case([21], dim=96, page_tokens=12), 1),
    "fp8": ("fp8_e4m3", 0, Case([21, 3], dim=128, window=9), 1),
    "fp8_groups": ("fp8_e4m3", 16, Case([21], dim=64, dtype=FP16, sinks=True), 2),
    "int4": ("int4", 0, Case([21, 33], dim=64), 2),
    "int4_96": ("int4", 0, Case([21], dim=96, page_tokens=12), 1),
    "int4_256": ("int4", 64, Case([21], dim=256, heads=1, dtype=BF16), 1),
    "int8_prefill": ("int8", 0, Case([21, 33], queries=4, dim=64, heads=1), 2),
    "int4_prefill": ("int4", 0, Case([21, 33], queries=[7, 2], dim=96, heads=1), 1),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised(name):
    scheme, group, case, splits = QUANTISED[name]
    layout = QuantisedLayout(
        scheme=scheme, page_tokens=case.page_tokens, heads=case.heads, dim=case.dim, group=group
    )
    used = case.table[case.table >= 0]
    places = (torch.randperm(len(used)) * layout.layer_bytes).contiguous()
    # Rows that hold nothing stay 0xFF, NaN in fp8, and so do their scales.
    data = torch.full((len(used) * layout.layer_bytes,), 0xFF, dtype=torch.uint8)
    table = torch.full_like(case.table, -(1 << 40))
    table[case.table >= 0] = places
    fill(case, layout, used, places, data)
    data, table = guarded(data), guarded(table)
    want = case.expected(memory=data, table=table, layout=layout)
    q, call = case.q, quantised_decode
    ragged = {}
    if name.endswith("prefill"):
        call = quantised_prefill
        if case.starts is not None:
            ragged = {"query_starts": case.starts, "max_queries": case.max_queries}
        else:
            q = q.unflatten(0, (len(case.lengths), case.queries))
    got = call(q, data, table, case.lens, quantised=layout, splits=splits, **ragged, **case.options)
    assert_close(got.flatten(0, -3), want, case.dtype)
    exact = case.expected()
    assert (want - exact).abs().max() < {"int8": 0.05, "fp8_e4m3": 0.2, "int4": 0.8}[scheme]


def fill(case, layout, used, places, data):
    """Quantise the rows that hold something, by the reference that the codec is tested with."""
    for source, target in zip(used.tolist(), places.tolist(), strict=True):
        for component in (0, 1):
            rows = case.layout.rows(case.memory, source, component)
            held = ~rows.isnan().any(-1).any(-1)
            values, scales = layout.sections(data, target, component)
            codes, bits = encode_reference(rows, layout)
            values[held] = codes[held]
            scales.view(torch.int16)[held] = bits.view(torch.int16)[held]


def test_offsets_beyond_32_bits():
    case = Case([20], dtype=BF16)
    far = (1 << 31) + (1 << 20)
    memory = sparse(2 * (far + case.memory.numel()), BF16)
    memory[far:] = case.memory
    table = case.table + far
    got = paged_decode(case.q, memory, table, case.lens, **case.pages, **case.options)
    assert_close(got, case.expected(), BF16)


def test_splits_follow_the_table_when_not_given(monkeypatch):
    case = Case([40, 12])
    monkeypatch.setattr(attention_launch, "MIN_SPLIT_TOKENS", 16)
    assert attention_launch.choose_splits(4, 48) == 3
    got = paged_decode(case.q, case.memory, case.table, case.lens, **case.pages, **case.options)
    assert_close(got, case.expected(), torch.float32)


def test_nothing_to_do():
    case = Case([20], queries=[0])
    got = paged_prefill(
        case.q,
        case.memory,
        case.table,
        case.lens,
        query_starts=case.starts,
        max_queries=0,
        **case.pages,
        **case.options,
    )
    assert got.shape == (0, 4, 64)
