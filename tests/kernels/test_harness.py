"""The harness for kernel tests must itself be able to fail."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLANTED = """
import os
import pytest
import torch
from guard import guarded
from tierkv.kernels.launch import INTERPRETED, jit, tl

@jit
def read_too_far(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))

def run(elements, at):
    out = torch.zeros(32)
    read_too_far[(1,)](guarded(torch.ones(elements), at=at), out, BLOCK=32)
    return out

def test_a_interpreted():
    assert INTERPRETED and run(32, "end").sum() == 32 and run(32, "start").sum() == 32

def test_b_dies():
    run(31, "end")

def test_c_fails():
    assert run(32, "end").sum() == 31

def test_d_skips():
    pytest.skip("for a reason")

def test_e_goes_on():
    pass
"""


@pytest.fixture
def planted(tmp_path):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    for name in ("conftest.py", "guard.py"):
        (tmp_path / name).write_text((here / name).read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "test_planted_interp.py").write_text(PLANTED)
    return tmp_path


def test_each_interpreted_case_reports_and_a_crash_fails_only_its_own(planted):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:faulthandler", str(planted)],
        cwd=planted,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    for case in ("a_interpreted", "e_goes_on"):
        assert f"PASSED test_planted_interp.py::test_{case}" in lines, done.stdout
    assert "the child process ended with code -11 in this test" in done.stdout
    for case in ("b_dies", "c_fails"):
        assert any(line.startswith(f"FAILED test_planted_interp.py::test_{case}") for line in lines)
    assert "2 failed, 2 passed, 1 skipped" in lines[-1]
