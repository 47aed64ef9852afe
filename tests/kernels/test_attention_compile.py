"""Paged attention compiles for GPUs that are not here, without spills and within their limits."""

from dataclasses import dataclass
from pathlib import Path

import aot
import pytest
import torch

from tierkv.kernels import attention_launch
from tierkv.kernels.attention_kernel import attend_pages, combine_splits
from tierkv.kernels.launch import next_power_of_2, tl
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantised import QuantisedLayout

TABLE = aot.ResourceTable(Path(__file__).parent / "resources_attention.json")
MAX_STACK = 64  # bytes: what the compiler may spill around a loop, never within
DTYPES = {"bf16": (torch.bfloat16, tl.bfloat16), "fp16": (torch.float16, tl.float16)}
DTYPES["fp32"] = (torch.float32, tl.float32)


@dataclass(frozen=True)
class Shape:
    """A geometry that a model has, and where it is compiled."""

    dim: int
    heads: int
    group: int
    dtype: str = "bf16"
    page_tokens: int = 128
    queries: int = 1
    splits: int = 8
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scheme: str | None = None
    scale_group: int = 0
    targets: tuple[str, ...] = tuple(aot.TARGETS)


SHAPES = {
    "decode": Shape(128, 8, 4),  # Llama 3, Qwen 3
    "decode_64_sinks": Shape(
        64, 8, 8, window=128, sinks=True, targets=("sm_90", "gfx942")
    ),  # gpt-oss
    "decode_96": Shape(96, 32, 1, page_tokens=64, splits=1, targets=("sm_90",)),  # Phi 3
    "decode_256_cap": Shape(
        256, 4, 2, window=4096, softcap=50.0, targets=("sm_80", "sm_100")
    ),  # Gemma 2
    "decode_odd_page": Shape(128, 8, 4, page_tokens=48, targets=("sm_80",)),
    "decode_fp16": Shape(128, 8, 4, dtype="fp16", targets=("sm_80",)),
    "decode_fp32": Shape(64, 3, 3, dtype="fp32", targets=("sm_90",)),  # SmolLM2
    "decode_fp32_256": Shape(256, 1, 4, dtype="fp32", splits=1, targets=("gfx942",)),  # Gemma 3
    "prefill": Shape(128, 8, 4, queries=4096, splits=1),
    "prefill_split": Shape(128, 8, 4, queries=64, targets=("sm_80",)),
    "prefill_64_sinks": Shape(
        64, 8, 8, queries=4096, splits=1, window=128, sinks=True, targets=("sm_90",)
    ),
    "prefill_96": Shape(96, 32, 1, queries=4096, splits=1, targets=("sm_90",)),
    "prefill_256_cap": Shape(
        256,
        4,
        2,
        queries=4096,
        splits=1,
        window=4096,
        softcap=50.0,
        targets=("sm_80", "sm_100", "gfx942"),
    ),
    "prefill_fp16": Shape(128, 8, 4, dtype="fp16", queries=4096, splits=1, targets=("sm_80",)),
    "prefill_fp32": Shape(64, 3, 3, dtype="fp32", queries=4096, splits=1, targets=("sm_80",)),
    "prefill_fp32_256": Shape(256, 1, 4, dtype="fp32", queries=4096, splits=1, targets=("sm_100",)),
    "int8_decode": Shape(128, 8, 4, scheme="int8", targets=("sm_80", "sm_90", "gfx942")),
    "fp8_decode": Shape(128, 8, 4, scheme="fp8_e4m3", targets=("sm_80", "sm_100")),
    "int4_decode": Shape(128, 8, 4, scheme="int4", targets=("sm_90", "gfx942")),
    "int4_decode_96": Shape(96, 32, 1, scheme="int4", page_tokens=64, targets=("sm_90",)),
    "int4_decode_256": Shape(256, 4, 2, scheme="int4", targets=("sm_80",)),
    "int8_decode_groups": Shape(64, 8, 8, scheme="int8", scale_group=32, targets=("sm_90",)),
    "int8_prefill": Shape(128, 8, 4, scheme="int8", queries=4096, splits=1, targets=("sm_90",)),
    "fp8_prefill": Shape(128, 8, 4, scheme="fp8_e4m3", queries=4096, splits=1, targets=("sm_80",)),
    "int4_prefill": Shape(128, 8, 4, scheme="int4", queries=4096, splits=1, targets=("sm_100",)),
}
COMPILED = [(name, target) for name, shape in SHAPES.items() for target in shape.targets]


def compile_attention(name, target):
    shape = SHAPES[name]
    torch_dtype, dot = DTYPES[shape.dtype]
    config = attention_launch.choose_config(
        torch_dtype,
        shape.dim,
        shape.queries * shape.group,
        quantised=shape.scheme is not None,
    )
    geometry = {"page_tokens": shape.page_tokens, "heads": shape.heads, "dim": shape.dim}
    if shape.scheme is None:
        layout = PageLayout(**geometry)
    else:
        layout = QuantisedLayout(**geometry, scheme=shape.scheme, group=shape.scale_group)
    constants = {
        "PAGE_TOKENS": shape.page_tokens,
        "KV_HEADS": shape.heads,
        "GROUP": shape.group,
        "DIM": shape.dim,
        "DIM_P2": next_power_of_2(shape.dim),
        "WINDOW": shape.window,
        "SOFTCAP": shape.softcap,
        "SPLITS": shape.splits,
        "DOT": dot,
        "BLOCK_M": config.rows,
        "BLOCK_N": config.tokens,
        **attention_launch.page_constants(layout, torch_dtype.itemsize),
    }
    element = f"*{shape.dtype}"
    signature = {
        "q": element,
        "memory": element if shape.scheme is None else "*u8",
        "page_scales": "*u16",
        "page_table": "*i64",
        "lengths": "*i32",
        "query_starts": "*i64",
        "first_page": "*i64",
        "sinks": element,
        "out": element if shape.splits == 1 else "*fp32",
        "partial_max": "*fp32",
        "partial_sum": "*fp32",
        "scale": "fp32",
        "max_pages": "i32",
        "max_queries": "i32",
        "row_tiles": "i32",
    }
    # What a launch passes as None, or as 1, is a constant there.
    if shape.scheme is None:
        constants |= {"page_scales": None}
    if shape.queries == 1:
        constants |= {"query_starts": None, "max_queries": 1, "row_tiles": 1}
    if not shape.sinks:
        constants |= {"sinks": None}
    if not shape.window:
        constants |= {"first_page": None}
    if shape.splits == 1:
        constants |= {"partial_max": None, "partial_sum": None}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {n: signature[n] for n in attend_pages.arg_names}
    pointers = [n for n, kind in signature.items() if kind.startswith("*")]
    return aot.compile_kernel(
        attend_pages,
        signature,
        constants,
        target,
        aligned=pointers,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def hold(name, target, kernel):
    usage = aot.resource_usage(kernel)
    assert usage.stack <= MAX_STACK, usage
    assert usage.shared <= aot.SHARED_LIMIT[target], usage
    loads = aot.access_widths(kernel)["load"]
    assert 16 in loads, loads
    assert 1 not in loads, loads
    TABLE.check(name, target, usage)


@pytest.mark.parametrize(("name", "target"), COMPILED)
def test_attention_compiles_without_spills(name, target):
    kernel = compile_attention(name, target)
    hold(name, target, kernel)
    if target != "gfx942" and SHAPES[name].dtype != "fp32":
        ahead = "cp.async.cg.shared.global"  # 16 bytes each
        assert ahead in kernel.asm["ptx"], "pages are not loaded ahead"


@pytest.mark.parametrize("target", aot.TARGETS)
def test_combining_compiles_without_spills(target):
    constants = {"DIM": 256, "DIM_P2": 256, "SPLITS": 64, "SPLITS_P2": 64}
    pointers = {"partial": "*fp32", "partial_max": "*fp32", "partial_sum": "*fp32", "out": "*bf16"}
    signature = pointers | dict.fromkeys(constants, "constexpr")
    kernel = aot.compile_kernel(
        combine_splits, signature, constants, target, aligned=pointers, num_warps=8
    )
    hold("combine_256", target, kernel)
