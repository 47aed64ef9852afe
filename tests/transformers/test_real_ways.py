"""SmolLM2 and Gemma 3, generated in every way: in float32 the tokens of no reuse at all."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402

pytestmark = pytest.mark.slow

PAGES: dict[str, Any] = {"smollm2": 16, "gemma3": {"full": 80, "sliding": 16}}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(params=["smollm2", "gemma3"])
def attached(request: pytest.FixtureRequest, real_model: Any) -> Any:
    model, tokenizer = real_model(request.param, "float32")
    with TierKV.attach(
        model, device="256MiB", host="64MiB", page_tokens=PAGES[request.param], self_check=False
    ) as kv:
        yield kv, tokenizer
        kv.check()
        assert kv.stats().tiers["device"].held == 0


def words(tokenizer: Any, count: int, start: int = 0) -> list[int]:
    import pydoc_data.topics

    text = pydoc_data.topics.topics["compound"]
    ids: list[int] = tokenizer.encode(text[: (start + count) * 8], verbose=False)
    return ids[start : start + count]


def padded(rows: list[list[int]], pad: int) -> tuple[Any, Any]:
    width = max(len(row) for row in rows)
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def test_a_padded_batch_over_two_turns(attached: Any) -> None:
    kv, tokenizer = attached
    model = kv.model
    talks = [words(tokenizer, 40), words(tokenizer, 23, 100), words(tokenizer, 7, 200)]
    for turn in range(2):
        ids, mask = padded(talks, model.generation_config.pad_token_id or 0)
        expected = model.generate(ids, attention_mask=mask, **GREEDY)
        output = kv.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(output, expected), f"turn {turn}"
        kv.check()
        talks = [
            said[ids.shape[1] - len(talk) :].tolist() + words(tokenizer, 5 + n, 50)
            for n, (talk, said) in enumerate(zip(talks, output, strict=True))
        ]
    assert sum(kv.stats().counters["found_tokens"].values()) > 60


@pytest.mark.parametrize(
    "way",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 5, "max_new_tokens": 20},
        {"prefill_chunk_size": 16},
    ],
    ids=["beams", "drafts", "pieces"],
)
def test_ways_cold_and_warm(attached: Any, way: dict[str, Any]) -> None:
    kv, tokenizer = attached
    options = {**GREEDY, **way}
    row = torch.tensor([words(tokenizer, 30) * 2 + words(tokenizer, 11)])
    expected = kv.model.generate(row, **options)
    for _ in range(2):
        assert torch.equal(tierkv.generate(kv.model, row, kv, **options), expected)
        kv.check()


def test_drafts_taken_back_where_the_window_is_full(real_model: Any) -> None:
    """Gemma 3's window of 512 tokens, with rejected drafts across it."""
    model, tokenizer = real_model("gemma3", "float32")
    row = torch.tensor([words(tokenizer, 505) + words(tokenizer, 6)])
    options = {"max_new_tokens": 14, "do_sample": False}
    expected = model.generate(row, **options)
    with TierKV.attach(model, device="256MiB", page_tokens=PAGES["gemma3"], self_check=False) as kv:
        for _ in range(2):
            output = kv.generate(row, prompt_lookup_num_tokens=6, **options)
            assert torch.equal(output[:, : expected.shape[1]], expected)
            kv.check()


def test_samples_of_one_prompt(attached: Any) -> None:
    kv, tokenizer = attached
    row = torch.tensor([words(tokenizer, 30)])
    options = {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 2, "top_k": 20}
    torch.manual_seed(2)
    expected = kv.model.generate(row, **options)
    for _ in range(2):
        torch.manual_seed(2)
        assert torch.equal(kv.generate(row, **options), expected)
