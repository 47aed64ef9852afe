"""The control-plane benchmark runs and keeps its machine-readable shape."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "control_plane.py"


def test_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--pages", "3000", "--rounds", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "look-ups/s" in done.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["pages"] == 3000
    assert min(row["lookups_per_s"], row["inserts_per_s"], row["bytes_per_page"]) > 0


def test_refuses_nonsense(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--pages", "3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--pages must be at least" in done.stderr
