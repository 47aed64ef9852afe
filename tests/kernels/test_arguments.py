"""What the kernels refuse, and what they do on CPU tensors and without Triton."""

import subprocess
import sys

import pytest
import torch

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.kernels.append import append
from tierkv.kernels.checksum import checksum
from tierkv.kernels.dequantise import dequantise
from tierkv.kernels.foreign import ForeignLayer
from tierkv.kernels.gather import gather
from tierkv.kernels.launch import INTERPRETED, check_int64
from tierkv.kernels.layer_copy import layer_copy
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantise import quantise
from tierkv.kernels.quantised import QuantisedLayout
from tierkv.kernels.scatter import scatter

LAYOUT = PageLayout(page_tokens=4, heads=2, dim=16)
QUANTISED = QuantisedLayout(scheme="int8", page_tokens=4, heads=2, dim=16)
HERE = torch.tensor([0])


def memory(dtype=torch.float32, pages=2):
    return torch.zeros(pages * LAYOUT.elements, dtype=dtype)


def data(pages=1):
    return torch.zeros(pages * QUANTISED.layer_bytes, dtype=torch.uint8)


def new(tokens=2, heads=2, dim=16, dtype=torch.float32):
    return torch.ones(heads, tokens, dim, dtype=dtype)


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")
def test_references_serve_cpu_tensors_there_and_back():
    pool = torch.randn(LAYOUT.elements)
    here = torch.tensor([LAYOUT.elements])
    ours = memory()
    k = torch.randn(2, 5, 2, 16).transpose(1, 2)
    table = torch.tensor([[here.item(), -1], [0, -1]])
    append(ours, table, k[:, :, :3], k[:, :, 2:5], layout=LAYOUT, starts=torch.tensor([1, 0]))
    assert torch.equal(LAYOUT.rows(ours, 0, 1)[:3].transpose(0, 1), k[1, :, 2:5])
    assert torch.equal(LAYOUT.rows(ours, int(here), 0)[1:].transpose(0, 1), k[0, :, :3])
    theirs = ForeignLayer.from_vllm(torch.zeros(2, 3, 2, 2, 16), kv_axis=0)
    slots = theirs.slots(torch.tensor([2, 0]), 4)
    scatter(theirs, slots, ours, here, layout=LAYOUT)
    again = memory()
    gather(theirs, slots, again, here, layout=LAYOUT)
    assert torch.equal(again[int(here) :], ours[int(here) :])
    packed, back = data(), memory()
    quantise(pool, HERE, packed, HERE, layout=LAYOUT, quantised=QUANTISED)
    dequantise(packed, HERE, back, HERE, layout=LAYOUT, quantised=QUANTISED)
    assert float((back[: len(pool)] - pool).abs().max()) < 0.02
    copy = data(2)
    bytes_ = QUANTISED.layer_bytes
    layer_copy(packed, copy, HERE, torch.tensor([bytes_]), nbytes=bytes_)
    sums = checksum(copy, torch.tensor([bytes_, 0]), nbytes=bytes_)
    assert sums[0] == checksum(packed, HERE, nbytes=bytes_)[0] != sums[1]


def appending(*, to=None, table=HERE, k=None, v=None, starts=0, counts=None):
    k = new() if k is None else k
    append(
        memory() if to is None else to,
        table,
        k,
        k if v is None else v,
        layout=LAYOUT,
        starts=starts,
        counts=counts,
    )


REFUSED = {
    "head size": (
        lambda: PageLayout(page_tokens=4, heads=1, dim=1024),
        UnsupportedError,
        "heads of 1024 elements",
    ),
    "no heads": (lambda: PageLayout(page_tokens=4, heads=0, dim=8), InvalidInputError, "heads"),
    "other heads": (lambda: appending(k=new(heads=3)), InvalidInputError, "2 heads"),
    "other dim": (lambda: appending(k=new(dim=8)), InvalidInputError, "dim 16"),
    "other type": (
        lambda: appending(k=new(dtype=torch.float16)),
        InvalidInputError,
        "float16 for a memory of torch.float32",
    ),
    "v of other length": (lambda: appending(v=new(tokens=1)), InvalidInputError, "do not fit"),
    "scattered elements": (
        lambda: appending(k=torch.ones(2, 16, 2).transpose(1, 2)),
        InvalidInputError,
        "adjacent",
    ),
    "memory not flat": (lambda: appending(to=memory().view(2, -1)), InvalidInputError, "flat"),
    "table of int32": (lambda: appending(table=HERE.int()), InvalidInputError, "int64"),
    "page outside": (
        lambda: appending(table=torch.tensor([LAYOUT.elements * 2])),
        InvalidInputError,
        "ends at",
    ),
    "page off the grid": (lambda: appending(table=HERE + 1), InvalidInputError, "multiple of 4"),
    "token without a page": (lambda: appending(starts=3), InvalidInputError, "not all of them"),
    "token before the table": (lambda: appending(starts=-1), InvalidInputError, "-1"),
    "more than there are": (
        lambda: appending(counts=torch.tensor([3])),
        InvalidInputError,
        "count 3",
    ),
    "vllm without two": (
        lambda: ForeignLayer.from_vllm(torch.zeros(3, 2, 4, 2, 16), kv_axis=0),
        InvalidInputError,
        "2 long at axis 0",
    ),
    "slot outside": (
        lambda: gather(
            ForeignLayer.from_sglang(torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)),
            torch.tensor([3]),
            memory(),
            HERE,
            layout=LAYOUT,
        ),
        InvalidInputError,
        "slot 3",
    ),
    "pool of another type": (
        lambda: scatter(
            ForeignLayer.from_sglang(torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)),
            torch.tensor([0]),
            memory(torch.bfloat16),
            HERE,
            layout=LAYOUT,
        ),
        InvalidInputError,
        "bfloat16",
    ),
    "scheme": (
        lambda: QuantisedLayout(scheme="int3", page_tokens=4, heads=1, dim=8),
        UnsupportedError,
        "int3",
    ),
    "group": (
        lambda: QuantisedLayout(scheme="int4", page_tokens=4, heads=1, dim=32, group=32),
        UnsupportedError,
        "groups of 32",
    ),
    "odd head for int4": (
        lambda: QuantisedLayout(scheme="int4", page_tokens=4, heads=1, dim=15),
        UnsupportedError,
        "multiples of 2",
    ),
    "integers to quantise": (
        lambda: quantise(
            memory(torch.int32), HERE, data(), HERE, layout=LAYOUT, quantised=QUANTISED
        ),
        UnsupportedError,
        "float32, bfloat16, float16",
    ),
    "layouts that differ": (
        lambda: dequantise(
            data(),
            HERE,
            memory(),
            HERE,
            layout=PageLayout(page_tokens=2, heads=4, dim=16),
            quantised=QUANTISED,
        ),
        InvalidInputError,
        "layouts differ",
    ),
    "quantised page outside": (
        lambda: quantise(memory(), HERE, data(), HERE + 16, layout=LAYOUT, quantised=QUANTISED),
        InvalidInputError,
        "leave room",
    ),
    "page that is not there": (
        lambda: dequantise(data(), HERE, memory(), HERE - 1, layout=LAYOUT, quantised=QUANTISED),
        InvalidInputError,
        "must be there",
    ),
    "copy of odd length": (
        lambda: layer_copy(data(), data(), HERE, HERE, nbytes=24),
        InvalidInputError,
        "24 bytes",
    ),
    "copy outside": (
        lambda: layer_copy(data(), data(), HERE - 16, HERE, nbytes=32),
        InvalidInputError,
        "from -16",
    ),
    "copy of other counts": (
        lambda: layer_copy(data(), data(), HERE, torch.tensor([0, 32]), nbytes=32),
        InvalidInputError,
        "target_offsets",
    ),
    "checksum of odd length": (
        lambda: checksum(data(), HERE, nbytes=12),
        InvalidInputError,
        "multiples of 8",
    ),
    "checksum outside": (
        lambda: checksum(data(), HERE, nbytes=1 << 20),
        InvalidInputError,
        "leave room",
    ),
    "strided table": (
        lambda: check_int64("here", "table", torch.zeros(4, dtype=torch.int64)[::2], (2,)),
        InvalidInputError,
        "contiguous",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from tierkv.errors import UnsupportedError
from tierkv.kernels import append, checksum, dequantise, gather, layer_copy, quantise, scatter
from tierkv.kernels.launch import CONFIGS, HAS_TRITON, launch
assert not HAS_TRITON
data = torch.arange(64, dtype=torch.uint8)
here = torch.tensor([0])
assert checksum.checksum(data, here, nbytes=64).shape == (1,)
try:
    launch(checksum.sum_words, (1,), data, config=CONFIGS["checksum"])
except UnsupportedError as error:
    print(error)
"""


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_references_serve_and_kernels_say_what_is_missing():
    assert "kernel sum_words needs Triton: pip install" in run_python(WITHOUT)


def test_importing_the_package_imports_neither_torch_nor_triton():
    code = "import sys, tierkv.kernels; print({'torch', 'triton'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"
