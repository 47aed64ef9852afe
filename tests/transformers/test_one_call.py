"""tierkv.generate: find, generate, keep, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tierkv import InvalidInputError, NamespaceMismatchError  # noqa: E402
from tierkv.integrations.transformers import TierKV, self_check  # noqa: E402

OPTIONS = {"max_new_tokens": 5, "do_sample": False}


def open_store(model: Any, path: Path | None = None, **identity: str) -> tierkv.Store:
    return tierkv.open_store(
        model, path, device="4MiB", host="1MiB", disk="64MiB", page_tokens=4, **identity
    )


def test_a_growing_chat_over_a_store_and_a_restart(
    tiny: Any, steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gemma3_text")
    talk = steps.ids(13)
    checks = []
    check = self_check._resumed
    monkeypatch.setattr(self_check, "_resumed", lambda *a: checks.append(1) or check(*a))
    for _ in range(2):
        with open_store(model, tmp_path / "store") as store:
            for _ in range(2):
                row = steps.row(talk)
                output = tierkv.generate(model, row, store, **OPTIONS)
                assert torch.equal(output, model.generate(row, **OPTIONS))
                talk = output[0].tolist() + steps.ids(3, seed=len(talk))
                store.check()
            found = store.stats().counters["found_tokens"]
            assert found["device"] > 0
    assert found["disk"] > 0
    assert len(checks) == 1, "a model whose weights did not change is checked once"
    assert not model._forward_pre_hooks
    with torch.no_grad():
        model.model.norm.weight.add_(0)
    assert not self_check.checked_before(model)


def test_with_an_attached_store(tiny: Any, steps: Any) -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    row = steps.row(steps.ids(9))
    with TierKV.attach(model, device="4MiB", page_tokens=4) as kv:
        assert torch.equal(
            tierkv.generate(model, row, kv, num_beams=2, **OPTIONS),
            model.generate(row, num_beams=2, **OPTIONS),
        )
        with pytest.raises(NamespaceMismatchError, match="another model"):
            tierkv.generate(other, row, kv, **OPTIONS)
        kv.check()


def test_two_models_on_one_store_are_refused(tiny: Any, steps: Any) -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    row = steps.row(steps.ids(9))
    with open_store(model) as store:
        tierkv.generate(model, row, store, **OPTIONS)
        with pytest.raises(NamespaceMismatchError, match=r"weights: store .*open a store for"):
            tierkv.generate(other, row, store, **OPTIONS)
        with pytest.raises(NamespaceMismatchError, match=r"dtype: store float32, model bfloat16"):
            tierkv.generate(tiny("llama", dtype=torch.bfloat16), row, store, **OPTIONS)
        with pytest.raises(NamespaceMismatchError, match="salt: store none"):
            TierKV.attach(model, store=store, salt="tenant")
        with pytest.raises(InvalidInputError, match="max_position_embeddings"):
            tierkv.generate(model, steps.ids(600), store, **OPTIONS)
        store.check()
        assert store.stats().sequences == 0


def test_what_a_store_was_opened_with_is_taken_over(tiny: Any, steps: Any) -> None:
    model = tiny("llama")
    row = steps.row(steps.ids(9))
    expected = model.generate(row, **OPTIONS)
    for identity in ({"weights_id": "mine"}, {"salt": "tenant"}, {"adapter": "a:1"}):
        with open_store(model, **identity) as store:
            assert torch.equal(tierkv.generate(model, row, store, **OPTIONS), expected)
            with TierKV.attach(model, store=store, **identity) as kv:
                assert torch.equal(kv.generate(row, **OPTIONS), expected)


@pytest.mark.parametrize("store", ["a-directory", None, 3])
def test_something_that_is_no_store(tiny: Any, steps: Any, store: Any) -> None:
    with pytest.raises(InvalidInputError, match="open_store"):
        tierkv.generate(tiny("llama"), steps.ids(5), store)
    with pytest.raises(InvalidInputError, match="from_pretrained"):
        TierKV.attach("llama", "a-directory")


def test_what_a_tokenizer_returns(tiny: Any, steps: Any) -> None:
    model = tiny("llama")
    rows = [steps.ids(7), steps.ids(4, seed=2)]
    ids = torch.tensor([rows[0], [0, 0, 0, *rows[1]]])
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    with TierKV.attach(model, device="4MiB", page_tokens=4) as kv:
        for given in ({"input_ids": ids, "attention_mask": mask}, rows):
            assert torch.equal(kv.generate(given, **OPTIONS), expected)
        both = kv.generate(input_ids=ids, attention_mask=mask, **OPTIONS)
        assert torch.equal(both, expected)
        for text in ("some words", {"text": 1}):
            with pytest.raises(InvalidInputError, match="token ids"):
                kv.generate(text, **OPTIONS)
        for name, value in {"use_cache": False, "cache_implementation": "static"}.items():
            with pytest.raises(InvalidInputError, match=name):
                kv.generate(ids, attention_mask=mask, **{name: value})
        with kv.cache(rows[0]) as cache, pytest.raises(InvalidInputError, match="past_key"):
            kv.generate(rows[0], past_key_values=cache)
        kv.check()
