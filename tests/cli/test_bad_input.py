"""What is wrong with the argument: one clear message, status 2, no traceback."""

from __future__ import annotations

import pytest

COMMANDS = [["stat"], ["ls"], ["verify"], ["verify", "--repair"], ["clear", "--yes"]]
commands = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


def assert_refused(result, *words: str) -> None:
    assert result.status == 2, (result.out, result.err)
    assert result.out == ""
    assert result.err.startswith("error:")
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


@commands
def test_a_missing_directory(run, tmp_path, command: list[str]) -> None:
    assert_refused(run(*command, tmp_path / "nowhere"), "nowhere")
    assert not (tmp_path / "nowhere").exists()


@commands
def test_a_directory_that_is_no_store(run, tmp_path, command: list[str]) -> None:
    (tmp_path / "file.txt").write_text("hello")
    assert_refused(run(*command, tmp_path), str(tmp_path), "store")
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


@commands
def test_an_empty_directory(run, tmp_path, command: list[str]) -> None:
    assert_refused(run(*command, tmp_path), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@commands
def test_a_file_instead_of_a_directory(run, tmp_path, command: list[str]) -> None:
    (tmp_path / "file").write_text("hello")
    assert_refused(run(*command, tmp_path / "file"))


@commands
def test_a_store_of_another_version(run, filled, command: list[str]) -> None:
    from tierkv.storage.layout import decode_sealed, encode_sealed

    meta = decode_sealed((filled.path / "meta").read_bytes())
    assert meta is not None
    changed = encode_sealed(meta | {"version": 99})
    (filled.path / "meta").write_bytes(changed)
    assert_refused(run(*command, filled.path), "version 99")
    assert (filled.path / "meta").read_bytes() == changed


@commands
def test_a_damaged_meta_file(run, filled, command: list[str]) -> None:
    (filled.path / "meta").write_bytes(b"\0" * 100)
    assert_refused(run(*command, filled.path), "meta")


def test_no_argument_is_a_usage_error(run) -> None:
    assert run("stat").status == 2
    assert run("frobnicate").status == 2
