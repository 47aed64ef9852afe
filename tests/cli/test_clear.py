"""``tierkv clear`` empties a store, after asking, and nothing else."""

from __future__ import annotations

import pytest


def test_clears_when_told_yes(run, filled) -> None:
    cleared = run("clear", filled.path, "--yes", "--json")
    assert cleared.status == 0
    assert cleared.json["pages"] == 10
    assert cleared.json["cleared"] is True
    assert list((filled.path / "slabs").iterdir()) == []
    disk = run("stat", filled.path, "--json").json["tiers"]["disk"]
    assert (disk["pages"], disk["clean"]) == (0, True)
    assert "not closed in order" not in run("stat", filled.path).out
    assert run("ls", filled.path, "--json").json["total"] == 0
    with filled.open() as tier:  # still a store, ready for use
        filled.put(tier, filled.chain("new", 2))
    assert run("verify", filled.path, "--json").json["pages"] == 2


def test_verify_of_an_emptied_store_does_not_warn(run, filled, caplog) -> None:
    assert run("clear", filled.path, "--yes").status == 0
    assert run("verify", filled.path).status == 0
    assert not caplog.records


def test_asks_first(run, filled) -> None:
    asked = run("clear", filled.path, input="n\n")
    assert asked.status == 1
    assert "10 pages" in asked.out
    assert run("ls", filled.path, "--json").json["total"] == 10
    assert run("clear", filled.path, input="y\n").status == 0
    assert run("ls", filled.path, "--json").json["total"] == 0


def test_refuses_a_store_in_use(run, filled) -> None:
    with filled.open() as tier:
        refused = run("clear", filled.path, "--yes")
        assert refused.status == 2
        assert "in use by process" in refused.err
        assert refused.err.rstrip().endswith("close that store first")
        assert all(tier.contains([filled.key("a/0")]))


def test_refuses_what_is_no_store(run, tmp_path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-mum.txt").write_text("dear mum")
    refused = run("clear", tmp_path / "letters", "--yes")
    assert refused.status == 2
    assert (tmp_path / "letters" / "to-mum.txt").exists()


def test_leaves_files_that_are_not_the_stores(run, filled) -> None:
    (filled.path / "notes.txt").write_text("mine")
    assert run("clear", filled.path, "--yes").status == 0
    assert (filled.path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("options", [["--json"], ["--json", "--yes"]])
def test_json_never_asks(run, filled, options: list[str]) -> None:
    result = run("clear", filled.path, *options)
    assert result.status == (0 if "--yes" in options else 2)
