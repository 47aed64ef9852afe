"""What is wrong with the argument: one clear message, status 2, no traceback."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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


@pytest.fixture
def public(run, filled):
    """A store that root owns, in a folder that everybody may enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    run("ls", filled.path)  # what is imported late is imported before rights are given up
    with tempfile.TemporaryDirectory(prefix="tierkv-public-") as folder:
        Path(folder).chmod(0o755)
        yield replace(filled, path=Path(shutil.move(filled.path, folder)))


@pytest.fixture
def readable(public) -> None:
    """Let everybody read the store; comes before ``as_nobody``."""
    for path in (public.path, *public.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def as_nobody(public) -> Iterator[None]:
    """Give up root's rights for the test."""
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@commands
def test_a_store_of_somebody_else(run, public, as_nobody, command: list[str]) -> None:
    assert_refused(run(*command, public.path), str(public.path), "Permission denied")


def test_a_store_that_may_only_be_read_can_be_looked_at(run, public, readable, as_nobody) -> None:
    assert run("stat", public.path, "--json").json["tiers"]["disk"]["pages"] == 10
    assert run("ls", public.path, "--json", "--group", "full").json["total"] == 7
    assert run("verify", public.path).status == 0


@pytest.mark.parametrize("command", [["clear", "--yes"], ["verify", "--repair"]], ids=" ".join)
def test_a_store_that_may_only_be_read_is_not_changed(
    run, public, readable, as_nobody, command: list[str]
) -> None:
    assert_refused(run(*command, public.path), "Permission denied")
    assert run("ls", public.path, "--json").json["total"] == 10


def test_no_argument_is_a_usage_error(run) -> None:
    assert run("stat").status == 2
    assert run("frobnicate").status == 2


def test_a_choice_that_is_none_is_told_with_the_choices(run, filled) -> None:
    result = run("ls", filled.path, "--tier", "foo")
    assert result.status == 2
    assert "Invalid value for '--tier': 'foo' is not one of 'device'" in result.err
