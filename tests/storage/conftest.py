"""Fixtures of the storage tests: a quick directory, tiers that are checked and closed."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import FaultyBackend

SIZE = 16 << 10
SLOT = SIZE + 4096


@pytest.fixture
def fast_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: syncs cost nothing there."""
    if os.access("/dev/shm", os.W_OK):
        path = Path(tempfile.mkdtemp(prefix="tierkv-test-", dir="/dev/shm"))
        yield path
        shutil.rmtree(path, ignore_errors=True)
    else:
        yield tmp_path


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """After each test no thread of a tier is left and no descriptor stays open."""
    before = _descriptors()
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("tierkv-")]
    assert not left, f"threads left behind: {left}"
    leaked = {n: p for n, p in _descriptors().items() if n not in before and "tierkv" in p}
    assert not leaked, f"descriptors left open: {leaked}"


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


@pytest.fixture
def open_tier(fast_dir: Path) -> Iterator[Callable[..., SsdTier]]:
    """Open tiers with small slots; each is checked and closed when the test ends."""
    tiers: list[SsdTier] = []

    def open_tier(path: Path | str | None = None, *, pages: int = 16, **options) -> SsdTier:
        options.setdefault("slot_payload_bytes", SIZE)
        options.setdefault("capacity_bytes", pages * (options["slot_payload_bytes"] + 4096))
        tier = SsdTier.open(path or fast_dir / "store", **options)
        tiers.append(tier)
        return tier

    yield open_tier
    for tier in tiers:
        try:
            if not tier.closed:
                tier.check()
        finally:
            tier.close()


@pytest.fixture
def backend() -> FaultyBackend:
    """The operating system, until a test injects faults."""
    return FaultyBackend()


@pytest.fixture
def tier(open_tier: Callable[..., SsdTier], backend: FaultyBackend) -> SsdTier:
    """A tier over ``backend``."""
    return open_tier(backend=backend)
