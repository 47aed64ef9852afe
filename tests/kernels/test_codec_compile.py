"""The codec kernels, compiled for four GPUs: registers, no spills, wide accesses."""

from pathlib import Path

import pytest
from aot import SHARED_LIMIT, TARGETS, ResourceTable, access_widths, make_case, resource_usage

from tierkv.kernels.dequantise import dequantise_pages
from tierkv.kernels.launch import CONFIGS
from tierkv.kernels.quantise import quantise_pages, unit_constants
from tierkv.kernels.quantised import SCHEMES, TOP, QuantisedLayout

TABLE = ResourceTable(Path(__file__).parent / "resources_codec.json")


def case(kernel, scheme):
    name = "quantise" if kernel is quantise_pages else "dequantise"
    quantised = QuantisedLayout(scheme=scheme, page_tokens=128, heads=8, dim=128)
    _, constants = unit_constants(quantised, 1, CONFIGS[name].block)
    offset = 128 * 8 * 128
    types = {"memory": "*bf16", "values": "*u8", "scales": "*u16", "rows": "*i64"}
    types |= dict.fromkeys(("page_table", "out_table", "data_table"), "*i64")
    if name == "quantise":
        constants |= {"SOURCE": offset, "TOP_CODE": TOP[quantised.code]}
    else:
        types["memory"] = "*i16"
        constants |= {"TARGET": offset, "BFLOAT16": True}
    return make_case(
        f"{name} {scheme}",
        kernel,
        {n: t for n, t in types.items() if n in kernel.arg_names},
        {**constants, "HINT": 8},
        config=CONFIGS[name],
        enable_fp_fusion=False,
    )


CASES = [
    case(kernel, scheme) for kernel in (quantise_pages, dequantise_pages) for scheme in SCHEMES
]
SHAPES = [
    pytest.param(case, target, id=f"{case.name} {target}")
    for case in CASES
    for target in TARGETS
    if "int4" in case.name or target in ("sm_90", "gfx942")
]


@pytest.mark.parametrize(("case", "target"), SHAPES)
def test_registers_spills_and_widths(case, target):
    kernel = case.compile(target)
    usage = resource_usage(kernel)
    assert usage.stack == usage.spills == 0
    assert usage.shared <= SHARED_LIMIT[target]
    widths = access_widths(kernel)
    # What is moved in the model's type is half or more of all bytes.
    side = "load" if case.kernel is quantise_pages else "store"
    assert 16 in widths[side], widths
    TABLE.check(case.name, target, usage)


@pytest.mark.parametrize("name", ["quantise int8", "dequantise int8", "quantise fp8_e4m3"])
def test_nothing_is_fused_or_divided_roughly(name):
    """Bytes are those of the reference only with one rounding an operation."""
    kernel = next(case for case in CASES if case.name == name).compile("sm_90")
    ptx = kernel.asm["ptx"]
    assert "fma.rn.f32" not in ptx
    assert "div.full" not in ptx
    assert ("div.rn" in ptx) == name.startswith("quantise")
    assert ".ftz" not in ptx
