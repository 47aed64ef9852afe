"""Kernels that move bytes, interpreted: against an oracle that moves element by element.

Every tensor that a kernel touches borders on forbidden memory, at its end or at its start.
"""

import pytest
import torch
from guard import guarded, sparse

from tierkv.errors import InvalidInputError
from tierkv.kernels import append as appending
from tierkv.kernels import gather as gathering
from tierkv.kernels import scatter as scattering
from tierkv.kernels.append import append, append_reference
from tierkv.kernels.foreign import ForeignLayer
from tierkv.kernels.gather import gather, gather_reference
from tierkv.kernels.launch import CONFIGS, as_words
from tierkv.kernels.layer_copy import layer_copy
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.scatter import scatter, scatter_reference

ENDS = ["start", "end"]
# page_tokens, heads, dim, value_dim
SHAPES = [(4, 2, 16, 16), (3, 1, 5, 0), (1, 3, 8, 4), (5, 2, 96, 64)]


def bits(shape, dtype, seed=0):
    """Random bits of a type, NaN among them: copies may not look at numbers."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return data.to(torch.uint8).view(dtype)


def same(a, b):
    return torch.equal(as_words(a), as_words(b))


def make_layout(shape, gap=0):
    tokens, heads, dim, value_dim = shape
    offset = tokens * heads * dim + gap
    return PageLayout(
        page_tokens=tokens,
        heads=heads,
        dim=dim,
        value_dim=value_dim,
        value_offset=offset,
        multiple=1,
    )


def dims(layout):
    return [d for d in (layout.dim, layout.v_dim) if d]


def element(layout, table, position, component):
    """Where the row of a token begins, by the contract's words."""
    page, row = divmod(position, layout.page_tokens)
    base = int(table[page]) + (0, layout.v_offset)[component]
    return base + row * layout.heads * dims(layout)[component]


@pytest.mark.parametrize("at", ENDS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.bfloat16, shape) for shape in SHAPES),
        (torch.float16, SHAPES[0]),
        (torch.float32, SHAPES[3]),
        (torch.float8_e4m3fn, SHAPES[1]),
        (torch.uint8, SHAPES[2]),
    ],
)
def test_append_writes_rows_where_the_table_says_and_nowhere_else(dtype, shape, at):
    layout = make_layout(shape)
    tokens, pages = 2 * layout.page_tokens + 1, 6
    memory = bits((pages * layout.elements,), dtype)
    table = torch.tensor([[4, 0, 3, -1], [2, 5, 1, -1]]) * layout.elements
    starts = torch.tensor([layout.page_tokens - 1, 0])
    counts = torch.tensor([tokens, 1])
    new = [bits((2, layout.heads, tokens, d), dtype, seed=d) for d in dims(layout)]

    expected = memory.clone()
    for row in range(2):
        for token in range(int(counts[row])):
            for c, x in enumerate(new):
                begin = element(layout, table[row], int(starts[row]) + token, c)
                part = x[row, :, token].reshape(-1)
                expected[begin : begin + part.numel()] = part

    got = guarded(memory, at=at)
    append(
        got,
        guarded(table, at=at),
        *(guarded(x, at=at) for x in new),
        layout=layout,
        starts=guarded(starts, at=at),
        counts=guarded(counts, at=at),
    )
    assert same(got, expected)
    twin = memory.clone()
    by_token = [x.transpose(1, 2) for x in new]
    append_reference(twin, table, by_token, layout=layout, starts=starts, counts=counts)
    assert same(twin, expected)


def test_append_takes_one_sequence_tokens_first_strided_and_with_a_gap_before_v():
    layout = make_layout((4, 2, 16, 16), gap=32)
    memory = bits((4 * layout.elements,), torch.bfloat16)
    table = torch.tensor([2, 1]) * layout.elements
    fused = bits((5, 2, 32), torch.bfloat16, seed=1)  # K and V side by side
    k, v = fused[..., :16], fused[..., 16:]
    one, two = memory.clone(), memory.clone()
    append(one, table, k, v, layout=layout, starts=2, tokens_first=True)
    append(two, table, k.transpose(0, 1), v.transpose(0, 1).contiguous(), layout=layout, starts=2)
    assert same(one, two)
    assert not same(one, memory)
    gap = slice(2 * layout.elements + 128, 2 * layout.elements + 160)
    assert same(one[gap], memory[gap])


@pytest.mark.parametrize("tokens", [0, 1])
def test_append_of_no_token_changes_nothing(tokens):
    layout = make_layout((4, 2, 16, 16))
    memory = bits((layout.elements,), torch.float16)
    got = memory.clone()
    new = bits((2, tokens, 16), torch.float16)
    counts = torch.zeros(1, dtype=torch.int64)
    append(got, torch.tensor([0]), new, new, layout=layout, starts=4, counts=counts)
    assert same(got, memory)


def foreign(kind, layout, slots, dtype, at):
    """An engine's layer of ``slots`` slots of random bits, guarded."""
    block, heads, dim = 4, layout.heads, layout.dim
    if kind == "vllm 0":
        pool = guarded(bits((2, slots // block, block, heads, dim), dtype, 7), at=at)
        return ForeignLayer.from_vllm(pool, kv_axis=0)
    if kind == "vllm 1":
        pool = guarded(bits((slots // block, 2, block, heads, dim), dtype, 7), at=at)
        return ForeignLayer.from_vllm(pool, kv_axis=1)
    if kind == "fused":
        pool = guarded(bits((slots // block, heads, block, dim + layout.v_dim), dtype, 7), at=at)
        return ForeignLayer.from_fused(pool, dim=dim)
    k = guarded(bits((slots, heads, dim), dtype, 7), at=at)
    v = guarded(bits((slots, heads, layout.v_dim), dtype, 8), at=at) if layout.v_dim else None
    return ForeignLayer.from_sglang(k, v)


KINDS = [
    *(("sglang", shape, torch.bfloat16) for shape in SHAPES),
    ("sglang", (4, 2, 16, 16), torch.uint8),
    ("fused", (5, 2, 96, 64), torch.float16),
    ("vllm 0", (6, 2, 16, 16), torch.bfloat16),
    ("vllm 1", (3, 3, 8, 8), torch.float32),
]


@pytest.mark.parametrize("at", ENDS)
@pytest.mark.parametrize(("kind", "shape", "dtype"), KINDS)
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_gather_and_scatter_move_each_token_between_its_slot_and_its_row(
    way, dtype, kind, shape, at
):
    layout = make_layout(shape)
    start, tokens = layout.page_tokens - 1, layout.page_tokens + 2
    memory = bits((5 * layout.elements,), dtype)
    table = torch.tensor([3, 0, 4, 2]) * layout.elements
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[1] = -1
    twin_layer = foreign(kind, layout, 12, dtype, at)
    layer = foreign(kind, layout, 12, dtype, at)

    expected = memory.clone()
    theirs = [x.clone() for x in layer.parts]
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, row = divmod(slot, layer.block_tokens)
        for c, x in enumerate(theirs):
            begin = element(layout, table, start + token, c)
            ours = expected[begin : begin + x[block, row].numel()]
            if way == "gather":
                ours.copy_(x[block, row].reshape(-1))
            else:
                x[block, row] = ours.view(x[block, row].shape)

    got, twin = guarded(memory, at=at), memory.clone()
    run, reference = {
        "gather": (gather, gather_reference),
        "scatter": (scatter, scatter_reference),
    }[way]
    run(layer, guarded(slots, at=at), got, guarded(table, at=at), layout=layout, start=start)
    reference(twin_layer, slots, twin, table, layout=layout, start=start)
    assert same(got, expected)
    assert same(twin, expected)
    for have, also, want in zip(layer.parts, twin_layer.parts, theirs, strict=True):
        assert same(have.contiguous(), want.contiguous())
        assert same(also.contiguous(), want.contiguous())


def test_slots_of_a_block_table_and_no_slots():
    layout = make_layout((4, 2, 16, 16))
    layer = foreign("vllm 0", layout, 12, torch.float32, "end")
    assert layer.slots(torch.tensor([2, 0]), 6).tolist() == [8, 9, 10, 11, 0, 1]
    memory = torch.zeros(layout.elements)
    gather(layer, torch.empty(0, dtype=torch.int64), memory, torch.tensor([0]), layout=layout)
    assert not memory.any()


@pytest.mark.parametrize("table", [[0], [0, -1]])
def test_rows_without_a_page_are_refused_here_and_left_out_by_the_kernel(table, monkeypatch):
    layout = make_layout((4, 2, 16, 16))
    table, slots = torch.tensor(table), torch.arange(6)
    layer = foreign("sglang", layout, 12, torch.float32, "end")
    memory = torch.zeros(layout.elements)
    k, v = (x[:6, 0] for x in layer.parts)
    calls = {
        "append": lambda: append(memory, table, k, v, layout=layout, starts=0, tokens_first=True),
        "gather": lambda: gather(layer, slots, memory, table, layout=layout),
        "scatter": lambda: scatter(layer, slots, memory, table, layout=layout),
    }
    for call in calls.values():
        with pytest.raises(InvalidInputError, match="page"):
            call()
    # On a GPU nobody has read the table: what a wrong one does must stay inside of memory.
    monkeypatch.setattr(PageLayout, "check_rows", lambda *_: None)
    memory = guarded(memory)
    table = guarded(table)
    calls["gather"]()
    assert same(layout.rows(memory, 0, 0), layer.k[:4, 0])
    memory.zero_()
    calls["append"]()
    assert same(layout.rows(memory, 0, 1), layer.v[:4, 0])
    kept = layer.k[4:].clone()
    calls["scatter"]()
    assert same(layer.k[4:], kept)


COPIES = [16, 48, CONFIGS["layer_copy"].block, CONFIGS["layer_copy"].block + 16]


@pytest.mark.parametrize("at", ENDS)
@pytest.mark.parametrize("nbytes", COPIES)
@pytest.mark.parametrize("programs", [1, 2, None])
def test_layer_copy_moves_all_ranges_with_any_number_of_programs(programs, nbytes, at):
    source = bits((5 * nbytes,), torch.uint8)
    target = bits((4 * nbytes,), torch.uint8, seed=1)
    begins, ends = torch.tensor([3, 0, 4]) * nbytes, torch.tensor([1, 3, 0]) * nbytes
    expected = target.view(4, -1).clone()
    expected[[1, 3, 0]] = source.view(5, -1)[[3, 0, 4]]
    source, target, begins, ends = (guarded(t, at=at) for t in (source, target, begins, ends))
    layer_copy(source, target, begins, ends, nbytes=nbytes, programs=programs)
    assert same(target, expected.flatten())


def test_offsets_beyond_two_to_the_31():
    """With page ids times strides in 32 bits each of these would leave the memory and die."""
    layout = PageLayout(page_tokens=4, heads=2, dim=16)
    memory = sparse(6 << 30, torch.bfloat16)
    far = memory.numel() - 2 * layout.elements
    table = torch.tensor([far + layout.elements, far])
    new = bits((2, 6, 16), torch.bfloat16)
    append(memory, table, new, new, layout=layout, starts=0)
    # Rows of 512 MiB each, so that the slots' side overflows too.
    pool = memory.as_strided((12, 2, 16), (1 << 28, 16, 1), 64)
    layer = ForeignLayer.from_sglang(pool, pool)
    slots = torch.tensor([11, 3, 10, 0, 9, 1])
    scatter(layer, slots, memory, table, layout=layout)
    assert same(pool[slots].transpose(0, 1), new)
    layout.rows(memory, far, 0).zero_()
    gather(layer, slots, memory, table, layout=layout)
    assert same(layout.rows(memory, far, 0)[:2].transpose(0, 1), new[:, 4:])


def test_layer_copy_beyond_two_to_the_31_words():
    memory = sparse(9 << 30, torch.uint8)
    begin, end = (8 << 30) + 64, 8 << 30
    memory[begin : begin + 48] = bits((48,), torch.uint8)
    layer_copy(memory, memory, torch.tensor([begin]), torch.tensor([end]), nbytes=48)
    assert same(memory[end : end + 48], bits((48,), torch.uint8))


def test_kernels_ran_and_not_their_references(monkeypatch):
    def never(*_, **__):
        raise AssertionError("the reference ran")

    for module, name in ((appending, "append"), (gathering, "gather"), (scattering, "scatter")):
        monkeypatch.setattr(module, f"{name}_reference", never)
    layout = make_layout((4, 2, 16, 16))
    layer = foreign("sglang", layout, 12, torch.float32, "end")
    memory, table, slots = torch.zeros(layout.elements), torch.tensor([0]), torch.arange(4)
    append(
        memory, table, layer.k[:4, 0], layer.v[:4, 0], layout=layout, starts=0, tokens_first=True
    )
    gather(layer, slots, memory, table, layout=layout)
    scatter(layer, slots, memory, table, layout=layout)
