"""The overlap benchmark: its arithmetic, the simulated run, a glance at the real one."""

import json
import subprocess
import sys
from pathlib import Path

import overlap_cpu
import overlap_disk
import overlap_rows
import overlap_sim
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap.py"
KEYS = {
    "device": str,
    "source": str,
    "tokens": int,
    "ttft_s": float,
    "optimum_s": float,
    "no_overlap_s": float,
    "stall_pct": float,
    "hidden_pct": float,
}


def run(tmp_path, *arguments):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--dir", str(tmp_path), "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    for row in rows:
        for key, kind in KEYS.items():
            assert isinstance(row[key], kind), key
        assert 0 < row["optimum_s"] <= row["no_overlap_s"]
        stall, hidden = overlap_rows.percentages(
            row["ttft_s"], row["optimum_s"], row["no_overlap_s"]
        )
        assert (row["stall_pct"], row["hidden_pct"]) == (stall, hidden)
    return rows, done.stdout


@pytest.mark.parametrize(
    ("ttft", "best", "worst", "stall", "hidden"),
    [
        (1.0, 1.0, 2.0, 0.0, 100.0),
        (2.0, 1.0, 2.0, 100.0, 0.0),
        (1.25, 1.0, 2.0, 25.0, 75.0),
        (3.0, 2.0, 2.5, 50.0, -100.0),
        (1.5, 1.0, 1.0, 50.0, 100.0),  # there is nothing to hide
        (1.0 + 2e-16, 1.0, 1.0 + 4e-16, 0.0, 100.0),  # but for rounding
    ],
)
def test_percentages(ttft, best, worst, stall, hidden):
    assert overlap_rows.percentages(ttft, best, worst) == (stall, hidden)


def test_rows_follow_the_formula():
    row = overlap_rows.make_row("cpu", "host", 1, 8.0, [1.0, 4.0], [2.0, 1.0])
    assert (row["optimum_s"], row["no_overlap_s"]) == (6.0, 8.0)
    assert row["stall_pct"] == pytest.approx(100 / 3)
    assert (row["hidden_pct"], row["ratio"]) == (0.0, 5 / 3)
    apart = overlap_rows.make_row("sim", "disk", 1, 6.0, [1.0, 4.0], [2.0, 1.0], apart_s=7.0)
    assert (apart["optimum_s"], apart["no_overlap_s"]) == (6.0, 10.0)
    assert (apart["stall_pct"], apart["hidden_pct"]) == (0.0, 100.0)


def test_two_lanes_in_a_row():
    """Reads of 3 and copies of 1, and the other way round: by hand."""
    assert overlap_disk.through_two([3.0, 3.0, 3.0], [1.0, 1.0, 1.0]) == [4.0, 3.0, 3.0]
    assert overlap_disk.through_two([1.0, 1.0, 1.0], [3.0, 3.0, 3.0]) == [4.0, 3.0, 3.0]
    assert overlap_disk.through_two([1.0, 5.0, 1.0], [2.0, 2.0, 2.0]) == [3.0, 5.0, 2.0]


def test_the_geometry_is_that_of_the_model():
    assert overlap_rows.SPEC.slot_bytes == 1 << 20
    assert overlap_rows.BYTE_SCALE * 1024 == overlap_rows.TOKEN_BYTES == 32 * 2 * 8 * 128 * 2
    # 2 operations for each of 6.98e9 parameters without embeddings, a bit more for attention.
    seconds = 32 * overlap_sim.layer_seconds(0)
    assert seconds == pytest.approx(2 * 6.98e9 * 256 / 495e12, rel=0.01)


def test_simulated_loads_from_host_memory_reach_the_optimum(tmp_path):
    rows, printed = run(tmp_path, "--quick", "--device", "sim")
    assert {row["source"] for row in rows} == set(overlap_sim.SOURCES)
    assert all(row["stall_pct"] >= -1e-6 for row in rows), "quicker than is possible"
    for row in rows:
        if row["source"] in ("device", "host"):
            assert row["stall_pct"] <= 2, row
        if row["source"] == "host":
            assert row["ttft_s"] < 0.95 * row["no_overlap_s"]
    assert "% above the optimum" in printed
    again = list(overlap_sim.run([1024, 4096], tmp_path / "again"))
    assert again == [row for row in rows if row["tokens"] <= 4096]


def test_a_small_real_run(tmp_path):
    """Nothing about speed: other tests may be running."""
    tiny = ["--device", "cpu", "--tokens", "2048", "--rounds", "1", "--layer-ms", "0.3"]
    rows, printed = run(tmp_path, *tiny, "--ratio", "1", "--source", *overlap_cpu.SOURCES)
    assert [row["source"] for row in rows] == ["host", "disk", "disk_gated", "ring"]
    assert "hidden" in printed
    for row in rows:
        assert row["ttft_s"] > 0
        assert row["compute_s"] > 32 * 0.0001
        assert row["load_s"] > 32 * 0.0001
    assert rows[0]["in_turn_s"] > 0
