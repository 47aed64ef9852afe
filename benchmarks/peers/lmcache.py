"""tierkv and LMCache side by side: host memory and disk, the same bytes, in one run.

Each side lives in a process of its own, so that neither's threads and memory disturb the other;
commands go over a pipe and only one side works at a time.  A round runs every operation on every
side, in an order that rotates; the first round is thrown away.  All buffers are touched before,
every byte got is compared outside the measured time.

    host put   into the host tier / its hot cache: room found, copied, entered by key
    host get   out of it by key, copied
    disk put   from host memory to disk, until a get finds it; tierkv finds only what is synced,
               LMCache what is in the page cache or, with O_DIRECT, in the drive's
    disk put, synced   until it is durable: tierkv flushed, index included; LMCache syncs nothing
               itself, so with an fsync of each file and the folder by this benchmark
    disk get   from disk to host memory, cold: O_DIRECT, or dropped from the page cache before
    disk get warm   LMCache's default out of the page cache, which tierkv does not use

    python benchmarks/peers/lmcache.py --make-env ../lmcache-env
    python benchmarks/peers/lmcache.py --python ../lmcache-env/bin/python --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
TORCH = "torch==2.13.0"  # its CPU build, where pip finds one
LMCACHE = "lmcache==0.5.6"
# What its storage classes import, without what needs a GPU.
NEEDS = [
    "numpy<=2.2.6", "aiofile", "aiofiles", "blake3", "msgspec", "pyzmq", "pyyaml", "psutil",
    "py-cpuinfo", "prometheus_client<=0.24.1", "sortedcontainers", "cachetools", "nvtx",
    "safetensors", "redis", "cryptography", "numba", "transformers", "httpx", "aiohttp", "fastapi",
    "uvicorn", "httptools", "opentelemetry-api", "opentelemetry-sdk",
    "opentelemetry-exporter-otlp", "opentelemetry-exporter-prometheus",
]  # fmt: skip
SIDES = Path(__file__).parent / "sides"
# (operation, arguments, peer's settings that take part)
STEPS = [
    ("host_put", {}, ("direct",)),
    ("host_get", {}, ("direct",)),
    ("disk_put", {}, ("direct", "default")),
    ("disk_get", {"warm": False}, ("direct", "default")),
    ("disk_get", {"warm": True}, ("default",)),
]
GOALS = {
    ("host put", "memory"): 2.0,
    ("host get", "memory"): 2.0,
    ("disk put", "O_DIRECT"): 1.0,
    ("disk put", "default"): 3.0,
    ("disk put, synced", "O_DIRECT"): 1.0,
    ("disk put, synced", "default"): 3.0,
    ("disk get", "O_DIRECT"): 1.0,
}


class Child:
    """One side's process."""

    def __init__(self, python: str, script: str, log: Path, **arguments: Any) -> None:
        """Start it."""
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, str(SIDES / script), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "LMCACHE_TRACK_USAGE": "false"},
            )

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Let the side do something and wait for it.

        Raises:
            RuntimeError: it ended, with the end of what it printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            raise RuntimeError(f"{do} failed:\n{self._log.read_text(errors='replace')[-2000:]}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; 0 as well when there is no LMCache to compare with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--python", metavar="PATH", help="python of an environment that has LMCache")
    add("--make-env", type=Path, metavar="DIR", help="create one there first (1.6 GB)")
    add("--rounds", type=int, default=9, help="rounds that count (default 9)")
    add("--objects", type=int, default=8, help="32 MiB objects a round; as many bytes of small")
    add("--size", type=int, action="append", metavar="MIB",
        help="MiB of an object; 32 and 1 by default")  # fmt: skip
    add("--io-threads", type=int, default=4, help="of tierkv's disk tier; 4, as the store has it")
    add("--directory", type=Path, default=Path(), help="where files are made")
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    python = options.python
    if options.make_env:
        python = str(make_environment(options.make_env))
    reason = why_not(python)
    if reason:
        print(f"skipped: {reason}")
        return 0
    rows, notes = [], []
    options.directory.mkdir(parents=True, exist_ok=True)
    place = machine()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="peers-") as folder:
        for size in options.size or [32, 1]:
            count = max(1, options.objects * 32 // size)
            found, told = compare(
                python,
                Path(folder).resolve(),
                count,
                size * MIB,
                options.rounds,
                options.io_threads,
            )
            show(found, size, count)
            rows += found
            notes += told
    for note in notes:
        print(note)
    if options.json:
        result = {"rows": rows, "notes": notes, "machine": place, "parameters": _plain(options)}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def make_environment(folder: Path) -> Path:
    """Create an environment with LMCache unless it is there; return its python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch first and alone, so that the CPU build that is at hand is taken.
    for wanted in ([TORCH], ["--no-deps", LMCACHE], NEEDS):
        subprocess.run([*pip, *wanted], check=True)
    return python


def why_not(python: str | None) -> str:
    """Return why there is no LMCache to compare with; empty when there is."""
    if python is None:
        return "no LMCache: give --python of an environment that has it, or --make-env DIR"
    code = "import lmcache.v1.storage_backend.local_disk_backend"
    try:
        # -P: this very file is called lmcache as well.
        done = subprocess.run(
            [python, "-P", "-c", code], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{python} cannot be run: {error}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python} has no usable LMCache: {last}"
    return ""


def compare(
    python: str, folder: Path, count: int, size: int, rounds: int, io_threads: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run all rounds for one size of object; return rows and remarks."""
    task = {"folder": str(folder), "count": count, "size": size}
    sides: dict[str, Child] = {}
    samples: list[dict[str, float]] = []
    try:
        sides["tierkv"] = Child(
            sys.executable, "tierkv_side.py", folder / "tierkv.log", io_threads=io_threads, **task
        )
        for setting in ("direct", "default"):
            sides[setting] = Child(
                python,
                "lmcache_side.py",
                folder / f"{setting}.log",
                direct=setting == "direct",
                **task,
            )
        told = {name: side.call("describe") for name, side in sides.items()}
        for number in range(rounds + 1):
            sample = one_round(sides, number)
            if number:
                samples.append(sample)
        for side in sides.values():
            side.call("close")
    finally:
        for side in sides.values():
            side.end()
    assert told["direct"]["direct"], "LMCache does not use O_DIRECT"
    notes = [
        f"{size // MIB} MiB: tierkv made {samples[0]['tierkv syncs']:.0f} fdatasyncs a put of "
        f"{count} objects (O_DIRECT: {told['tierkv']['direct']}); LMCache "
        f"{told['direct']['lmcache']} makes none, its fsyncs are the benchmark's"
    ]
    return summarise(samples, count, size), notes


def one_round(sides: dict[str, Child], number: int) -> dict[str, float]:
    """Run every operation on every side; return seconds by side, operation and variant."""
    sample: dict[str, float] = {}
    for side in sides.values():
        side.call("renew", number=number)
    for step, (do, given, settings) in enumerate(STEPS):
        names = ["tierkv", *settings]
        shift = (number + step) % len(names)
        for name in names[shift:] + names[:shift]:
            result = sides[name].call(do, **given)
            what = do + (" warm" if given.get("warm") else "")
            sample[f"{name} {what}"] = result["seconds"]
            if "durable_seconds" in result:
                sample[f"{name} {what} durable"] = result["durable_seconds"]
            if "syncs" in result:
                sample[f"{name} syncs"] = result["syncs"]
        if do == "host_put":  # the other instance needs its objects as well, unmeasured
            sides["default"].call("host_put")
    return sample


def summarise(samples: list[dict[str, float]], count: int, size: int) -> list[dict[str, Any]]:
    """Return one row for each comparison; a ratio above 1 means that tierkv is quicker."""
    rows = []
    for operation, setting, theirs, ours in (
        ("host put", "memory", "direct host_put", "tierkv host_put"),
        ("host get", "memory", "direct host_get", "tierkv host_get"),
        ("disk put", "O_DIRECT", "direct disk_put", "tierkv disk_put"),
        ("disk put", "default", "default disk_put", "tierkv disk_put"),
        ("disk put, synced", "O_DIRECT", "direct disk_put durable", "tierkv disk_put durable"),
        ("disk put, synced", "default", "default disk_put durable", "tierkv disk_put durable"),
        ("disk get", "O_DIRECT", "direct disk_get", "tierkv disk_get"),
        ("disk get", "default, cold", "default disk_get", "tierkv disk_get"),
        ("disk get", "default, warm", "default disk_get warm", "tierkv disk_get warm"),
    ):
        ratios = sorted(sample[theirs] / sample[ours] for sample in samples)
        middle = statistics.median(ratios)
        goal = GOALS.get((operation, setting))
        rows.append(
            {
                "operation": operation,
                "lmcache": setting,
                "object_bytes": size,
                "objects": count,
                "tierkv_gb_s": count * size / statistics.median(s[ours] for s in samples) / 1e9,
                "lmcache_gb_s": count * size / statistics.median(s[theirs] for s in samples) / 1e9,
                "ratio": middle,
                "ratio_min": ratios[0],
                "ratio_max": ratios[-1],
                "rounds": len(samples),
                "goal": goal,
                "words": words(middle, ratios[0], ratios[-1]),
            }
        )
    return rows


def words(middle: float, low: float, high: float) -> str:
    """Say who is quicker, if the rounds agree."""
    if low <= 1 <= high:
        return "no clear difference"
    return f"tierkv {middle:.1f} times as quick" if middle > 1 else "LMCache is quicker"


def show(rows: list[dict[str, Any]], size: int, count: int) -> None:
    """Print the rows of one size."""
    print(f"\n{count} objects of {size} MiB, every byte compared")
    print(
        f"{'operation':18}{'LMCache setting':>16}{'tierkv GB/s':>13}{'LMCache GB/s':>14}"
        f"{'ratio':>8}  {'least .. most':16}{'goal':>6}"
    )
    for row in rows:
        goal = "" if row["goal"] is None else f"{row['goal']:.0f}"
        spread = f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}"
        print(
            f"{row['operation']:18}{row['lmcache']:>16}{row['tierkv_gb_s']:13.2f}"
            f"{row['lmcache_gb_s']:14.2f}{row['ratio']:8.2f}  {spread:16}{goal:>6}  {row['words']}"
        )


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}


if __name__ == "__main__":
    sys.exit(main())
