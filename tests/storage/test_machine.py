"""Random histories of one store: puts, deletes, reopenings, kills, power cuts and faults.

The model knows, for each page, which versions may be served and whether a miss is allowed.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus, SsdTier, WriteStatus
from tierkv.storage.testing import (
    TEST_NAMESPACE,
    CrashBackend,
    FaultyBackend,
    kill_image,
    make_page,
    page_bytes,
    page_key,
)

SIZE = 8 << 10
SLOT = SIZE + 4096
PAGES = 10
NUMBERS = range(14)

numbers = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=6)
FAULTS = [
    ("preadv", errno.EIO, 1),
    ("preadv", errno.EIO, 6),
    ("preadv", errno.EMFILE, 1),
    ("preadv", "flip", 1),
    ("preadv", "short", 2),
    ("pwritev", errno.EIO, 1),
    ("pwritev", errno.ENOSPC, 1),
    ("pwritev", "short", 2),
    ("pwritev", "flip", 1),
    ("fdatasync", errno.EIO, 1),
    ("fallocate", errno.ENOSPC, 1),
    ("commit_index", errno.ENOSPC, 1),
    ("commit_index", errno.EIO, 1),
    ("sync_index", errno.EIO, 1),
    ("write_file", errno.EIO, 1),
]


class StoreMachine(RuleBasedStateMachine):
    """One store directory, opened and ended in every way."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=self.directory))
        self.generation = 0
        self.versions = dict.fromkeys(NUMBERS, 0)  # the next version of each page
        self.current: dict[int, int] = {}  # pages that must be there, and their version
        self.possible: dict[int, set[int]] = {n: set() for n in NUMBERS}  # may come back
        self.flushed: dict[int, int] = {}  # what must survive even a power cut
        self.tier: SsdTier | None = None
        self.damaged = False  # a write was silently damaged: reads may find it at any time

    def path(self) -> Path:
        return self.root / f"store-{self.generation}"

    @initialize(zstd=st.booleans())
    def start(self, zstd: bool) -> None:
        self.codec = "zstd" if zstd else "raw"
        self.open()

    def open(self) -> None:
        self.crash = CrashBackend(self.path(), self.root / f"power-{self.generation}")
        self.faults = FaultyBackend(self.crash)
        self.tier = SsdTier.open(
            self.path(),
            capacity_bytes=PAGES * SLOT,
            slot_payload_bytes=SIZE,
            slab_bytes=4 * SLOT,
            codec=self.codec,
            sync_interval_s=1000,
            breaker_threshold=1000,
            backend=self.faults,
        )
        image = self.root / f"power-{self.generation}"
        if not (image / "meta").exists():
            # A copied store: opening it has made durable whatever it serves.
            shutil.copytree(self.path(), image, dirs_exist_ok=True)

    def forget(self, gone: list[int]) -> None:
        """The tier dropped pages by itself: they may be missing, never wrong."""
        for number in gone:
            if number in self.current:
                self.possible[number].add(self.current.pop(number))
            self.flushed.pop(number, None)

    def drain(self) -> None:
        assert self.tier is not None
        by_key = {page_key(n): n for n in NUMBERS}
        self.forget([by_key[k] for k in self.tier.take_removed()])

    # -- what a user does ----------------------------------------------------------------

    @rule(chosen=numbers)
    def put(self, chosen: list[int]) -> None:
        assert self.tier is not None
        pages, versions = [], {}
        for n in dict.fromkeys(chosen):
            versions[n] = self.versions[n]
            self.versions[n] += 1
            pages.append(make_page(n, SIZE, version=versions[n], layer_bytes=4096))
        statuses = self.tier.put(pages).wait(30)
        assert statuses is not None
        for n, status in zip(versions, statuses, strict=True):
            if status is WriteStatus.WRITTEN:
                assert n not in self.current
                self.current[n] = versions[n]
            elif status is not WriteStatus.DUPLICATE:
                self.possible[n].add(versions[n])  # a scan may find what was half done
        self.drain()

    @rule(chosen=numbers)
    def delete(self, chosen: list[int]) -> None:
        assert self.tier is not None
        there = {n for n in chosen if self.tier.contains([page_key(n)])[0]}
        assert self.tier.delete([page_key(n) for n in chosen]) == len(there)
        self.forget(chosen)

    @rule(chosen=numbers)
    def read(self, chosen: list[int]) -> None:
        assert self.tier is not None
        outs = [aligned_empty(SIZE) for _ in chosen]
        statuses = self.tier.read([page_key(n) for n in chosen], outs, namespace=TEST_NAMESPACE)
        faulty = bool(self.faults.fired("preadv") or self.faults.fired("pwritev"))
        for n, out, status in zip(chosen, outs, statuses, strict=True):
            if status is ReadStatus.HIT:
                allowed = {self.current[n]} if n in self.current else self.possible[n]
                assert any(np.array_equal(out, page_bytes(n, SIZE, v)) for v in allowed)
            elif not faulty:
                assert n not in self.current, f"page {n} is missing: {status}"
        self.drain()

    @rule()
    def flush(self) -> None:
        assert self.tier is not None
        report = self.tier.flush(30)
        if report.ok:
            self.flushed = dict(self.current)
            assert report.pages >= len(self.current)

    @rule()
    def verify(self) -> None:
        assert self.tier is not None
        report = self.tier.verify(repair=True)
        assert report.index_mismatches == 0 or self.tier.stats().write_fault
        self.drain()

    # -- how it ends ---------------------------------------------------------------------

    def settle_scan(self) -> None:
        """After a scan, deleted or failed pages may be back, in any version written."""
        for n in NUMBERS:
            if n not in self.current:
                self.possible[n].update(range(self.versions[n]))

    def adopt(self) -> None:
        """See what a reopened store serves, and hold it to that from now on."""
        assert self.tier is not None
        for n in NUMBERS:
            if n in self.current:
                continue
            out = aligned_empty(SIZE)
            status = self.tier.read([page_key(n)], [out])[0]
            assert status is not ReadStatus.CORRUPT or self.damaged
            if status is ReadStatus.HIT:
                expected = {v: page_bytes(n, SIZE, v) for v in self.possible[n]}
                matching = [v for v, page in expected.items() if np.array_equal(out, page)]
                assert matching, f"page {n} came back as something never put"
                self.current[n] = matching[0]
        self.drain()

    @rule()
    def reopen(self) -> None:
        assert self.tier is not None
        self.faults.clear()
        broken = self.tier.stats().write_fault is not None
        assert self.tier.close()
        self.open()
        assert self.tier.stats().clean_open or broken or not self.tier.stats().pages
        self.settle_scan()
        self.adopt()
        self.flushed = dict(self.current)

    @rule()
    def kill(self) -> None:
        assert self.tier is not None
        self.generation += 1
        kill_image(str(self.root / f"store-{self.generation - 1}"), str(self.path()))
        self.faults.clear()
        self.tier.close()
        self.settle_scan()
        self.open()
        self.adopt()
        self.flushed = dict(self.current)

    @rule(seed=st.integers(0, 1000))
    def power_cut(self, seed: int) -> None:
        assert self.tier is not None
        image = self.root / f"power-{self.generation}"
        self.generation += 1
        shutil.copytree(image, self.path())
        at_the_cut = CrashBackend(self.path(), self.path(), inherit=self.crash)
        at_the_cut.tear(random.Random(seed))
        self.faults.clear()
        self.tier.close()
        lost = {n: v for n, v in self.current.items() if self.flushed.get(n) != v}
        for n, version in lost.items():
            self.possible[n].add(version)
            del self.current[n]
        self.settle_scan()
        self.open()
        self.adopt()
        self.flushed = dict(self.current)

    @rule(fault=st.sampled_from(FAULTS), skip=st.integers(0, 3))
    def inject(self, fault: tuple, skip: int) -> None:
        op, action, times = fault
        self.damaged |= (op, action) == ("pwritev", "flip")
        self.faults.inject(op, action, skip=skip, times=times)

    @invariant()
    def holds_together(self) -> None:
        if self.tier is not None:
            self.tier.check()

    def teardown(self) -> None:
        if self.tier is not None:
            self.faults.clear()
            self.tier.close()
        shutil.rmtree(self.root)


@pytest.mark.parametrize("steps", [25])
def test_any_history(fast_dir, steps):
    StoreMachine.directory = fast_dir
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
