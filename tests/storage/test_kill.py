"""kill -9 at random moments, again and again: nothing confirmed is lost, nothing wrong served.

The child notes in a mapped file, outside the store, what it is about to do and what was
confirmed.  The file outlives the child, so that the parent knows what it may find.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus, SsdTier
from tierkv.storage.testing import TEST_NAMESPACE, page_bytes, page_key

SIZE = 8 << 10
SLOT = SIZE + 4096
PAGES = 24
NUMBERS = 32
ROUNDS = 32

# One 32-bit word a page: version << 4 | flags.
CONFIRMED, PENDING_PUT, PENDING_DELETE = 1, 2, 4

CHILD = """
import mmap, os, random, struct, sys
from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import make_page, page_key
path, words_path, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIZE, PAGES, NUMBERS = 8192, 24, 32
rng = random.Random(seed)
fd = os.open(words_path, os.O_RDWR)
words = mmap.mmap(fd, 0)
def get(n): return struct.unpack_from("<I", words, 4 * n)[0]
def put(n, version, flags): struct.pack_into("<I", words, 4 * n, version << 4 | flags)
tier = SsdTier.open(path, capacity_bytes=PAGES * (SIZE + 4096), slot_payload_bytes=SIZE,
                    slab_bytes=8 * (SIZE + 4096), sync_interval_s=0.02)
print("ready", flush=True)
while True:
    chosen = rng.sample(range(NUMBERS), rng.randint(1, 6))
    if rng.random() < 0.4:
        for n in chosen:
            put(n, get(n) >> 4, 4)
        tier.delete([page_key(n) for n in chosen])
    else:
        pages = []
        for n in chosen:
            if get(n) & 1 or tier.contains([page_key(n)])[0]:
                continue
            put(n, (get(n) >> 4) + 1, 2)
            pages.append(make_page(n, SIZE, version=get(n) >> 4))
        tier.put(pages).wait(30)
        if rng.random() < 0.5 and tier.flush().ok:
            for page in pages:
                n = page.info.end_token
                if tier.contains([page_key(n)])[0]:
                    put(n, get(n) >> 4, 1)
"""


class Expectation:
    """What the child noted."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4 * NUMBERS))
        self.file = path.open("r+b")
        self.words = np.frombuffer(mmap.mmap(self.file.fileno(), 0), np.uint32)

    def check(self, tier: SsdTier) -> int:
        """Compare a reopened store with the notes; return how many pages it serves."""
        served = 0
        for n in range(NUMBERS):
            version, flags = int(self.words[n]) >> 4, int(self.words[n]) & 15
            out = aligned_empty(SIZE)
            status = tier.read([page_key(n)], [out], namespace=TEST_NAMESPACE)[0]
            assert status in (ReadStatus.HIT, ReadStatus.MISS), f"page {n}: {status}"
            if status is ReadStatus.MISS:
                assert flags != CONFIRMED, f"page {n} was confirmed and is gone"
                continue
            served += 1
            # A deleted page may be back in any version; one confirmed is the last one.
            allowed = [version] if flags == CONFIRMED else range(version, -1, -1)
            found = [v for v in allowed if np.array_equal(out, page_bytes(n, SIZE, v))]
            assert found, f"page {n} holds something that was never put (flags {flags})"
        return served

    def settle(self, tier: SsdTier) -> None:
        """Delete what is not confirmed, so that the next child starts from what it knows."""
        loose = [n for n in range(NUMBERS) if int(self.words[n]) & 15 != CONFIRMED]
        tier.delete([page_key(n) for n in loose])

    def close(self) -> None:
        del self.words
        self.file.close()


@pytest.mark.slow
def test_kill_at_random_moments(fast_dir):
    path, notes = fast_dir / "store", Expectation(fast_dir / "words")
    rng = random.Random(11)
    served = recovered = 0
    try:
        for round_ in range(ROUNDS):
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(path), str(fast_dir / "words"), str(round_)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert process.stdout is not None
            assert process.stderr is not None
            with process.stdout, process.stderr:
                if round_ % 4 == 3:
                    pass  # kill it anywhere, even while it opens the store
                elif process.stdout.readline() != b"ready\n":
                    raise AssertionError(process.stderr.read().decode())
                with contextlib.suppress(subprocess.TimeoutExpired):  # let it run for a while
                    process.wait(rng.uniform(0, 0.12) + (0.2 if round_ % 4 == 3 else 0))
                process.send_signal(signal.SIGKILL)
                assert process.wait(30) == -signal.SIGKILL
            tier = SsdTier.open(
                path,
                capacity_bytes=PAGES * SLOT,
                slot_payload_bytes=SIZE,
                slab_bytes=8 * SLOT,
            )
            with tier:
                assert tier.stats().recover_seconds < 2
                recovered += tier.stats().recovered_pages
                served += notes.check(tier)
                tier.check()
                assert tier.verify().ok
                notes.settle(tier)
    finally:
        notes.close()
    assert served > ROUNDS
    assert recovered > 0
