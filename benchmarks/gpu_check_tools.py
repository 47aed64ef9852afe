"""Other programs that the GPU check runs: the device tests, and NVIDIA's memory checker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_check_support import Check

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("gpu_check.py")
SANITIZER_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
SANITIZED = ("copies", "decode kernels")  # parts that run under it, with small sizes
SANITIZER_S = 70


def run_device_tests(check: Check) -> None:
    """Run the tests of the device protocol on this device."""
    name = "cuda" if check.is_cuda else "cpu"
    missing = [each for each in ("pytest", "hypothesis") if find_spec(each) is None]
    if missing:
        check.row("tests of the device protocol", skipped=f"{missing} are not installed")
        return
    where = "tests/devices/test_conformance.py" if check.small else "tests/devices"
    command = [sys.executable, "-m", "pytest", where, "-k", name, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {
        what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    }
    more = {} if done.returncode == 0 else {"output": done.stdout[-2000:] + done.stderr[-500:]}
    ok = done.returncode == 0 and counts.get("passed", 0) > 0
    check.row(
        f"tests of the device protocol, {name}", counts.get("passed", 0), "passed", ok=ok, **more
    )


def find_sanitizer() -> str | None:
    """Return where compute-sanitizer is, None where it is not installed."""
    places = [os.environ.get("PATH", ""), *SANITIZER_PLACES]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run_sanitizer(check: Check) -> None:
    """Run kernels under compute-sanitizer's memcheck, with small sizes."""
    tool = find_sanitizer()
    if tool is None:
        check.row("compute-sanitizer", skipped="it is not installed")
        return
    for part in SANITIZED:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "86", sys.executable]
        command += [str(SCRIPT), "--child", part, "--device", check.device, "--small"]
        # Else one allocation of PyTorch's serves many tensors, and their borders go unseen.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        label = f"memcheck of {part}"
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=SANITIZER_S / len(SANITIZED),
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            check.row(label, skipped=f"it took over {SANITIZER_S // len(SANITIZED)} s")
            continue
        output = done.stdout + done.stderr
        summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
        ok = done.returncode == 0 and summary is not None and summary[1] == "0"
        check.row(label, ok=ok, **({} if ok else {"output": output[-2000:]}))
