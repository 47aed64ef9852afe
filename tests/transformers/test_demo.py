"""The demo on a tiny model: its exit status, its lines, its JSON, its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.cli import demo, demo_text  # noqa: E402
from tierkv.cli.demo_report import TurnResult, summarise  # noqa: E402
from tierkv.errors import InvalidInputError, StoreError  # noqa: E402
from tierkv.stats import Found  # noqa: E402

SMALL: dict[str, Any] = {
    "conversations": 2,
    "turns": 3,
    "doc_tokens": 40,
    "new_tokens": 3,
    "device": "16MiB",
    "host": "16MiB",
    "disk": "256MiB",
}


def test_every_turn_is_told_and_written(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo.json"
    status = demo.run_demo(
        model=str(tiny_folder), directory=tmp_path / "store", json_path=out, **SMALL
    )
    assert status == 0
    data = json.loads(out.read_text())
    assert [(t["conversation"], t["turn"]) for t in data["turns"]] == [
        (1, 1), (2, 1), (2, 2), (1, 2), (1, 3), (2, 3),
    ]  # fmt: skip
    for turn in data["turns"]:
        assert set(turn["found"]) == {"device", "host", "disk"}
        assert turn["computed"] == turn["prompt_tokens"] - sum(turn["found"].values()) > 0
        assert turn["ttft_s"] > 0
        assert turn["recompute_s"] > 0
        loads = turn["hidden_load_s"] + turn["exposed_load_s"]
        assert loads >= 0
        assert (loads > 0) or not (turn["found"]["host"] or turn["found"]["disk"])
        assert turn["tokens_equal"] is True
        assert (sum(turn["found"].values()) > 0) == (turn["turn"] > 1)
    assert all(t["found"]["disk"] > 0 for t in data["turns"] if t["turn"] == 3), "not reopened"
    summary = data["summary"]
    assert (summary["turns"], summary["tokens_equal"], summary["reopened"]) == (6, True, True)
    assert summary["median_speedup"] > 0
    assert set(data["stat"]["tiers"]) == {"device", "host", "disk"}
    shown = capsys.readouterr().out
    assert shown.count(" equal") >= 6
    assert "opened again" in shown
    assert "TIER" in shown
    assert "since it was opened again" in shown
    lines = shown.splitlines()
    assert len({len(text) for text in lines if text.startswith("---")}) == 1
    turns = [text.split() for text in lines if text.endswith(" equal")]
    assert [t[-2] == "-" for t in turns] == [t[1] == "1" for t in turns]
    store = tmp_path / "store"
    assert lines[-1].startswith(f"The store stays in {store}: try ")
    assert lines[-1].endswith(f"tierkv verify {store}")


def test_one_different_token_fails_the_demo(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = demo._Run._recomputed

    def wrong(self: Any, prompt: list[int]) -> tuple[list[int], float]:
        ids, seconds = honest(self, prompt)
        return [ids[0] + 1, *ids[1:]], seconds

    monkeypatch.setattr(demo._Run, "_recomputed", wrong)
    options = {**SMALL, "turns": 1, "conversations": 1}
    place = tmp_path / "store"
    assert demo.run_demo(model=str(tiny_folder), directory=place, **options) == 1


def test_the_default_directory_is_emptied_first(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {**SMALL, "turns": 1, "conversations": 1}
    for _ in range(2):
        out = tmp_path / "demo.json"
        assert demo.run_demo(model=str(tiny_folder), json_path=out, **options) == 0
        assert json.loads(out.read_text())["turns"][0]["found"]["disk"] == 0
    assert (tmp_path / "demo-store" / "meta").exists()


def test_a_budget_that_is_none_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidInputError, match="device"):
        demo.run_demo(model="nowhere", device="much")


def test_a_directory_that_is_no_store_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    letter = tmp_path / "demo-store" / "to-mum.txt"
    letter.parent.mkdir()
    letter.write_text("dear mum")
    for directory in (None, letter.parent, letter):
        with pytest.raises(StoreError, match=str((directory or letter.parent).name)):
            demo.run_demo(model="nowhere", directory=directory)
    assert letter.read_text() == "dear mum"


class Letters:
    """A tokenizer with one id a character."""

    bos_token_id = 1

    def __init__(self, *words: str) -> None:
        self._words = words

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(c) for c in text]

    def get_vocab(self) -> dict[str, int]:
        return dict.fromkeys(self._words, 0)


def test_documents_have_the_length_asked_and_differ() -> None:
    texts = demo_text.documents(Letters(), count=4, tokens=500, seed=0)
    assert [len(t) for t in texts] == [500] * 4
    assert len({tuple(t[:50]) for t in texts}) == 4
    assert demo_text.documents(Letters(), count=4, tokens=500, seed=0) == texts
    assert demo_text.documents(Letters(), count=4, tokens=500, seed=1) != texts


def test_a_chat_model_gets_its_markers_and_any_other_plain_text() -> None:
    chat = demo_text.Dialogue(Letters("<|im_start|>"), [65, 66])
    chat.ask("Why?")
    chat.answered([67])
    chat.ask("How?")
    assert "".join(map(chr, chat.ids)) == (
        "<|im_start|>user\nAB\n\nWhy?<|im_end|>\n<|im_start|>assistant\nC"
        "<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = demo_text.Dialogue(Letters(), [65, 66])
    plain.ask("Why?")
    assert "".join(map(chr, plain.ids)) == "\x01AB\n\nQuestion: Why?\nAnswer:"


def test_the_median_leaves_first_turns_out() -> None:
    results = [
        TurnResult(
            conversation=1,
            turn=turn,
            prompt_tokens=10,
            found=Found(device=5),
            hidden_load_s=0.0,
            exposed_load_s=0.0,
            computed=5,
            ttft_s=1.0,
            recompute_s=seconds,
            tokens_equal=True,
        )
        for turn, seconds in ((1, 1.0), (2, 4.0), (3, 6.0))
    ]
    assert summarise(results, reopened=False)["median_speedup"] == 5.0
