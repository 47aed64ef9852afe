"""Reading pages: look-up, pin, pread on the read pool, checks, and what faults lead to."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

from tierkv.storage.aligned import ByteArray
from tierkv.storage.core import EXTRA_THREADS, RUN_BYTES, Core
from tierkv.storage.slotio import MAX_RUN
from tierkv.storage.tickets import ReadTicket
from tierkv.storage.types import RangeRead, ReadStatus
from tierkv.storage.wanted import Fault, Head, Part, SlotRead, Wanted, follows
from tierkv.storage.workers import Turns, WorkerPool
from tierkv.storage.writer import Writer

QUARANTINE_AFTER = 3

# The moment's trouble, not the page's: a miss, and the entry stays.
_TRANSIENT = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.EINTR,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EACCES,
        errno.EPERM,
        errno.ETIMEDOUT,
        errno.EINVAL,
    }
)

_OUTCOMES = {
    ReadStatus.HIT: "hits",
    ReadStatus.MISS: "misses",
    ReadStatus.CORRUPT: "corrupt",
    ReadStatus.ERROR: "errors",
    ReadStatus.TIMEOUT: "timeouts",
    ReadStatus.CLOSED: "closed",
}
_FAULT_COUNTERS = {
    Fault.HEADER: ("checksum_header",),
    Fault.PAYLOAD: ("checksum_payload",),
    Fault.TORN: ("checksum_payload", "torn_pages"),
    Fault.STALE: ("stale_slots",),
}


class Reader:
    """Owns the read pool.  Thread-safe; nothing here raises for a storage fault."""

    def __init__(self, core: Core, writer: Writer | None) -> None:
        self._core = core
        self._writer = writer  # None: read-only
        self._lock = threading.Lock()
        self._failures: Counter[bytes] = Counter()
        self._in_flight = 0
        self._closed = False
        self._turns = Turns(core.config.io_threads)
        self._pool = WorkerPool("read", core.config.io_threads + EXTRA_THREADS, core.counters)

    @property
    def core(self) -> Core:
        """The tier's parts."""
        return self._core

    @property
    def in_flight(self) -> int:
        """Pages asked for and not settled."""
        return self._in_flight

    def submit(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[ByteArray],
        namespace: bytes | None,
        timeout_s: float,
    ) -> ReadTicket:
        """Start reading pages; see ``SsdTier.submit_read``."""
        ticket = self._open(len(keys), timeout_s)
        found = [
            (position, wanted)
            for position, (key, out) in enumerate(zip(keys, destinations, strict=True))
            if (wanted := self._find(ticket, position, key, out, namespace)) is not None
        ]
        self._start(ticket, found)
        return ticket

    def submit_ranges(
        self,
        reads: Sequence[RangeRead],
        heads: dict[bytes, Head],
        namespace: bytes | None,
        timeout_s: float,
    ) -> ReadTicket:
        """Start reading parts of pages; see ``SsdTier.submit_ranges``.

        Args:
            reads: the parts.
            heads: by key, what the parts of a page share; new pages are entered.
            namespace: as for ``submit``.
            timeout_s: likewise.
        """
        ticket = self._open(len(reads), timeout_s)
        found = []
        for position, read in enumerate(reads):
            wanted = self._find(
                ticket, position, read.key, read.destination, namespace, read.page_bytes
            )
            if wanted is not None:
                part = Part(read.offset, heads.setdefault(read.key, Head()))
                found.append((position, wanted._replace(part=part)))
        self._start(ticket, found)
        return ticket

    def _open(self, count: int, timeout_s: float) -> ReadTicket:
        core = self._core
        hangs = core.breaker.failure if timeout_s >= core.config.io_timeout_s else _do_nothing
        core.counters.add("lookups", count)
        with self._lock:
            self._in_flight += count
        return ReadTicket(count, core.counters, timeout_s, hangs)

    def _start(self, ticket: ReadTicket, found: list[tuple[int, Wanted]]) -> None:
        per_run = self._pages_per_run(found)
        if per_run > 1:  # small pages: those in adjacent slots are read in one call
            found.sort(key=lambda item: item[1].location[:2])
        self._hand_over(
            [
                ReadJob(self, ticket, found[at : at + per_run])
                for at in range(0, len(found), per_run)
            ]
        )

    def _pages_per_run(self, found: Sequence[tuple[int, Wanted]]) -> int:
        """Return how many pages one thread takes at a time: few, and enough for all threads."""
        if not found:
            return 1
        by_size = RUN_BYTES // max(found[0][1].out.nbytes, 1)
        shared = -(-len(found) // self._core.config.io_threads)
        return max(1, min(MAX_RUN, by_size, shared))

    def _find(
        self,
        ticket: ReadTicket,
        position: int,
        key: bytes,
        out: ByteArray,
        namespace: bytes | None,
        page_bytes: int | None = None,
    ) -> Wanted | None:
        """Pin a page, or settle it as the miss that it is."""
        core = self._core
        location, mismatch = core.catalog.pin(key, namespace)
        size = out.nbytes if page_bytes is None else page_bytes
        if location is not None and location.raw_bytes != size:
            core.catalog.unpin(location)
            location, mismatch = None, True
        if location is None:
            if mismatch:
                core.counters.add("fingerprint_mismatch")
            self.settle(ticket, position, ReadStatus.MISS)
            return None
        if not core.breaker.admit():
            core.catalog.unpin(location)
            core.counters.add("throttled")
            self.settle(ticket, position, ReadStatus.ERROR)
            return None
        return Wanted(key, namespace, location, out)

    def _hand_over(self, jobs: Sequence[ReadJob]) -> None:
        with self._lock:
            if not self._closed:
                for job in jobs:
                    self._pool.submit(job)
                return
        for job in jobs:
            job.run()  # closed: it only says so

    def settle(self, ticket: ReadTicket, position: int, status: ReadStatus) -> None:
        """Account for one page and tell its ticket."""
        with self._lock:
            self._in_flight -= 1
        ticket.resolve(position, status, self._count)

    def _count(self, status: ReadStatus) -> None:
        self._core.counters.add(_OUTCOMES[status])

    # -- read threads --------------------------------------------------------------------

    def read_run(self, run: Sequence[Wanted], ticket: ReadTicket) -> list[ReadStatus]:
        """Read pinned pages that lie behind each other; what fails is read again, alone."""
        core = self._core
        turn = _Turn(self._turns, ticket)
        results: Sequence[SlotRead | None] = [None] * len(run)
        if len(run) > 1:
            slab = core.catalog.slab(run[0].location.slab)
            try:
                results = core.slot_io.read_run(slab, run, turn)
            except _NobodyWaitsError:
                return [ReadStatus.TIMEOUT] * len(run)
            except (OSError, MemoryError):
                core.counters.add("retry_reads", len(run))
        return [
            self._read_page(wanted, turn) if result is None else self._served(wanted, result)
            for wanted, result in zip(run, results, strict=True)
        ]

    def _read_page(self, wanted: Wanted, turn: _Turn) -> ReadStatus:
        core = self._core
        try:
            slab = core.catalog.slab(wanted.location.slab)
            try:
                result = core.slot_io.read(slab, wanted, turn)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                core.counters.add("retry_reads")
                result = core.slot_io.read(slab, wanted, turn)
        except _NobodyWaitsError:
            return ReadStatus.TIMEOUT
        except (OSError, MemoryError) as error:
            return self._on_error(wanted, error)
        return self._served(wanted, result)

    def _served(self, wanted: Wanted, result: SlotRead) -> ReadStatus:
        core = self._core
        core.breaker.success()
        core.counters.add("device_bytes_read", result.device_bytes)
        if result.reread:
            core.counters.add("retry_reads")
        if result.fault is not None:
            return self._on_fault(wanted, result.fault)
        if self._failures:
            with self._lock:
                self._failures.pop(wanted.key, None)
        core.counters.add("logical_bytes_read", wanted.out.nbytes)
        return ReadStatus.HIT

    def _on_error(self, wanted: Wanted, error: BaseException) -> ReadStatus:
        core = self._core
        number = getattr(error, "errno", None)
        core.counters.add(f"error_read_{errno.errorcode.get(number or 0, 'ENOMEM')}")
        if number == errno.ENOENT:  # the slab file is gone, and its pages with it
            self._drop(wanted)
            return ReadStatus.CORRUPT
        if number not in _TRANSIENT and not isinstance(error, MemoryError):
            core.breaker.failure()
            with self._lock:
                self._failures[wanted.key] += 1
                hopeless = self._failures[wanted.key] >= QUARANTINE_AFTER
                if hopeless:
                    del self._failures[wanted.key]
            if hopeless:
                core.counters.add("quarantined")
                self._drop(wanted)
        return ReadStatus.ERROR

    def _on_fault(self, wanted: Wanted, fault: Fault) -> ReadStatus:
        core = self._core
        if not core.catalog.is_current(wanted.key, wanted.location):
            return ReadStatus.MISS
        for name in _FAULT_COUNTERS[fault]:
            core.counters.add(name)
        if self._writer is None:
            # Beside a live writer the slot may simply hold another page by now.
            return ReadStatus.MISS if fault is Fault.STALE else ReadStatus.CORRUPT
        self._drop(wanted)
        return ReadStatus.CORRUPT

    def _drop(self, wanted: Wanted) -> None:
        if self._writer is not None:
            self._writer.forget(wanted.key, wanted.location)

    def stop(self, timeout_s: float) -> bool:
        """End the read threads; False when time ran out.  ``closing`` must be set."""
        with self._lock:
            self._closed = True
            self._pool.stop()
        return self._pool.join(timeout_s)


def _do_nothing() -> None:
    """A short deadline of the caller's says nothing about the device."""


class _NobodyWaitsError(Exception):
    """The waiter gave up before the transfer began."""


class _Turn(AbstractContextManager[None]):
    """A turn at the device, unless nobody waits any more once it comes."""

    def __init__(self, turns: Turns, ticket: ReadTicket) -> None:
        self._turns = turns
        self._ticket = ticket

    def __enter__(self) -> None:
        self._turns.__enter__()
        if self._ticket.expired:
            self._turns.__exit__()
            raise _NobodyWaitsError

    def __exit__(self, *error: object) -> None:
        self._turns.__exit__()


class ReadJob:
    """Some pages of one ticket, pinned until done, for one read thread."""

    __slots__ = ("_left", "_reader", "_ticket", "pages")

    def __init__(
        self, reader: Reader, ticket: ReadTicket, pages: Sequence[tuple[int, Wanted]]
    ) -> None:
        self._reader = reader
        self._ticket = ticket
        self._left = 0
        self.pages = pages

    def run(self) -> None:
        """Read the pages, unless nobody waits any more."""
        while self._left < len(self.pages):
            count = self._adjacent(self._left)
            if self._reader.core.closing:
                statuses = [ReadStatus.CLOSED] * count
            elif self._ticket.expired:
                statuses = [ReadStatus.TIMEOUT] * count
            else:
                statuses = self._reader.read_run(
                    [wanted for _, wanted in self.pages[self._left : self._left + count]],
                    self._ticket,
                )
            for status in statuses:
                self._end(status)

    def _adjacent(self, start: int) -> int:
        """Return how many pages from ``start`` on can be read in one call."""
        first = self.pages[start][1]
        slab = self._reader.core.catalog.slab(first.location.slab)
        stop = start + 1
        while stop < len(self.pages) and follows(
            slab, self.pages[stop - 1][1], self.pages[stop][1]
        ):
            stop += 1
        return stop - start

    def fail(self, error: BaseException) -> None:
        """Report a failure that ``run`` did not expect as misses."""
        while self._left < len(self.pages):
            self._end(ReadStatus.ERROR)

    def _end(self, status: ReadStatus) -> None:
        position, wanted = self.pages[self._left]
        self._left += 1
        self._reader.core.catalog.unpin(wanted.location)
        self._reader.settle(self._ticket, position, status)
