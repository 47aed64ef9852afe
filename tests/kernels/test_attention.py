"""Paged attention on the CPU: its reference against PyTorch's own attention, and bad input."""

import pytest
import torch
from attention_cases import Case
from torch.nn.functional import scaled_dot_product_attention

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.kernels.attention_launch import choose_splits
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.paged_decode import paged_decode
from tierkv.kernels.paged_prefill import paged_prefill
from tierkv.kernels.quantised import QuantisedLayout
from tierkv.kernels.quantised_attention import quantised_decode


def decode(case, **changes):
    arguments = {
        "q": case.q,
        "memory": case.memory,
        "page_table": case.table,
        "lengths": case.lens,
        **case.pages,
        **case.options,
        **changes,
    }
    return paged_decode(**arguments)


def history(case, row):
    """K and V ``[q_heads, tokens, dim]`` of a row whose table begins with page 0, in float64."""
    blocks = []
    for component in (0, 1):
        pages = [at for at in case.table[row].tolist() if at >= 0]
        rows = torch.cat([case.layout.rows(case.memory, at, component) for at in pages])
        blocks.append(rows[: case.lengths[row]].double().transpose(0, 1))
    return [block.repeat_interleave(case.group, 0) for block in blocks]


def test_decode_is_attention_over_the_gathered_history():
    case = Case([33, 16, 1], group=3, dim=96, page_tokens=12)
    got = decode(case)
    for row in range(3):
        k, v = history(case, row)
        want = scaled_dot_product_attention(case.q[row, :, None].double(), k, v)
        torch.testing.assert_close(got[row].double(), want[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_prefill_is_causal_attention_of_the_last_tokens(window):
    # With as many queries as tokens every window begins in page 0: the table holds it all.
    case = Case([21], queries=21, page_tokens=4, window=window)
    q = case.q.unflatten(0, (1, 21))
    got = paged_prefill(q, case.memory, case.table, case.lens, **case.pages, **case.options)
    k, v = history(case, 0)
    ago = torch.arange(21)[:, None] - torch.arange(21)[None, :]
    mask = (ago >= 0) & (ago < (window or 21))
    want = scaled_dot_product_attention(q[0].transpose(0, 1).double(), k, v, attn_mask=mask)
    torch.testing.assert_close(got[0].transpose(0, 1).double(), want, rtol=1e-5, atol=1e-6)


def test_soft_cap_and_sinks_do_what_their_formulas_say():
    case = Case([9], heads=1, group=2, softcap=1.5, sinks=True)
    got = decode(case).double()
    k, v = history(case, 0)
    for head in range(2):
        logits = (k[head] @ case.q[0, head].double()) * case.options["scale"]
        logits = 1.5 * torch.tanh(logits / 1.5)
        weights = torch.cat((logits, case.options["sinks"][head : head + 1].double())).softmax(0)
        want = weights[:-1] @ v[head]
        torch.testing.assert_close(got[0, head], want, rtol=1e-5, atol=1e-6)


def test_rows_without_tokens_give_zeros():
    assert not decode(Case([0, 3]))[0].any()


def test_result_goes_where_it_is_asked_for():
    case = Case([9, 4])
    out = case.out()
    assert decode(case, out=out) is out
    assert torch.equal(out, decode(case))


BAD = {
    "q_shape": ({"q": torch.zeros(1, 1, 4, 64)}, InvalidInputError, "q must be"),
    "batch": ({"q": torch.zeros(2, 4, 64)}, InvalidInputError, "rows of the page table"),
    "q_dtype": ({"q": torch.zeros(1, 4, 64).double()}, UnsupportedError, "float64"),
    "mixed": ({"q": torch.zeros(1, 4, 64).bfloat16()}, InvalidInputError, "must be equal"),
    "odd_head": ({"q": torch.zeros(1, 4, 60)}, UnsupportedError, "60 elements"),
    "large_head": ({"q": torch.zeros(1, 4, 320)}, UnsupportedError, "up to 256"),
    "heads": ({"q": torch.zeros(1, 3, 64)}, InvalidInputError, "evenly"),
    "gradients": ({"q": torch.zeros(1, 4, 64, requires_grad=True)}, UnsupportedError, "no_grad"),
    "table_type": ({"page_table": torch.zeros(1, 2).int()}, InvalidInputError, "int64"),
    "table_entry": ({"page_table": torch.tensor([[0, 1 << 40]])}, InvalidInputError, "elements"),
    "absent_page": ({"page_table": torch.tensor([[0, -4096]])}, InvalidInputError, "absent"),
    "length": ({"lengths": torch.tensor([33])}, InvalidInputError, "table holds"),
    "negative": ({"lengths": torch.tensor([-1])}, InvalidInputError, "length of -1"),
    "lengths": ({"lengths": torch.tensor([20, 20])}, InvalidInputError, "lengths"),
    "float_lengths": ({"lengths": torch.tensor([20.0])}, UnsupportedError, "lengths"),
    "window": ({"window": 0}, InvalidInputError, "window"),
    "softcap": ({"softcap": 0.0}, InvalidInputError, "softcap"),
    "scale": ({"scale": float("nan")}, InvalidInputError, "scale"),
    "sinks": ({"sinks": torch.zeros(2)}, InvalidInputError, "sinks"),
    "first_page": ({"first_page": torch.tensor([0])}, InvalidInputError, "needs a window"),
    "late": ({"first_page": torch.tensor([1]), "window": 20}, InvalidInputError, "table holds"),
    "splits": ({"splits": 65}, InvalidInputError, "splits"),
    "out": ({"out": torch.zeros(1, 4, 32)}, InvalidInputError, "out must"),
    "device": ({"lengths": torch.zeros(1, dtype=torch.int64, device="meta")},)
    + (InvalidInputError, "different devices"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message) as caught:
        decode(Case([20]), **changes)
    assert str(caught.value).startswith("paged_decode")


def test_bad_prefill_is_named():
    case = Case([20], queries=4)
    pages = (case.memory, case.table, case.lens)

    def prefill(q, lengths=case.lens, **more):
        paged_prefill(q, *pages[:2], lengths, **more, **case.pages, **case.options)

    q = case.q.unflatten(0, (1, 4))
    with pytest.raises(InvalidInputError, match="go together"):
        prefill(case.q, query_starts=torch.tensor([0, 4]))
    with pytest.raises(InvalidInputError, match="ascend from 0 to 4"):
        prefill(case.q, query_starts=torch.tensor([0, 3]), max_queries=4)
    with pytest.raises(InvalidInputError, match="more than max_queries=2"):
        prefill(case.q, query_starts=torch.tensor([0, 4]), max_queries=2)
    with pytest.raises(InvalidInputError, match="a length of 3 tokens"):
        prefill(q, torch.tensor([3]))
    with pytest.raises(InvalidInputError, match="total_queries"):
        prefill(q, query_starts=torch.tensor([0, 4]), max_queries=4)


def test_groups_of_scales_that_the_kernels_do_not_read_are_refused():
    layout = QuantisedLayout(scheme="int8", page_tokens=16, heads=2, dim=96, group=48)
    data = torch.zeros(layout.layer_bytes, dtype=torch.uint8)
    q, table = torch.zeros(1, 4, 96), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="power of two"):
        quantised_decode(q, data, table, torch.tensor([9]), quantised=layout, scale=1.0)


def test_value_heads_of_another_size_are_refused():
    layout = QuantisedLayout(scheme="int8", page_tokens=16, heads=2, dim=96, value_dim=64)
    data = torch.zeros(layout.layer_bytes, dtype=torch.uint8)
    q, table = torch.zeros(1, 4, 96), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match="must be equal"):
        quantised_decode(q, data, table, torch.tensor([9]), quantised=layout, scale=1.0)


def test_splits_fill_a_gpu_but_do_not_cut_short_histories():
    assert choose_splits(8, 100_000) == 32  # one long row of 8 KV heads: 256 programs
    assert choose_splits(8, 1024) == 4
    assert choose_splits(8, 100) == 1
    assert choose_splits(1024, 100_000) == 1
    assert all(choose_splits(n, 1 << 20) * n >= 128 for n in range(2, 300))


def test_a_layout_with_v_elsewhere():
    case = Case([20])
    memory = torch.zeros(2 * case.memory.numel())
    wide = PageLayout(page_tokens=16, heads=2, dim=64, value_offset=case.memory.numel())
    for at in case.table[0].tolist():
        for component in (0, 1):
            wide.rows(memory, at, component).copy_(case.layout.rows(case.memory, at, component))
    got = decode(case, memory=memory, v_offset=case.memory.numel())
    assert torch.equal(got, decode(case))
