"""Every supported family: a growing conversation is bit-identical to one kept in memory."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.identity.model_config import SUPPORTED_MODEL_TYPES  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402

WINDOW, PAGE = 8, 4
# Turns end one token, a page, a window and a page and window in, and one to each side.
ENDS = [1, PAGE - 1, PAGE, PAGE + 1, WINDOW - 1, WINDOW, WINDOW + 1, 11, 12, 13, 24, 25, 40]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(SUPPORTED_MODEL_TYPES))
def test_a_growing_conversation_equals_one_in_memory(
    family: str, dtype: str, tiny: Any, steps: Any
) -> None:
    model = tiny(family, getattr(torch, dtype))
    ids = steps.ids(ENDS[-1])
    twin, length = steps.twin(model), 0
    with TierKV.attach(model, device="4MiB", host="1MiB", page_tokens=PAGE) as kv:
        for end in ENDS:
            with kv.cache(ids[:end]) as cache:
                assert cache.found.total == length, "the last turn's end was not found"
                for part in split_last(ids[length:end]):
                    assert torch.equal(twin.feed(part), steps.feed(model, cache, part))
                assert cache.get_seq_length() == end
            length = end
            kv.check()


def split_last(ids: list[int]) -> list[list[int]]:
    """Return ids as a forward of several tokens and one of a single token."""
    return [part for part in (ids[:-1], ids[-1:]) if part]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_float32_greedy_tokens_equal_generation_without_any_cache(
    family: str, tiny: Any, steps: Any
) -> None:
    model = tiny(family)
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE) as kv:
        for end in ENDS:
            row = steps.row(steps.ids(end))
            options = {"max_new_tokens": 6, "do_sample": False}
            expected = model.generate(row, use_cache=False, **options)
            for _ in range(2):  # computed, then resumed
                assert torch.equal(kv.generate(row, **options), expected)
            kv.check()
