"""The GPU check where there is no GPU: it says so, and its rehearsal runs all of its code."""

import importlib
import json
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext

import gpu_check
import gpu_check_kernels
import gpu_check_support
import pytest
import torch
from gpu_check_process import Outcome, collect

from tierkv.devices.cpu import CpuDevice

NAMES = [part.name for part in gpu_check.PARTS]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_every_part_is_skipped_with_the_reason(tmp_path, results, capsys):
    out = tmp_path / "out.json"
    assert gpu_check.main(["--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["gpu"] is None
    assert [part["part"] for part in found["parts"]] == NAMES
    assert {part["status"] for part in found["parts"]} == {"skipped"}
    assert all("torch.cuda.is_available() is False" in part["error"] for part in found["parts"])
    assert capsys.readouterr().out.count("skipped in 0 s: torch.cuda.is_available()") == len(NAMES)
    assert not results.exists()


def test_the_rehearsal_runs_every_part(tmp_path, results, capsys):
    out = tmp_path / "out.json"
    code = gpu_check.main(["--device", "cpu", "--one-process", "--json", str(out)])
    parts = {part["part"]: part for part in json.loads(out.read_text())["parts"]}
    text = capsys.readouterr().out
    assert code == 0, text
    assert [*parts] == NAMES
    assert {name for name, part in parts.items() if part["status"] != "passed"} <= {"sanitizer"}
    assert all(part["rows"] for part in parts.values())
    kernels = {"copies", "codecs", "decode kernels", "prefill kernels", "quantised attention"}
    for name in kernels:
        assert all(row["ok"] for row in parts[name]["rows"]), name
    ways = {(row["method"], row["way"]) for row in parts["transfers"]["rows"] if "way" in row}
    assert len(ways) == 5 * 3
    (turn,) = parts["overlap"]["rows"]
    assert turn["optimum_s"] <= turn["no_overlap_s"]
    assert "SDPA" in text
    assert not results.exists()


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.timing = enable_timing

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert self.timing
        assert end.timing
        return 1e3 * (end.at - self.at)


class FakeStream:
    def wait_stream(self, stream):
        assert isinstance(stream, FakeStream)


class FakeGraph:
    captured = replayed = 0

    def replay(self):
        FakeGraph.replayed += 1

    @staticmethod
    @contextmanager
    def capture(graph):
        assert isinstance(graph, FakeGraph)
        FakeGraph.captured += 1
        yield


@pytest.mark.parametrize("name", ["transfers", "overlap", "decode"])
def test_what_only_runs_on_a_gpu_runs_with_stand_ins(name, monkeypatch):
    """The branches that the rehearsal leaves out: streams, events, graphs."""
    fakes = {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "graph": FakeGraph.capture,
        "stream": lambda stream: nullcontext(),
        "current_stream": FakeStream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for fake, value in fakes.items():
        monkeypatch.setattr(torch.cuda, fake, value)
    check = gpu_check_support.Check("cpu", small=True)
    check.is_cuda, check.open_device = True, lambda method="auto": CpuDevice()
    module, _, function = gpu_check.part_of(name).where.partition(":")
    before = FakeGraph.captured
    getattr(importlib.import_module(module), function)(check)
    assert [row for row in check.rows if "error" in row] == []
    assert len(check.rows) >= 1
    if name == "decode":
        assert FakeGraph.captured - before == 3 * 2
        assert FakeGraph.replayed > 0
        assert any(row["what"].endswith("graph") for row in check.rows)
    if name == "transfers":
        skipped = [row["what"] for row in check.rows if "skipped" in row]
        assert skipped in ([], ["method batch", "method 2d"], ["method batch"])


def test_a_part_runs_in_a_process_of_its_own(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--part", "decode kernels", "--json", str(out)]
    command = [sys.executable, gpu_check.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (part,) = json.loads(out.read_text())["parts"]
    assert part["status"] == "passed"
    assert len(part["rows"]) == 6


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("", "passed", ""),
        ("raise ValueError('no such thing')", "failed", "no such thing"),
        ("import os; os.abort()", "failed", "killed by signal 6"),
        ("import signal; signal.pause()", "timed out", "ended after"),
    ],
)
def test_what_a_process_wrote_before_its_end_counts(tmp_path, program, status, error):
    out = tmp_path / "rows.jsonl"
    first = f'open({str(out)!r}, \'w\').write(\'{{"what": "one", "ok": true}}\\n\')'
    budget = 2.0 if status == "timed out" else 60.0
    outcome = collect([sys.executable, "-c", f"{first}\n{program}"], out, budget)
    assert (outcome.status, outcome.rows) == (status, [{"what": "one", "ok": True}])
    assert error in outcome.error
    assert outcome.as_dict("x")["status"] == status


def test_wrong_bytes_and_errors_make_a_part_fail(monkeypatch, tmp_path, capsys):
    def forgetful(memory, table, k, v, *, layout, starts, counts):
        pass

    monkeypatch.setattr(gpu_check_kernels, "append", forgetful)
    monkeypatch.setattr(gpu_check_kernels, "checksum", None)
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--one-process", "--part", "copies", "--json", str(out)]
    assert gpu_check.main(arguments) == 1
    (part,) = json.loads(out.read_text())["parts"]
    assert part["status"] == "failed"
    wrong = {row["what"].split()[0] for row in part["rows"] if not row["ok"]}
    assert wrong == {"append", "checksum"}
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "FAILED TypeError" in text


def test_what_counts_as_what():
    of = Outcome.of
    assert of([], "", 1.0).status == "passed"
    assert of([{"what": "x", "skipped": "not here"}], "", 1.0).status == "skipped"
    assert of([{"what": "x", "skipped": "no"}, {"what": "y", "ok": True}], "", 1).status == "passed"
    assert of([{"what": "x", "ok": False}], "", 1.0).status == "failed"
    assert of([{"what": "x", "ok": True}], "an error", 1.0).status == "failed"


def test_a_gpu_gets_a_file_of_its_own_only_after_a_whole_check(results, monkeypatch):
    options = type("Options", (), {"json": None, "small": False})()
    result = {"gpu": "NVIDIA H200 (SXM)"}
    assert gpu_check.places(options, result, complete=True) == [results / "nvidia_h200_sxm.json"]
    assert gpu_check.places(options, result, complete=False) == []
    assert gpu_check.places(options, {"gpu": None}, complete=True) == []
    options.small = True
    assert gpu_check.places(options, result, complete=True) == []


def test_goals_are_shown():
    row = {"what": "copies", "value": 47.25, "unit": "GB/s", "ratio": 0.945, "goal": 0.9}
    assert " ".join(gpu_check.line(row).split()) == "copies 47.25 GB/s 0.945 goal 0.9: met"
    assert "MISSED" in gpu_check.line({**row, "ratio": 0.8})
    assert gpu_check_support.same_bits(torch.ones(2), torch.ones(2))
    assert not gpu_check_support.same_bits(torch.ones(2), torch.tensor([1.0, -1.0]))
