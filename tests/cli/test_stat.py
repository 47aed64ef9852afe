"""``tierkv stat`` on stores at rest, in use, and on what is no store."""

from __future__ import annotations

import os
import subprocess
import sys

from tierkv.live import LiveFile, read_live


def test_a_store_at_rest_shows_its_disk_tier_only(run, filled) -> None:
    status = run("stat", filled.path, "--json").json
    assert (status["open"], status["live"], status["owner"]) == (False, False, None)
    disk = status["tiers"]["disk"]
    assert disk["pages"] == 10
    assert disk["pinned"] == 0
    assert disk["payload_bytes"] == 10 * filled.payload_bytes
    assert 10 * filled.payload_bytes <= disk["used_bytes"] <= disk["capacity_bytes"]
    for name in ("device", "host"):
        tier = status["tiers"][name]
        assert (tier["capacity_bytes"], tier["used_bytes"], tier["pages"]) == (0, 0, 0)


def test_table_for_people(run, filled) -> None:
    result = run("stat", filled.path)
    assert result.status == 0
    assert "not open" in result.out
    for word in ("device", "host", "disk", "ALLOCATED", "PINNED", "HELD", "FOUND"):
        assert word in result.out
    assert "CAPACITY" not in result.out
    [disk] = [line.split() for line in result.out.splitlines() if line.startswith("disk")]
    assert disk[-6:] == ["10", "-", "-", "-", "-", "-"]


def test_a_store_held_in_this_machine_names_its_owner(run, filled) -> None:
    with filled.open():
        status = run("stat", filled.path, "--json").json
        assert status["open"] is True
        assert status["live"] is False
        assert status["owner"]["pid"] == os.getpid()
        assert status["tiers"]["disk"]["pages"] == 10
        assert "publishes no statistics" in run("stat", filled.path).out


def test_a_running_store_answers_with_its_own_figures(run, filled) -> None:
    published = {
        "tiers": {
            name: {"capacity_bytes": 1 << 20, "used_bytes": 1 << 19, "pages": pages}
            | {"pinned": 1, "held": 2}
            for name, pages in (("device", 3), ("host", 5), ("disk", 10))
        },
        "counters": {"begins": 4, "late_copies": 1, "delay_hits": 0}
        | {"found_tokens": {"host": 128, "disk": 0}},
        "sequences": 2,
    }
    with filled.open(), LiveFile.create(filled.path / "live") as live:
        live.publish(published)
        status = run("stat", filled.path, "--json").json
        assert status["live"] is True
        assert [t["pages"] for t in status["tiers"].values()] == [3, 5, 10]
        assert status["tiers"]["device"]["hit_tokens"] == 0
        assert status["counters"]["begins"] == 4
        assert status["sequences"] == 2
        text = run("stat", filled.path).out
        assert "CAPACITY" in text
        assert "begins 4, late copies 1" in text
        assert "found_tokens" not in text
        [device] = [line.split() for line in text.splitlines() if line.startswith("device")]
        assert device[-7:] == ["1", "2", "0", "0", "B", "0", "B"]
    after = run("stat", filled.path, "--json").json
    assert (after["open"], after["live"]) == (False, False)


def test_figures_of_an_earlier_owner_are_not_shown(run, filled) -> None:
    code = (
        "import os, signal\nfrom tierkv.live import LiveFile\n"
        f"live = LiveFile.create({str(filled.path / 'live')!r})\n"
        "live.publish({'tiers': {'host': {'pages': 99}}})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert read_live(filled.path / "live") is not None
    with filled.open():
        status = run("stat", filled.path, "--json").json
    assert (status["open"], status["live"]) == (True, False)
    assert status["tiers"]["host"]["pages"] == 0


def test_looking_changes_nothing(run, filled) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = [p for p in filled.path.rglob("*") if p.is_file() and p.name != "lock.mdb"]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in files}

    before = state()
    for arguments in (["stat"], ["ls"], ["ls", "--sequences"], ["verify"]):
        assert run(*arguments, filled.path, "--json").status == 0
    assert state() == before
