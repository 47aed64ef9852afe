"""Two kinds of kernel tests in one run: ``test_*_interp.py`` and ``test_*_compile.py``.

Triton decides when a kernel's module is imported whether it will be interpreted, and an access
far outside of memory kills the process.  So the tests of a ``*_interp.py`` file run in a child
process with ``TRITON_INTERPRET=1``: the first one that is due starts it for all selected tests
of the file, each then reports what became of it there, and when a test kills the child, that
test fails and another child goes on with the rest.  Everything else runs in this process.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns, and 3.10 changes it

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REPORT = "TIERKV_KERNEL_TEST_REPORT"  # where a child writes what became of its tests
CHILD_SECONDS = 300
HERE = Path(__file__).parent


def is_interp(item):
    return item.path.parent == HERE and item.path.name.endswith("_interp.py")


def is_compile(item):
    return item.path.parent == HERE and item.path.name.endswith("_compile.py")


if find_spec("triton") is None:
    collect_ignore_glob = ["*_interp.py", "*_compile.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if INTERPRETED and is_compile(item):
            item.add_marker(pytest.mark.skip(reason="kernels are interpreted in this process"))


def run_child(config, items):
    """Run tests of one file in children and return {node id: (outcome, report)}."""
    results = {}
    left = [item.nodeid for item in items]
    folder = tempfile.TemporaryDirectory(prefix="kernel-tests-")
    report = Path(folder.name) / "report.jsonl"
    while left:
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=0", *left]
        environment = {**os.environ, "TRITON_INTERPRET": "1", REPORT: str(report)}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=config.rootpath,
                capture_output=True,
                text=True,
                timeout=CHILD_SECONDS,
                check=False,
            )
            end = f"ended with code {done.returncode}"
            output = f"{done.stderr[:2000]}\n{done.stdout[-4000:]}"
        except subprocess.TimeoutExpired as late:
            end, output = f"did not end in {CHILD_SECONDS} s", str(late.stdout)[-4000:]
        lines = report.read_text().splitlines() if report.exists() else []
        started = None
        for line in lines:
            event = json.loads(line)
            if event["outcome"] == "started":
                started = event["id"]
            else:
                results[event["id"]] = (event["outcome"], event["text"])
        left = [node for node in left if node not in results]
        if left:
            # Whichever was under way is to blame, else the first.
            blamed = started if started in left else left[0]
            text = f"the child process {end} in this test\n{output}"
            results[blamed] = ("failed", text)
            left.remove(blamed)
    folder.cleanup()
    return results


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if INTERPRETED or not is_interp(pyfuncitem):
        return None
    session = pyfuncitem.session
    known = session.__dict__.setdefault("kernel_test_results", {})
    if pyfuncitem.nodeid not in known:
        same = [i for i in session.items if is_interp(i) and i.path == pyfuncitem.path]
        known.update(run_child(pyfuncitem.config, same))
    outcome, text = known[pyfuncitem.nodeid]
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


def note(event):
    with open(os.environ[REPORT], "a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_runtest_logstart(nodeid):
    if REPORT in os.environ and INTERPRETED:
        note({"id": nodeid, "outcome": "started"})


def pytest_runtest_logreport(report):
    if REPORT not in os.environ or not INTERPRETED:
        return
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if report.outcome == "skipped" else str(report.longrepr or "")
        note({"id": report.nodeid, "outcome": report.outcome, "text": text})
