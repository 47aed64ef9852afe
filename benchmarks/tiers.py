"""Save and load of the host tier and the SSD tier, against what this machine can do at all.

What is compared, always through the public batch calls:

* host: ``HostArena.save`` and ``load`` against ``np.copyto`` between the same buffers;
* ssd: ``SsdTier.put`` + ``flush`` and ``SsdTier.read``, checksums, index and fdatasyncs
  included, against plain O_DIRECT writes and reads of equal bytes (headers included) at equal
  depth with an equal number of fdatasyncs, in a preallocated file that was written before.

Each round measures the limit, tierkv and the limit again, in an order that rotates.  The
figure is the median of the paired ratios tierkv/limit, divided by the median of the ratios
limit/limit of the same run (the A/A ratio), because a machine that is not idle gives a limit
that differs from itself.  Reads bypass the page cache, in an order that differs each round.

    python benchmarks/tiers.py [--quick] [--json FILE] [--dir DIR] [--tier host|ssd]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from queue import SimpleQueue

import numpy as np

from tierkv.storage.aligned import ByteArray, aligned_empty
from tierkv.storage.arena import HostArena
from tierkv.storage.format import HEADER_BYTES, slot_bytes
from tierkv.storage.ssd import PageInfo, PageWrite, ReadStatus, SsdTier, WriteStatus
from tierkv.units import format_bytes

KIB, MIB = 1 << 10, 1 << 20
DEPTH = 4
NAMESPACE = bytes(32)

Operation = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One line of the result; ``ratio`` is already divided by ``aa_ratio``."""

    tier: str
    op: str
    page_bytes: int
    gb_s: float
    limit_gb_s: float
    ratio: float
    aa_ratio: float
    spread: float
    rounds: int
    bytes_per_round: int


def measure(
    tier: str,
    op: str,
    page_bytes: int,
    total: int,
    rounds: int,
    ours: Operation,
    limit: Operation,
    prepare: Operation = lambda: None,
) -> Row:
    """Time ``ours`` against ``limit``, paired and interleaved; one round is thrown away."""
    times: dict[str, list[float]] = {"ours": [], "limit": [], "again": []}
    calls = {"ours": ours, "limit": limit, "again": limit}
    for number in range(rounds + 1):
        names = list(calls)
        shift = number % 3
        for name in names[shift:] + names[:shift]:
            if name == "ours":
                prepare()
            started = time.perf_counter()
            calls[name]()
            elapsed = time.perf_counter() - started
            if number:
                times[name].append(elapsed)
    ratios = [b / a for a, b in zip(times["ours"], times["limit"], strict=True)]
    aa = statistics.median(b / a for a, b in zip(times["again"], times["limit"], strict=True))
    quarters = statistics.quantiles(ratios, n=4)
    return Row(
        tier=tier,
        op=op,
        page_bytes=page_bytes,
        gb_s=total / statistics.median(times["ours"]) / 1e9,
        limit_gb_s=total / statistics.median(times["limit"]) / 1e9,
        ratio=statistics.median(ratios) / aa,
        aa_ratio=aa,
        spread=(quarters[2] - quarters[0]) / aa,
        rounds=rounds,
        bytes_per_round=total,
    )


# -- host --------------------------------------------------------------------------------


def host_rows(page_bytes: int, total: int, rounds: int) -> Iterator[Row]:
    """Measure saving into and loading from the arena."""
    count = total // page_bytes
    arena = HostArena(count, page_bytes)
    memory = aligned_empty(total).reshape(count, page_bytes)
    memory[:] = np.random.default_rng(1).integers(0, 256, page_bytes, dtype=np.uint8)
    pages = list(memory)
    slots = list(range(count))

    def copy_in() -> None:
        for slot, page in zip(slots, pages, strict=True):
            np.copyto(arena.slot(slot), page)

    def copy_out() -> None:
        for slot, page in zip(slots, pages, strict=True):
            np.copyto(page, arena.slot(slot))

    size = count * page_bytes
    yield measure(
        "host", "save", page_bytes, size, rounds, lambda: arena.save(slots, pages), copy_in
    )
    yield measure(
        "host", "load", page_bytes, size, rounds, lambda: arena.load(slots, pages), copy_out
    )
    arena.check()
    arena.close()


# -- ssd ---------------------------------------------------------------------------------


class RawFile:
    """What the device gives: plain O_DIRECT on a preallocated file, from ``DEPTH`` threads.

    It transfers to and from the very memory that the tier's pages are in: how scattered a
    buffer's physical pages are changes the speed of a transfer by up to two times.
    """

    def __init__(self, path: str, pages: list[ByteArray]) -> None:
        self._slot = slot = HEADER_BYTES + pages[0].nbytes
        self._count = count = len(pages)
        self._pages = pages
        self._header = aligned_empty(HEADER_BYTES)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, slot * count)
        self._jobs: SimpleQueue[Operation | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._syncs: SimpleQueue[bool | None] = SimpleQueue()
        self._synced: SimpleQueue[None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work) for _ in range(DEPTH)]
        self._threads.append(threading.Thread(target=self._sync))
        for thread in self._threads:
            thread.start()
        self.write(1)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def _sync(self) -> None:
        while self._syncs.get() is not None:
            os.fdatasync(self._fd)
            self._synced.put(None)

    def _write(self, slot: int) -> None:
        buffers = [self._header, self._pages[slot]]
        assert os.pwritev(self._fd, buffers, slot * self._slot) == self._slot

    def _read(self, slot: int) -> None:
        buffers = [self._header, self._pages[slot]]
        assert os.preadv(self._fd, buffers, slot * self._slot) == self._slot

    def write(self, syncs: int) -> None:
        """Write every slot, with ``syncs`` fdatasyncs spread over it, the last one at the end.

        Like the tier's, a sync runs beside the writes that follow it.
        """
        for slot in range(self._count):
            self._jobs.put(lambda slot=slot: self._write(slot))
        due = [self._count * (n + 1) // syncs for n in range(syncs)]
        for finished in range(1, self._count + 1):
            self._check(self._done.get())
            for _ in range(due.count(finished)):
                self._syncs.put(True)
        for _ in range(syncs):
            self._synced.get()

    def read(self, order: list[int]) -> None:
        """Read the slots in the given order."""
        for slot in order:
            self._jobs.put(lambda slot=slot: self._read(slot))
        for _ in order:
            self._check(self._done.get())

    @staticmethod
    def _check(error: BaseException | None) -> None:
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads and close the file."""
        for _ in range(DEPTH):
            self._jobs.put(None)
        self._syncs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._fd)


class TierUnderTest:
    """A tier exactly as large as one round, with the pages of the round in aligned memory."""

    def __init__(self, path: str, page_bytes: int, count: int) -> None:
        self._count = count
        self._tier = SsdTier.open(
            path,
            capacity_bytes=slot_bytes(page_bytes) * count,
            slot_payload_bytes=page_bytes,
            io_threads=DEPTH,
            max_queue_bytes=4 << 30,
        )
        if not self._tier.stats().direct:
            raise SystemExit(f"{path}: O_DIRECT is refused here; choose another --dir")
        self._arena = HostArena(count, page_bytes)
        self._arena.slots[:] = np.random.default_rng(3).integers(0, 256, page_bytes, dtype=np.uint8)
        self.pages = [self._arena.slot(n) for n in range(count)]
        self._names = itertools.count()
        self._keys: list[bytes] = []
        self._layer = page_bytes // 16
        self.renew()
        self.write()

    def renew(self) -> None:
        """Empty the tier, durably, and choose new keys (outside the measured time)."""
        self._tier.delete(self._keys)
        self._tier.flush()
        name = next(self._names)
        self._keys = [
            hashlib.sha256(f"{name}/{page}".encode()).digest() for page in range(self._count)
        ]

    def write(self) -> None:
        """Put all pages and make them durable."""
        pages = [
            PageWrite(PageInfo(key, NAMESPACE), page, self._layer)
            for key, page in zip(self._keys, self.pages, strict=True)
        ]
        ticket = self._tier.put(pages)
        report = self._tier.flush()
        statuses = ticket.wait(0)
        assert report.ok, "the flush failed"
        assert statuses == [WriteStatus.WRITTEN] * self._count, "a write failed"

    def read(self, order: list[int]) -> None:
        """Read all pages in the given order."""
        statuses = self._tier.read(
            [self._keys[n] for n in order], [self.pages[n] for n in order], namespace=NAMESPACE
        )
        assert statuses == [ReadStatus.HIT] * self._count, "a read failed"

    def syncs(self) -> int:
        """Fdatasyncs of slabs and index so far."""
        stats = self._tier.stats()
        return stats.slab_syncs + stats.index_syncs

    def close(self) -> None:
        """Check and close the tier."""
        self._tier.check()
        self._tier.close()


def ssd_rows(folder: str, page_bytes: int, total: int, rounds: int) -> Iterator[Row]:
    """Measure durable writes and cold reads."""
    count = total // page_bytes
    rng = np.random.default_rng(4)
    path = os.path.join(folder, f"tier-{page_bytes}")
    with contextlib.ExitStack() as stack:
        tier = TierUnderTest(path, page_bytes, count)
        stack.callback(tier.close)
        raw = RawFile(path + ".raw", tier.pages)
        stack.callback(raw.close)
        tier.renew()
        before = tier.syncs()
        tier.write()
        syncs = tier.syncs() - before
        size = count * page_bytes
        yield measure(
            "ssd",
            "write",
            page_bytes,
            size,
            rounds,
            tier.write,
            lambda: raw.write(syncs),
            prepare=tier.renew,
        )
        yield measure(
            "ssd",
            "read",
            page_bytes,
            size,
            rounds,
            lambda: tier.read(rng.permutation(count).tolist()),
            lambda: raw.read(rng.permutation(count).tolist()),
        )


# -- command line ------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller rounds, three page sizes")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--dir", metavar="DIR", help="where the SSD tier is measured")
    parser.add_argument("--tier", choices=["host", "ssd"], help="only this tier")
    parser.add_argument("--rounds", type=int, default=15, help="paired rounds (default 15)")
    options = parser.parse_args()
    sizes = (
        [64 * KIB, MIB, 4 * MIB]
        if options.quick
        else [
            64 * KIB,
            256 * KIB,
            MIB,
            4 * MIB,
            32 * MIB,
        ]
    )
    total = 64 * MIB if options.quick else 256 * MIB
    folder = tempfile.mkdtemp(prefix="tierkv-bench-", dir=options.dir or ".")
    rows: list[Row] = []
    try:
        for page_bytes in sizes:
            if options.tier in (None, "host"):
                rows += show(host_rows(page_bytes, total, options.rounds))
            if options.tier in (None, "ssd"):
                rows += show(ssd_rows(folder, page_bytes, total, options.rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": [asdict(row) for row in rows]}, file, indent=1)


def show(rows: Iterator[Row]) -> list[Row]:
    """Print rows as they come and return them."""
    shown = []
    for row in rows:
        if not shown and not getattr(show, "started", False):
            print(
                f"{'tier':5} {'op':6} {'page':>8} {'GB/s':>7} {'limit':>7} {'ratio':>6} "
                f"{'spread':>7} {'A/A':>6}"
            )
            show.started = True
        print(
            f"{row.tier:5} {row.op:6} {format_bytes(row.page_bytes):>8} {row.gb_s:7.2f} "
            f"{row.limit_gb_s:7.2f} {row.ratio:6.3f} {row.spread:7.3f} {row.aa_ratio:6.3f}"
        )
        sys.stdout.flush()
        shown.append(row)
    return shown


if __name__ == "__main__":
    main()
