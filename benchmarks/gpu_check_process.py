"""A part of the GPU check in a process of its own, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

GRACE_S = 5.0


@dataclass
class Outcome:
    """What became of a part: ``passed``, ``failed``, ``timed out`` or ``skipped``."""

    status: str
    error: str = ""
    seconds: float = 0.0
    rows: list[dict] = field(default_factory=list)

    @classmethod
    def of(cls, rows: list[dict], error: str, seconds: float) -> Outcome:
        """Return the outcome of a part that ran: failed also where a comparison was wrong."""
        wrong = any(row.get("ok") is False for row in rows)
        skipped = bool(rows) and all("skipped" in row for row in rows)
        status = "failed" if error or wrong else "skipped" if skipped else "passed"
        return cls(status, error, seconds, rows)

    def as_dict(self, part: str) -> dict:
        """Return it for the JSON file."""
        found = {"part": part, "status": self.status, "seconds": self.seconds}
        return {**found, **({"error": self.error} if self.error else {}), "rows": self.rows}


def collect(command: list[str], out: Path, budget_s: float) -> Outcome:
    """Run a command, end it when its time is up, and read the rows that it wrote.

    What it wrote before it failed, was killed or ran out of time counts.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its own children end with it
    )
    late = False
    try:
        _, errors = process.communicate(timeout=budget_s)
    except subprocess.TimeoutExpired:
        late = True
        _end(process)
        _, errors = process.communicate(timeout=GRACE_S)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    seconds = time.monotonic() - started
    if late:
        return Outcome("timed out", f"ended after {budget_s:.0f} s", seconds, rows)
    error = ""
    if process.returncode:
        error = errors[-2000:] or f"the process ended with code {process.returncode}"
        if process.returncode < 0:
            error = f"{errors[-2000:]}\nthe process was killed by signal {-process.returncode}"
    return Outcome.of(rows, error, seconds)


def _end(process: subprocess.Popen) -> None:
    """End a process that we started, and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended by itself
        return
