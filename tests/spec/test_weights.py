"""Digests of weights: every byte counts, names of models and places do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tierkv.errors import InvalidInputError
from tierkv.identity.weights import files_digest, weights_digest


class Tiny(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        chooser = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(3, 4, generator=chooser))
        self.second = torch.nn.Parameter(torch.randn(5, generator=chooser).bfloat16())
        self.register_buffer("kept", torch.arange(6))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_equal_weights_have_equal_digests() -> None:
    assert weights_digest(Tiny()) == weights_digest(Tiny())
    assert weights_digest(Tiny()) == weights_digest(Tiny().state_dict())
    assert weights_digest(Tiny(1)) != weights_digest(Tiny(0))


@pytest.mark.parametrize("name", ["first", "second", "kept"])
def test_one_element_changed_in_place_is_noticed(name: str) -> None:
    model = Tiny()
    before = weights_digest(model)
    with torch.no_grad():
        getattr(model, name).view(-1)[-1] += 1
    changed = weights_digest(model)
    assert changed != before
    with torch.no_grad():
        getattr(model, name).view(-1)[-1] -= 1
    if name == "kept":  # integers come back exactly
        assert weights_digest(model) == before


def test_a_replaced_tensor_is_noticed() -> None:
    model = Tiny()
    before = weights_digest(model)
    model.first = torch.nn.Parameter(model.first.detach() + 1)
    assert weights_digest(model) != before


def test_scratch_buffers_and_places_do_not_count() -> None:
    model = Tiny()
    before = weights_digest(model)
    model.scratch += 1
    assert weights_digest(model) == before
    rows = {k: v.clone().t().contiguous().t() for k, v in Tiny().state_dict().items()}
    assert weights_digest(rows) == before


def test_name_dtype_and_shape_count() -> None:
    base = torch.arange(8, dtype=torch.int32)
    digests = {
        weights_digest({"a": base}),
        weights_digest({"b": base}),
        weights_digest({"a": base.view(torch.float32)}),
        weights_digest({"a": base.reshape(2, 4)}),
        weights_digest({"a": base[:4], "b": base[4:]}),
    }
    assert len(digests) == 5


def test_tied_weights_count_under_each_name() -> None:
    tied = torch.randn(4, 4)
    assert weights_digest({"a": tied, "b": tied}) == weights_digest({"a": tied, "b": tied.clone()})
    assert weights_digest({"a": tied, "b": tied}) != weights_digest({"a": tied})


def test_empty_and_scalar_tensors_have_digests() -> None:
    assert weights_digest({"a": torch.tensor(1.5)}) != weights_digest({"a": torch.tensor(1.25)})
    assert weights_digest({"a": torch.empty(0, 3)}) != weights_digest({"a": torch.empty(3, 0)})


def test_weights_without_bytes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'a'.*meta.*weights_id"):
        weights_digest({"a": torch.empty(2, device="meta")})
    with pytest.raises(InvalidInputError, match=r"'a' is a str.*weights_id"):
        weights_digest({"a": "text"})


def settle(path: Path) -> None:
    """Date a file back, as if it had been written long ago."""
    os.utime(path, ns=(1, path.stat().st_mtime_ns - 10**10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "a.safetensors").write_bytes(b"first weights")
    (root / "b.safetensors").write_bytes(b"second weights")
    (root / "config.json").write_text("{}")
    return root


def test_names_of_files_and_folders_do_not_count(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    before = files_digest(folder, cache=memo)
    (folder / "b.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text('{"other": 1}')
    assert files_digest(folder.rename(tmp_path / "renamed"), cache=memo) == before


def test_a_changed_file_is_noticed(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    before = files_digest(folder, cache=memo)
    (folder / "a.safetensors").write_bytes(b"other weights")
    assert files_digest(folder, cache=memo) != before


def test_a_remembered_digest_is_used_and_a_lost_memo_costs_nothing_but_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = tmp_path / "memo.json"
    # Times far ahead of the files: they count as settled, so that they are remembered.
    monkeypatch.setattr("tierkv.identity.weights._SETTLED_S", -1e9)
    before = files_digest(folder, cache=memo)
    assert memo.exists()
    read = []
    hash_file = __import__("tierkv.identity.weights", fromlist=["_hash_file"])._hash_file
    monkeypatch.setattr(
        "tierkv.identity.weights._hash_file", lambda f: read.append(f) or hash_file(f)
    )
    assert files_digest(folder, cache=memo) == before
    assert not read
    memo.write_text("not json")
    assert files_digest(folder, cache=memo) == before
    assert len(read) == 2


def test_a_file_written_just_now_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    files_digest(folder, cache=memo)
    assert not memo.exists()


def test_one_file_and_a_folder_without_weights(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    assert files_digest(folder / "a.safetensors", cache=memo)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InvalidInputError, match=r"no file of \.safetensors"):
            files_digest(path, cache=memo)


def test_a_memo_that_cannot_be_written_is_done_without(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert files_digest(folder, cache=tmp_path / "file" / "memo.json")
