"""``tierkv verify`` finds bad pages, and drops them when asked."""

from __future__ import annotations


def test_a_sound_store_passes(run, filled) -> None:
    result = run("verify", filled.path, "--json")
    assert result.status == 0
    assert (result.json["pages"], result.json["bad"]) == (10, 0)
    assert "10 pages checked, 0 bad" in run("verify", filled.path).out


def test_a_flipped_bit_is_found_and_named(run, filled) -> None:
    filled.damage("a/2")
    result = run("verify", filled.path, "--json")
    assert result.status == 1
    assert (result.json["pages"], result.json["bad"]) == (10, 1)
    assert result.json["bad_keys"] == [filled.key("a/2").hex()]
    people = run("verify", filled.path)
    assert people.status == 1
    assert filled.key("a/2").hex() in people.out
    assert "--repair" in people.out


def test_repair_drops_the_bad_pages_and_keeps_the_others(run, filled) -> None:
    filled.damage("a/2")
    filled.damage("b/0")
    repaired = run("verify", filled.path, "--repair", "--json")
    assert repaired.status == 0
    assert (repaired.json["bad"], repaired.json["repaired"]) == (2, 2)
    again = run("verify", filled.path, "--json")
    assert again.status == 0
    assert (again.json["pages"], again.json["bad"]) == (8, 0)
    left = {page["key"] for page in run("ls", filled.path, "--json").json["pages"]}
    assert left.isdisjoint({filled.key("a/2").hex(), filled.key("b/0").hex()})
    assert len(left) == 8


def test_a_store_in_use_is_verified_but_not_repaired(run, filled) -> None:
    with filled.open():
        assert run("verify", filled.path).status == 0
        refused = run("verify", filled.path, "--repair")
    assert refused.status == 2
    assert "in use by process" in refused.err


def test_a_missing_slab_is_a_problem(run, filled) -> None:
    for slab in (filled.path / "slabs").iterdir():
        slab.unlink()
    result = run("verify", filled.path, "--json")
    assert result.status == 1
    assert (result.json["pages"], result.json["bad"]) == (10, 10)
    assert result.json["damaged_slabs"] == ["slabs/0000 is missing"]
    assert run("verify", filled.path, "--repair").status == 0
    after = run("verify", filled.path, "--json")
    assert after.status == 0
    assert after.json["pages"] == 0


def test_unknown_files_are_reported_and_no_fault(run, filled) -> None:
    (filled.path / "notes.txt").write_text("mine")
    result = run("verify", filled.path, "--json")
    assert result.status == 0
    assert result.json["unknown_files"] == ["notes.txt"]
    assert "notes.txt" in run("verify", filled.path).out
