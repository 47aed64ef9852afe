"""The examples that stand for a user's own program run, and give what stock generation gives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tierkv.integrations.models import PACKAGED  # noqa: E402

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_loop_is_short() -> None:
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) < 150


@pytest.mark.slow
@pytest.mark.parametrize("device", ["64MiB", "3MiB"], ids=["fits", "longer than the pool"])
def test_the_plain_loop_gives_the_tokens_of_stock_generation(real_model: Any, device: str) -> None:
    assert "smollm2" in PACKAGED
    loop, (model, _) = example("plain_loop"), real_model("smollm2", "float32")
    llama = loop.Llama(model)
    spec = tierkv.CacheSpec.from_config(model.config, dtype="float32", page_tokens=8)
    namespace = tierkv.Namespace.build(spec, weights="test")
    ids = torch.randint(3, 9000, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    with tierkv.Store.open(None, spec, namespace, device=device, host="128MiB") as store:
        for prompt in (ids, [*ids, 5, 6, 7]):
            told = loop.answer(llama, store, prompt, count=4)
            row = torch.tensor([prompt])
            right = model.generate(row, max_new_tokens=4, do_sample=False)
            right = right[0, len(prompt) :].tolist()  # may end before, the loop does not
            assert told[: len(right)] == right
            assert right
            store.check()
        assert store.stats().counters["found_tokens"]["device"] > 0 or device == "3MiB"
        assert (store.stats().counters["streamed_bytes"] > 0) == (device == "3MiB")


@pytest.mark.slow
def test_the_chat_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = example("transformers_chat")
    for text in ("Hello there", "And what else?"):
        monkeypatch.setattr(
            sys, "argv", ["chat", "--dir", str(tmp_path), "--tokens", "5", "--say", text]
        )
        chat.main()
    shown = capsys.readouterr().out
    assert "user: Hello there" in shown
    assert "of which found: none" in shown
    assert "of which found: {'disk'" in shown
