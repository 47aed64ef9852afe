"""``tierkv ls`` lists pages and sequences, filtered and in order."""

from __future__ import annotations

import pytest


def test_lists_every_page_with_its_place_and_use(run, filled) -> None:
    listed = run("ls", filled.path, "--json").json
    assert listed["total"] == 10
    assert listed["total_bytes"] == 10 * filled.payload_bytes
    pages = {page["key"]: page for page in listed["pages"]}
    assert pages[filled.key("b/1").hex()] == {
        "key": filled.key("b/1").hex(),
        "parent": filled.key("b/0").hex(),
        "namespace": filled.namespace.hex(),
        "group": "full",
        "start_token": 64,
        "end_token": 128,
        "tail": False,
        "tiers": ["disk"],
        "bytes": filled.payload_bytes,
        "created_s": filled.created_s + 1,
        "last_used_s": filled.created_s + 500,
        "hits": 7,
    }
    tail = pages[filled.key("a/4").hex()]
    assert (tail["start_token"], tail["end_token"], tail["tail"]) == (256, 266, True)


def test_describes_namespaces_without_the_tenant_salt(run, filled) -> None:
    result = run("ls", filled.path, "--json")
    assert result.json["namespaces"][filled.namespace.hex()]["weights"] == "revision-1"
    assert "tenant-secret" not in result.out


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--group", "sliding"], ["s/0", "s/1", "s/2"]),
        (["--group", "1"], ["s/0", "s/1", "s/2"]),
        (["--tail"], ["a/4"]),
        (["--full", "--group", "full"], ["a/0", "a/1", "a/2", "a/3", "b/0", "b/1"]),
        (["--tier", "host"], []),
        (["--namespace", "0000"], []),
        (["--group", "none"], []),
    ],
)
def test_filters(run, filled, options: list[str], names: list[str]) -> None:
    listed = run("ls", filled.path, "--json", *options).json
    keys = {page["key"] for page in listed["pages"]}
    assert keys == {filled.key(name).hex() for name in names}


def test_a_sequence_is_a_page_and_those_before_it(run, filled) -> None:
    prefix = filled.key("a/2").hex()[:10].upper()
    listed = run("ls", filled.path, "--json", "--sequence", prefix, "--sort", "tokens").json
    expected = [filled.key(name).hex() for name in ("a/0", "a/1", "a/2")]
    assert [page["key"] for page in listed["pages"]] == expected


def test_sequences_are_the_chains_up_to_each_leaf(run, filled) -> None:
    listed = run("ls", filled.path, "--sequences", "--json", "--sort", "tokens").json
    rows = [(row["leaf"], row["tokens"], row["pages"], row["hits"]) for row in listed["sequences"]]
    assert rows == [
        (filled.key("b/1").hex(), 128, 2, 7),
        (filled.key("s/2").hex(), 192, 3, 0),
        (filled.key("a/4").hex(), 266, 5, 0),
    ]
    assert [row["tail"] for row in listed["sequences"]] == [False, False, True]


def test_limit_and_order(run, filled) -> None:
    listed = run("ls", filled.path, "--json", "--sort", "hits", "--limit", "2").json
    assert [page["hits"] for page in listed["pages"]] == [7, 3]
    assert listed["total"] == 10
    assert len(run("ls", filled.path, "--json", "--limit", "0").json["pages"]) == 10


def test_table_for_people(run, filled) -> None:
    result = run("ls", filled.path, "--limit", "3", "--sort", "hits")
    assert result.status == 0
    assert filled.key("b/1").hex()[:10] in result.out
    assert "64-128" in result.out
    assert "10 pages" in result.out
    assert "3 shown" in result.out
    assert "revision-1 bfloat16" in result.out
    sequences = run("ls", filled.path, "--sequences")
    assert "3 sequences" in sequences.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sequence", "xyz"], "expected hexadecimal digits, got 'xyz'"),
        (["--namespace", ""], "expected hexadecimal digits"),
        (["--sequence", "0123456789"], "no page has a key that starts with 0123456789"),
        (["--tier", "tape"], "tape"),
        (["--limit", "-1"], "--limit"),
        (["--sort", "colour"], "colour"),
    ],
)
def test_bad_options_are_refused(run, filled, options: list[str], message: str) -> None:
    result = run("ls", filled.path, *options)
    assert result.status == 2
    assert message in result.err


def test_an_ambiguous_sequence_is_refused(run, shelf) -> None:
    names = [f"x{i}" for i in range(17)]  # more keys than first digits
    with shelf.open() as tier:
        shelf.put(tier, [info for name in names for info in shelf.chain(name, 1)])
    first = [shelf.key(f"{name}/0").hex()[0] for name in names]
    twice = next(digit for digit in first if first.count(digit) > 1)
    result = run("ls", shelf.path, "--sequence", twice)
    assert result.status == 2
    assert "pages have a key that starts with" in result.err


def test_an_empty_store_has_no_pages(run, shelf) -> None:
    shelf.open().close()
    assert run("ls", shelf.path, "--json").json["pages"] == []
    assert "0 pages" in run("ls", shelf.path).out
