"""The command line beside a store that is at work.

The commands run in processes of their own: an LMDB file must not be opened twice in one.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from toy_model import MIXED, namespace, turn

from tierkv import Store

pytestmark = pytest.mark.slow


RUNNER = """
import json, sys
from typer.testing import CliRunner
from tierkv.cli.main import app
results = []
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    results.append([result.exit_code, result.stdout, result.stderr])
assert "torch" not in sys.modules
json.dump(results, sys.stdout)
"""


def run_all(*commands):
    """Run commands in one other process; return (status, stdout, stderr) of each."""
    texts = [[str(argument) for argument in command] for command in commands]
    line = [sys.executable, "-c", RUNNER, json.dumps(texts)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_json(*arguments):
    [(status, out, err)] = run_all([*arguments, "--json"])
    assert status == 0, err
    return json.loads(out)


@pytest.fixture
def store(tmp_path):
    """A store of the toy model with two conversations, pages in all three tiers."""
    slot = MIXED.slot_bytes
    opened = Store.open(
        tmp_path / "store",
        MIXED,
        namespace(MIXED, "toy"),
        device=24 * slot,
        host=8 * slot,
        disk=200 * (slot + 4096),
    )
    with opened:
        for talk in range(6):
            turn(opened, [1000 * talk + i for i in range(18)])
        yield opened
        if not opened.closed:
            opened.check()


def test_stat_shows_the_running_stores_own_figures(store, tmp_path) -> None:
    store.flush()
    status = run_json("stat", tmp_path / "store")
    assert status["live"] is True
    stats = store.stats()
    for name, tier in stats.tiers.items():
        shown = status["tiers"][name]
        assert shown["capacity_bytes"] == tier.capacity_bytes
        assert (shown["pages"], shown["used_bytes"]) == (tier.pages, tier.used_bytes)
        assert shown["pinned"] == tier.pinned
    assert status["namespace"] == store.namespace.digest.hex()
    assert status["counters"]["begins"] == 6


def test_ls_shows_in_which_tiers_a_page_is(store, tmp_path) -> None:
    store.flush()
    listed = run_json("ls", tmp_path / "store", "--limit", "0")
    stats = store.stats()
    for name, tier in stats.tiers.items():
        assert sum(name in page["tiers"] for page in listed["pages"]) == tier.pages
    assert {page["group"] for page in listed["pages"]} == {"full", "sliding"}
    on_device = run_json("ls", tmp_path / "store", "--tier", "device", "--limit", "0")
    assert on_device["total"] == stats.tiers["device"].pages > 0
    sequences = run_json("ls", tmp_path / "store", "--sequences", "--group", "full")
    assert {row["tokens"] for row in sequences["sequences"]} == {18}
    assert sequences["total"] == 6


def test_the_running_store_is_not_disturbed(store, tmp_path) -> None:
    path = tmp_path / "store"
    looks = [["stat", path], ["ls", path], ["ls", path, "--sequences"], ["verify", path]]
    changes = [["clear", path, "--yes"], ["verify", path, "--repair"]]
    results = run_all(*looks, *changes)
    assert [status for status, _, _ in results] == [0, 0, 0, 0, 2, 2]
    assert all("in use by process" in err for _, _, err in results[4:])
    assert turn(store, [*range(18), 5]).total == 18


def test_after_closing_everything_is_on_disk_and_sound(store, tmp_path) -> None:
    pages = store.flush().durable_pages
    store.close()
    status = run_json("stat", tmp_path / "store")
    assert (status["open"], status["live"]) == (False, False)
    assert status["tiers"]["disk"]["pages"] == pages
    assert run_json("verify", tmp_path / "store")["pages"] == pages
