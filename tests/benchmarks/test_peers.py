"""The comparison with LMCache: what it does without one, tierkv's side, and the arithmetic."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "lmcache.py"
_spec = importlib.util.spec_from_file_location("peer_lmcache", SCRIPT)
peer = importlib.util.module_from_spec(_spec)  # not by its own name, which is the peer's as well
_spec.loader.exec_module(peer)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --python of an environment that has it"),
        (["--python", "/nowhere/bin/python"], "cannot be run"),
        (["--python", sys.executable], "has no usable LMCache"),
    ],
)
def test_is_skipped_with_the_reason_where_there_is_no_lmcache(arguments, reason, capsys):
    if "usable" in reason and importlib.util.find_spec("lmcache"):
        pytest.skip("LMCache is installed here")
    assert peer.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("skipped: ")
    assert reason in printed


def test_our_side_moves_and_compares_every_byte(tmp_path):
    side = peer.Child(
        sys.executable,
        "tierkv_side.py",
        tmp_path / "log",
        folder=str(tmp_path),
        count=3,
        size=1 << 20,
        io_threads=2,
    )
    try:
        assert set(side.call("describe")) == {"direct"}
        for number in range(2):
            side.call("renew", number=number)
            assert side.call("host_put")["seconds"] > 0
            assert side.call("host_get")["seconds"] > 0
            put = side.call("disk_put")
            assert put["durable_seconds"] >= put["seconds"] > 0
            assert put["syncs"] >= 2
            assert side.call("disk_get", warm=True)["seconds"] > 0
        side.call("renew", number=2)
        with pytest.raises(RuntimeError, match="AssertionError"):
            side.call("host_get")  # nothing is there under the new keys
    finally:
        side.end()


class FakeSide:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def call(self, do, **given):
        self.log.append((self.name, do))
        seconds = 1.0 if self.name == "tierkv" else 2.0
        return {"seconds": seconds, "durable_seconds": 3 * seconds, "syncs": 1}


def test_rounds_rotate_the_order_and_ratios_are_theirs_over_ours():
    log = []
    sides = {name: FakeSide(name, log) for name in ("tierkv", "direct", "default")}
    samples, firsts = [], set()
    for number in range(3):
        log.clear()
        samples.append(peer.one_round(sides, number))
        puts = [name for name, do in log if do == "disk_put"]
        assert sorted(puts) == ["default", "direct", "tierkv"]
        firsts.add(puts[0])
    assert firsts == {"tierkv", "direct", "default"}
    rows = peer.summarise(samples, count=4, size=1 << 20)
    assert {row["ratio"] for row in rows} == {2.0}
    assert rows[0]["tierkv_gb_s"] == pytest.approx(4 * (1 << 20) / 1e9)
    assert next(row for row in rows if row["lmcache"] == "default")["goal"] == 3.0
    json.dumps(rows)


def test_only_rounds_that_agree_make_a_claim():
    assert peer.words(2.0, 0.9, 2.5) == "no clear difference"
    assert peer.words(2.0, 1.5, 2.5) == "tierkv 2.0 times as quick"
    assert peer.words(0.5, 0.4, 0.6) == "LMCache is quicker"
