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
from tierkv.integrations.transformers.identity import model_namespace  # noqa: E402

OPTIONS = {"max_new_tokens": 5, "do_sample": False}


def open_store(model: Any, path: Path | None = None, salt: str = "") -> tierkv.Store:
    spec = tierkv.CacheSpec.from_config(model.config, dtype="float32", page_tokens=4)
    namespace = model_namespace(model, spec, weights_id=None, adapter="", salt=salt)
    return tierkv.Store.open(path, spec, namespace, device="4MiB", host="1MiB", disk="64MiB")


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
        with pytest.raises(NamespaceMismatchError, match="another model"):
            tierkv.generate(other, row, store, **OPTIONS)
        with pytest.raises(NamespaceMismatchError, match="salt"):
            tierkv.generate(model, row, store, salt="tenant", **OPTIONS)
        with pytest.raises(InvalidInputError, match="max_position_embeddings"):
            tierkv.generate(model, steps.ids(600), store, **OPTIONS)
        store.check()
        assert store.stats().sequences == 0
