"""SmolLM2 and Gemma 3: bit-identical to memory, and in float32 the tokens of no reuse at all."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.errors import SequenceTooLongError  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402

pytestmark = pytest.mark.slow

# Small pages keep the prompts short; the automatic sizes have tests of their own below.
PAGES: dict[str, Any] = {"smollm2": 16, "gemma3": {"full": 80, "sliding": 16}}
# One token, page, window (512), page and window, and one to each side.
ENDS = {
    "smollm2": [1, 15, 16, 17, 31, 32, 33, 70],
    "gemma3": [1, 15, 16, 17, 79, 80, 81, 511, 512, 513, 528, 592, 593],
}
ROUTES = ["device", "host", "disk", "reopened"]


def text_ids(tokenizer: Any, count: int) -> list[int]:
    """Return ids of English text."""
    import pydoc_data.topics

    text = pydoc_data.topics.topics["compound"] + pydoc_data.topics.topics["specialnames"]
    ids: list[int] = tokenizer.encode(text[: count * 8], verbose=False)[:count]
    assert len(ids) == count
    return ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_conversation_through_all_tiers_equals_one_in_memory(
    name: str, dtype: str, real_model: Any, steps: Any, tmp_path: Path
) -> None:
    """Each turn ends at another boundary and comes back by another route."""
    model, tokenizer = real_model(name, dtype)
    ends = [n for n in ENDS[name] if n <= 513 or dtype == "float32"]  # bfloat16 may be emulated
    ids = text_ids(tokenizer, ends[-1])
    twin, seen = steps.twin(model), set()
    offset = 0 if dtype == "float32" else 2
    options = {"tokens": len(ids), "page_tokens": PAGES[name]}
    with steps.traveller(model, tmp_path, **options) as traveller:
        for number, (start, end) in enumerate(pairwise([0, *ends])):
            traveller.travel(ROUTES[(number + offset) % len(ROUTES)])
            with traveller.kv.cache(ids[:end]) as cache:
                assert cache.found.total == start
                seen |= {t for t in ("device", "host", "disk") if getattr(cache.found, t)}
                part = ids[start:end]
                assert torch.equal(twin.feed(part), steps.feed(model, cache, part))
            traveller.kv.check()
    assert seen == {"device", "host", "disk"}


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_float32_greedy_tokens_equal_generation_without_reuse(
    name: str, real_model: Any, steps: Any
) -> None:
    model, tokenizer = real_model(name, "float32")
    lengths = {"smollm2": [1, 15, 16, 17, 33], "gemma3": [1, 16, 512, 528]}[name]
    ids = text_ids(tokenizer, lengths[-1])
    options = {"max_new_tokens": 5, "do_sample": False}
    with TierKV.attach(
        model, device="96MiB", host="64MiB", page_tokens=PAGES[name], boundary_pages=1
    ) as kv:
        for length in lengths:
            row = steps.row(ids[:length])
            without = {"use_cache": length > 17}  # longer ones: a cache, but no reuse
            expected = model.generate(row, **options, **without)
            assert torch.equal(kv.generate(row, **options), expected)
            assert torch.equal(kv.generate(row, **options), expected), "the same prompt again"
        kv.check()


def test_a_chat_of_several_turns(real_model: Any, steps: Any, tmp_path: Path) -> None:
    """With automatic page sizes, closed and opened again before the last turn."""
    model, tokenizer = real_model("smollm2", "float32")
    options = {"max_new_tokens": 8, "do_sample": False}
    said = tokenizer.encode("<|im_start|>user\nWhat is a page?<|im_end|>\n<|im_start|>assistant\n")
    again = tokenizer.encode(
        "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    found = []
    for turns in (2, 1):
        with TierKV.attach(model, tmp_path, device="64MiB", host="16MiB", disk="256MiB") as kv:
            assert kv.store.spec.groups[0].page_tokens == 32
            for _ in range(turns):
                row = steps.row(said)
                expected = model.generate(row, **options)
                with kv.cache(row) as cache:
                    found.append(cache.found)
                    output = model.generate(row, past_key_values=cache, **options)
                assert torch.equal(output, expected)
                said = output[0].tolist() + again
            kv.check()
    assert found[0].total == 0
    assert found[1].device > 0
    assert found[2].disk > found[1].total


@pytest.mark.parametrize(
    ("name", "dtype", "length"), [("smollm2", "bfloat16", 65), ("gemma3", "float32", 330)]
)
def test_automatic_page_sizes_after_a_restart(
    name: str, dtype: str, length: int, real_model: Any, steps: Any, tmp_path: Path
) -> None:
    """A little more than one full page of full attention."""
    model, tokenizer = real_model(name, dtype)
    ids = text_ids(tokenizer, length + 9)
    twin = steps.twin(model)
    options = {"device": "64MiB", "host": "32MiB", "disk": "256MiB"}
    with TierKV.attach(model, tmp_path, **options) as kv, kv.cache(ids[:length]) as cache:
        assert torch.equal(twin.feed(ids[:length]), steps.feed(model, cache, ids[:length]))
    with TierKV.attach(model, tmp_path, self_check=False, **options) as kv:
        with kv.cache(ids) as cache:
            assert cache.found.disk == cache.found.total == length
            assert torch.equal(twin.feed(ids[length:]), steps.feed(model, cache, ids[length:]))
        kv.check()


def test_longer_than_device_and_host_is_refused_with_the_arithmetic(real_model: Any) -> None:
    model, _ = real_model("smollm2", "float32")
    with TierKV.attach(model, device="16MiB", host="16MiB", self_check=False) as kv:
        # 16 MiB are 11 pages of 32 tokens; a page of the pool serves 10 spilled ones
        with pytest.raises(SequenceTooLongError, match=r"(?s)needs 21 pages.* has 11.*640 tokens"):
            kv.cache(list(range(20 * 32 + 1)))
        kv.cache(list(range(20 * 32))).abandon()
        kv.check()


def test_models_and_tenants_do_not_mix_in_one_directory(
    real_model: Any, steps: Any, tmp_path: Path
) -> None:
    """Same ids, same directory: another dtype, adapter, salt or weights_id finds nothing."""
    model, tokenizer = real_model("smollm2", "float32")
    other, _ = real_model("smollm2", "bfloat16")
    row = steps.row(text_ids(tokenizer, 40))
    options: dict[str, Any] = {"device": "32MiB", "host": "16MiB", "disk": "256MiB"}

    def found(network: Any, **identity: Any) -> int:
        with (
            TierKV.attach(network, tmp_path, self_check=False, **options, **identity) as kv,
            kv.cache(row) as cache,
        ):
            steps.feed(network, cache, row[:, cache.found.total :])
            return int(cache.found.total)

    identities = [{}, {"adapter": "a"}, {"salt": "a"}, {"weights_id": "a"}]
    assert [found(model, **identity) for identity in identities] == [0] * 4
    assert found(other) == 0
    assert [found(model, **identity) > 0 for identity in identities] == [True] * 4
    assert found(other) > 0
