"""The command as a whole: help, version, start-up, other processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tierkv


def test_help_names_every_command(run) -> None:
    result = run("--help")
    assert result.status == 0
    for command in ("stat", "ls", "verify", "clear", "demo"):
        assert command in result.out
    for command in ("stat", "ls", "verify", "clear", "demo"):
        text = run(command, "--help")
        assert text.status == 0
        assert "--json" in text.out


def test_version(run) -> None:
    assert run("--version").out == f"tierkv {tierkv.__version__}\n"


def test_no_arguments_show_the_help(run) -> None:
    assert "Usage" in run().out + run().err


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_commands_answer_without_torch(filled, command: str) -> None:
    code = (
        "import sys\nfrom tierkv.cli.main import app\n"
        f"try:\n    app([{command!r}, {str(filled.path)!r}, '--json'])\n"
        "except SystemExit as end:\n    assert not end.code, end\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["directory"] == str(filled.path)


HOLDER = """
import sys
from pathlib import Path
from tierkv.live import LiveFile
from tierkv.storage.ssd import SsdTier
path = Path(sys.argv[1])
with SsdTier.open(path, capacity_bytes=int(sys.argv[2]), slot_payload_bytes=int(sys.argv[3])):
    with LiveFile.create(path / "live") as live:
        tier = {"capacity_bytes": 4096, "used_bytes": 4096, "pages": 1, "pinned": 1}
        live.publish({"tiers": {"device": tier}})
        print("ready", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def holder(filled):
    """Another process that has the store open and publishes statistics."""
    arguments = [str(filled.path), str(filled.capacity_bytes), str(filled.payload_bytes)]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        yield process
        if process.poll() is None:
            process.communicate("\n", timeout=30)
            assert process.returncode == 0


def test_a_store_of_another_process_is_read_live_and_left_alone(run, filled, holder) -> None:
    status = run("stat", filled.path, "--json").json
    assert status["live"] is True
    assert status["owner"]["pid"] == holder.pid
    assert status["tiers"]["device"]["pinned"] == 1
    assert run("ls", filled.path, "--json").json["total"] == 10
    assert run("verify", filled.path).status == 0
    refused = run("clear", filled.path, "--yes")
    assert refused.status == 2
    assert str(holder.pid) in refused.err


def test_a_killed_process_no_longer_owns_the_store(run, filled, holder) -> None:
    holder.kill()
    holder.wait(timeout=30)
    status = run("stat", filled.path, "--json").json
    assert (status["open"], status["live"]) == (False, False)
    assert status["tiers"]["disk"]["pages"] == 10
