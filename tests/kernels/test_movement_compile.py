"""Kernels that move bytes, compiled for four GPUs: registers, no spills, 16-byte accesses."""

from pathlib import Path

import pytest
from aot import (
    SHARED_LIMIT,
    TARGETS,
    ResourceTable,
    access_widths,
    make_case,
    resource_usage,
)

from tierkv.kernels.append import append_rows
from tierkv.kernels.checksum import sum_words
from tierkv.kernels.gather import gather_rows
from tierkv.kernels.launch import CONFIGS
from tierkv.kernels.layer_copy import copy_pages
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.scatter import scatter_rows

TABLE = ResourceTable(Path(__file__).parent / "resources_movement.json")
STRIDES = ("batch", "block", "token", "head")


def page(dim, value_dim=None):
    value_dim = dim if value_dim is None else value_dim
    heads, tokens = 8, 128
    layout = PageLayout(page_tokens=tokens, heads=heads, dim=dim, value_dim=value_dim)
    return {
        "PAGE_TOKENS": tokens,
        "HEADS": heads,
        "DIM": dim,
        "V_DIM": value_dim,
        "V_OFFSET": tokens * heads * dim,
        "HINT": 8,
        "BLOCK_ROWS": layout.tile_rows(CONFIGS["append"].block),
        "BLOCK_DIM": 1 << (dim - 1).bit_length(),
        "BLOCK_V_DIM": 1 << (value_dim - 1).bit_length() if value_dim else 1,
    }


def append_case(name, *constants):
    types = dict.fromkeys(("k", "v", "memory"), "*i16")
    types |= dict.fromkeys(("page_table", "starts", "counts"), "*i64")
    types |= dict.fromkeys(("pages", "tokens"), "i32")
    types |= {f"{x}_{s}": "i32" for x in "kv" for s in ("batch", "token", "head")}
    return make_case(
        f"append {name}",
        append_rows,
        types,
        page(*constants),
        config=CONFIGS["append"],
        unaligned=("pages", "tokens"),
    )


def foreign_case(name, kernel, block_tokens, dim):
    types = dict.fromkeys(("k", "v", "memory"), "*i16")
    types |= dict.fromkeys(("page_table", "slots"), "*i64")
    types |= dict.fromkeys(("pages", "tokens", "start"), "i32")
    types |= {f"{x}_{s}": "i32" for x in "kv" for s in ("block", "token", "head")}
    return make_case(
        f"{name} dim {dim}",
        kernel,
        types,
        {"BLOCK_TOKENS": block_tokens, **page(dim)},
        config=CONFIGS["gather"],
        unaligned=("pages", "tokens", "start"),
    )


CASES = [
    append_case("dim 128", 128),
    append_case("dim 96", 96),
    append_case("latent dim 512", 512, 64),
    foreign_case("gather vllm", gather_rows, 16, 128),
    foreign_case("gather sglang", gather_rows, 1, 64),
    foreign_case("scatter vllm", scatter_rows, 16, 128),
    foreign_case("scatter sglang", scatter_rows, 1, 64),
    make_case(
        "layer_copy",
        copy_pages,
        {
            **dict.fromkeys(("source", "target"), "*i32"),
            **dict.fromkeys(("source_offsets", "target_offsets"), "*i64"),
            "pages": "i32",
        },
        {
            "WORDS": 128 * 1024,
            "PROGRAMS": CONFIGS["layer_copy"].programs,
            "BLOCK": CONFIGS["layer_copy"].block // 4,
        },
        config=CONFIGS["layer_copy"],
        unaligned=("pages",),
    ),
]
FIRST = [
    next(c for c in CASES if c.kernel is kernel)
    for kernel in (append_rows, gather_rows, scatter_rows, copy_pages)
]
CHECKSUM = make_case(
    "checksum",
    sum_words,
    dict.fromkeys(("memory", "offsets", "sums"), "*i64"),
    {
        "WORDS": 64 * 1024,
        "PROGRAMS": CONFIGS["checksum"].programs,
        "BLOCK": CONFIGS["checksum"].block,
    },
    config=CONFIGS["checksum"],
)


# Each kernel for every target; further shapes of it for one of each maker.
SHAPES = [
    pytest.param(case, target, id=f"{case.name} {target}")
    for case in (*CASES, CHECKSUM)
    for target in TARGETS
    if case in (*FIRST, CHECKSUM) or target in ("sm_90", "gfx942")
]


@pytest.mark.parametrize(("case", "target"), SHAPES)
def test_registers_spills_and_widths(case, target):
    kernel = case.compile(target)
    usage = resource_usage(kernel)
    assert usage.stack == usage.spills == 0
    assert usage.shared <= SHARED_LIMIT[target]
    widths = access_widths(kernel)
    assert 16 in widths["load"], widths
    # Page tables and slots are 8 bytes an entry; nothing that moves data may be narrower.
    assert not {1, 2, 4} & widths["load"], widths
    if case is not CHECKSUM:
        assert widths["store"] == {16}, widths
    TABLE.check(case.name, target, usage)


def test_undeclared_alignment_is_seen():
    case = CASES[0]
    constants = {**case.constants, "HINT": 1}
    careless = make_case(case.name, case.kernel, case.types, constants, config=CONFIGS["append"])
    assert access_widths(careless.compile("sm_90"))["store"] == {2}
