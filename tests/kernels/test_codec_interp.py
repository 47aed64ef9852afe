"""Quantising and checksums, interpreted: the reference's bytes exactly, and a sound error."""

import pytest
import torch
from guard import guarded, sparse

from tierkv.kernels import checksum as checksums
from tierkv.kernels import dequantise as dequantising
from tierkv.kernels import quantise as quantising
from tierkv.kernels.checksum import checksum, checksum_reference
from tierkv.kernels.dequantise import dequantise, dequantise_reference
from tierkv.kernels.launch import as_words
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantise import encode_reference, quantise, quantise_reference
from tierkv.kernels.quantised import SCHEMES, QuantisedLayout, decode_reference, scale_of_bits

ENDS = ["start", "end"]
# page_tokens, heads, dim, value_dim, group
SHAPES = [(4, 2, 16, 16, 0), (3, 1, 24, 8, 4), (1, 3, 96, 0, 0), (5, 2, 8, 16, 2)]


def same(a, b):
    return torch.equal(as_words(a), as_words(b))


def make(scheme, shape):
    tokens, heads, dim, value_dim, group = shape
    common = {"page_tokens": tokens, "heads": heads, "dim": dim, "value_dim": value_dim}
    layout = PageLayout(**common, multiple=1)
    return layout, QuantisedLayout(scheme=scheme, group=group, **common)


def numbers(count, dtype, seed=0):
    """Numbers of very different size, and all the special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    x *= torch.randn(count, generator=generator).mul(3).exp()
    x[::7] = 0.0
    x[8:16] = 0.0  # a group of zeros only
    x[16:24] *= 1e-38
    x[30], x[31], x[33], x[34] = float("nan"), -0.0, 2.0**126, -1e-45
    if dtype != torch.float16:
        x[40] = float("inf")
    return x.clamp(-65504, 65504).to(dtype) if dtype == torch.float16 else x.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "shape", "at"),
    [
        (torch.bfloat16, SHAPES[0], "end"),
        (torch.bfloat16, SHAPES[1], "start"),
        (torch.bfloat16, SHAPES[2], "end"),
        (torch.bfloat16, SHAPES[3], "start"),
        (torch.float16, SHAPES[0], "start"),
        (torch.float32, SHAPES[1], "end"),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_and_values_are_those_of_the_reference(scheme, dtype, shape, at):
    layout, quantised = make(scheme, shape)
    memory = numbers(4 * layout.elements, dtype)
    table = torch.tensor([3, 0, 2]) * layout.elements
    spots = torch.tensor([1, 3, 0]) * quantised.layer_bytes
    rows = torch.tensor([layout.page_tokens, layout.page_tokens - 1, 0])
    empty = torch.full((4 * quantised.layer_bytes,), 0xA5, dtype=torch.uint8)
    layouts = {"layout": layout, "quantised": quantised}

    got, twin = guarded(empty, at=at), empty.clone()
    safe = [guarded(t, at=at) for t in (memory, table, spots, rows)]
    quantise(safe[0], safe[1], got, safe[2], rows=safe[3], **layouts)
    quantise_reference(memory, table, twin, spots, rows=rows, **layouts)
    assert same(got, twin)
    # Of other pages, and of gaps between sections, not a byte has changed.
    other = slice(2 * quantised.layer_bytes, 3 * quantised.layer_bytes)
    assert same(got[other], empty[other])

    back, back_twin = guarded(memory, at=at), memory.clone()
    dequantise(got, safe[2], back, safe[1], rows=safe[3], **layouts)
    dequantise_reference(twin, spots, back_twin, table, rows=rows, **layouts)
    assert same(back, back_twin)
    # A row that is not filled stays.
    assert same(layout.rows(back, 0, 0)[-1], layout.rows(memory, 0, 0)[-1])
    full = layout.rows(back, 3 * layout.elements, 0)
    assert not full.isnan().any()
    assert not full.isinf().any()


def test_all_rows_by_default_and_no_pages_at_all():
    layout, quantised = make("int8", SHAPES[0])
    memory = numbers(layout.elements, torch.float32)
    out = torch.zeros(quantised.layer_bytes, dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.int64)
    quantise(memory, nothing, out, nothing, layout=layout, quantised=quantised)
    assert not out.any()
    here = torch.tensor([0])
    quantise(memory, here, out, here, layout=layout, quantised=quantised)
    values, scales = quantised.sections(out, 0, 1)
    assert values[-1].any()
    assert scales[-1].to(torch.int32).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_value_differs_by_half_a_step_at_most(scheme):
    """Against float64 arithmetic that knows neither the kernel nor the reference."""
    layout, quantised = make(scheme, (8, 2, 32, 32, 16))
    memory = torch.randn(layout.elements, generator=torch.Generator().manual_seed(1))
    memory *= 5
    out = torch.zeros(quantised.layer_bytes, dtype=torch.uint8)
    back, here = torch.zeros_like(memory), torch.tensor([0])
    quantise(memory, here, out, here, layout=layout, quantised=quantised)
    dequantise(out, here, back, here, layout=layout, quantised=quantised)
    groups = memory.double().view(-1, 16)
    largest = groups.abs().amax(1, keepdim=True)
    error = (back.double().view(-1, 16) - groups).abs()
    if scheme == "fp8_e4m3":
        bound = torch.maximum(groups.abs() / 16, largest / 448 * 2.0**-10)
    else:
        bound = largest / {"int8": 127, "int4": 7}[scheme] / 2
    # A scale is rounded up to 8 bits: by less than 1/128.
    assert bool((error <= bound * (1 + 2.0**-7) + 1e-6).all())
    assert float((error / bound).max()) > 0.9  # and the bound is no idle one


def test_every_float16_number_is_encoded_like_the_reference():
    """All 63,488 finite ones, so that every rounding of every scheme is met."""
    dim = 256
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    tokens = every.numel() // dim
    for scheme in SCHEMES:
        layout, quantised = make(scheme, (tokens, 1, dim, 0, 0))
        memory = every[: tokens * dim].clone()
        one = torch.zeros(quantised.layer_bytes, dtype=torch.uint8)
        two, here = one.clone(), torch.tensor([0])
        layouts = {"layout": layout, "quantised": quantised}
        quantise(memory, here, one, here, **layouts)
        quantise_reference(memory, here, two, here, rows=torch.tensor([tokens]), **layouts)
        assert same(one, two)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_code_is_read_as_the_format_says(scheme):
    layout, quantised = make(scheme, (4, 1, 64, 0, 64 if scheme != "int4" else 32))
    data = torch.zeros(quantised.layer_bytes, dtype=torch.uint8)
    values, scales = quantised.sections(data, 0, 0)
    values.view(-1)[:] = torch.arange(values.numel()).to(torch.uint8)
    scales.view(torch.int16)[:] = 0x3FC0  # 1.5
    memory, here = torch.zeros(layout.elements), torch.tensor([0])
    dequantise(data, here, memory, here, layout=layout, quantised=quantised)
    codes = values.view(4, -1)
    if scheme == "int8":
        expected = codes.view(torch.int8).float()
    elif scheme == "fp8_e4m3":
        expected = codes.view(torch.float8_e4m3fn).float()
        expected[expected.isnan()] = memory.view(4, 64)[expected.isnan()] / 1.5  # no such code
    else:
        expected = torch.cat(((codes & 15).float() - 8, (codes >> 4).float() - 8), dim=1)
    assert same(memory.view(4, 64), expected * 1.5)


def test_a_head_is_read_back_by_the_reference_alone():
    x = torch.tensor([[1.0, -2.0, 0.5, 3.5, 7.0, 0.0, -7.0, 14.0]])
    quantised = QuantisedLayout(scheme="int4", page_tokens=1, heads=1, dim=8, group=4)
    values, scales = encode_reference(x, quantised)
    assert values.tolist() == [[10 | 12 << 4, 4 | 8 << 4, 9 | 4 << 4, 15 | 15 << 4]]
    assert scale_of_bits(scales).tolist() == [[0.5, 2.0]]
    again = decode_reference(values, scales, quantised)
    assert bool(((again - x).abs() <= torch.tensor([0.25] * 4 + [1.0] * 4)).all())


def by_words(data):
    """The checksum by the words of its docstring, in Python's integers."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    raw = bytes(data.tolist())
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    total = len(words) * golden
    for i, word in enumerate(words):
        x = word ^ ((i + 1) * golden & mask)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        total += x ^ (x >> 31)
    return total & mask


def unsigned(sums):
    return [x & ((1 << 64) - 1) for x in sums.tolist()]


@pytest.mark.parametrize("at", ENDS)
@pytest.mark.parametrize("nbytes", [0, 8, 24, 8192, 8200, 90000])
def test_checksum_is_that_of_its_definition(nbytes, at):
    stride = -(-nbytes // 16) * 16
    memory = torch.randint(0, 256, (2 * stride + nbytes,)).to(torch.uint8)
    offsets = torch.tensor([2, 0, 1]) * stride
    expected = [by_words(memory[o : o + nbytes]) for o in offsets.tolist()]
    got = checksum(guarded(memory, at=at), guarded(offsets, at=at), nbytes=nbytes)
    assert unsigned(got) == expected
    assert unsigned(checksum_reference(memory, offsets, nbytes=nbytes)) == expected


def test_checksum_sees_every_flipped_bit_and_swapped_words():
    data = torch.randint(0, 256, (48,)).to(torch.uint8)
    copies = data.repeat(48 * 8 + 2, 1)
    for bit in range(48 * 8):
        copies[bit, bit // 8] ^= 1 << bit % 8
    copies[-2] = torch.cat((data[8:16], data[:8], data[16:]))
    offsets = torch.arange(len(copies)) * 48
    sums = checksum_reference(copies.flatten(), offsets, nbytes=48)
    assert len(set(sums.tolist())) == len(copies)
    some = offsets[::16].contiguous()
    assert torch.equal(checksum(copies.flatten(), some, nbytes=48), sums[::16])


def test_offsets_beyond_two_to_the_31():
    layout, quantised = make("int4", SHAPES[0])
    memory, data = sparse(6 << 30, torch.bfloat16), sparse(6 << 30, torch.uint8)
    table = torch.tensor([memory.numel() - layout.elements])
    spots = torch.tensor([data.numel() - quantised.layer_bytes])
    layout.rows(memory, int(table), 0)[:] = torch.arange(16)
    quantise(memory, table, data, spots, layout=layout, quantised=quantised)
    layout.rows(memory, int(table), 0).zero_()
    dequantise(data, spots, memory, table, layout=layout, quantised=quantised)
    assert float(layout.rows(memory, int(table), 0)[3, 1, 15]) == pytest.approx(15, rel=0.01)
    words = sparse(17 << 30, torch.uint8)  # 8 bytes each, more than 2**31 of them
    words[-16:] = 3
    far = checksum(words, torch.tensor([words.numel() - 16]), nbytes=16)
    assert unsigned(far) == [by_words(words[-16:])]


def test_kernels_ran_and_not_their_references(monkeypatch):
    def never(*_, **__):
        raise AssertionError("the reference ran")

    for module, name in (
        (quantising, "quantise"),
        (dequantising, "dequantise"),
        (checksums, "checksum"),
    ):
        monkeypatch.setattr(module, f"{name}_reference", never)
    layout, quantised = make("int8", SHAPES[0])
    memory, here = torch.zeros(layout.elements), torch.tensor([0])
    data = torch.zeros(quantised.layer_bytes, dtype=torch.uint8)
    quantise(memory, here, data, here, layout=layout, quantised=quantised)
    dequantise(data, here, memory, here, layout=layout, quantised=quantised)
    checksum(data, here, nbytes=64)
