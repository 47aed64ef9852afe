"""Reading pages: look-up, pin, pread on the read pool, checks, and what faults lead to."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Sequence

from tierkv.storage.aligned import ByteArray
from tierkv.storage.catalog import Location
from tierkv.storage.core import Core
from tierkv.storage.slotio import Fault
from tierkv.storage.tickets import ReadTicket
from tierkv.storage.types import ReadStatus
from tierkv.storage.workers import WorkerPool
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
        self._pool = WorkerPool("read", core.config.io_threads, core.counters)

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
        core = self._core
        hangs = core.breaker.failure if timeout_s >= core.config.io_timeout_s else _do_nothing
        ticket = ReadTicket(len(keys), core.counters, timeout_s, hangs)
        jobs: list[ReadJob] = []
        core.counters.add("lookups", len(keys))
        with self._lock:
            self._in_flight += len(keys)
        for position, (key, out) in enumerate(zip(keys, destinations, strict=True)):
            location, mismatch = core.catalog.pin(key, namespace)
            if location is not None and location.raw_bytes != out.nbytes:
                core.catalog.unpin(location)
                location, mismatch = None, True
            if location is None:
                if mismatch:
                    core.counters.add("fingerprint_mismatch")
                self.settle(ticket, position, ReadStatus.MISS)
            elif not core.breaker.admit():
                core.catalog.unpin(location)
                core.counters.add("throttled")
                self.settle(ticket, position, ReadStatus.ERROR)
            else:
                jobs.append(ReadJob(self, ticket, position, key, namespace, location, out))
        with self._lock:
            if not self._closed:
                for job in jobs:
                    self._pool.submit(job)
                return ticket
        for job in jobs:
            job.run()  # closed: it only says so
        return ticket

    def settle(self, ticket: ReadTicket, position: int, status: ReadStatus) -> None:
        """Account for one page and tell its ticket."""
        with self._lock:
            self._in_flight -= 1
        final = ticket.resolve(position, status)
        self._core.counters.add(_OUTCOMES[final])

    def read_slot(
        self, key: bytes, namespace: bytes | None, location: Location, out: ByteArray
    ) -> ReadStatus:
        """Read one pinned page and deal with whatever goes wrong."""
        core = self._core
        try:
            slab = core.catalog.slab(location.slab)
            try:
                result = core.slot_io.read(key, namespace, slab, location, out)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                core.counters.add("retry_reads")
                result = core.slot_io.read(key, namespace, slab, location, out)
        except (OSError, MemoryError) as error:
            return self._on_error(key, location, error)
        core.breaker.success()
        core.counters.add("device_bytes_read", result.device_bytes)
        if result.reread:
            core.counters.add("retry_reads")
        if result.fault is not None:
            return self._on_fault(key, location, result.fault)
        if self._failures:
            with self._lock:
                self._failures.pop(key, None)
        core.counters.add("logical_bytes_read", out.nbytes)
        return ReadStatus.HIT

    def _on_error(self, key: bytes, location: Location, error: BaseException) -> ReadStatus:
        core = self._core
        number = getattr(error, "errno", None)
        core.counters.add(f"error_read_{errno.errorcode.get(number or 0, 'ENOMEM')}")
        if number == errno.ENOENT:  # the slab file is gone, and its pages with it
            self._drop(key, location)
            return ReadStatus.CORRUPT
        if number not in _TRANSIENT and not isinstance(error, MemoryError):
            core.breaker.failure()
            with self._lock:
                self._failures[key] += 1
                hopeless = self._failures[key] >= QUARANTINE_AFTER
                if hopeless:
                    del self._failures[key]
            if hopeless:
                core.counters.add("quarantined")
                self._drop(key, location)
        return ReadStatus.ERROR

    def _on_fault(self, key: bytes, location: Location, fault: Fault) -> ReadStatus:
        core = self._core
        if not core.catalog.is_current(key, location):
            return ReadStatus.MISS
        for name in _FAULT_COUNTERS[fault]:
            core.counters.add(name)
        if self._writer is None:
            # Beside a live writer the slot may simply hold another page by now.
            return ReadStatus.MISS if fault is Fault.STALE else ReadStatus.CORRUPT
        self._drop(key, location)
        return ReadStatus.CORRUPT

    def _drop(self, key: bytes, location: Location) -> None:
        if self._writer is not None:
            self._writer.forget(key, location)

    def stop(self, timeout_s: float) -> bool:
        """End the read threads; False when time ran out.  ``closing`` must be set."""
        with self._lock:
            self._closed = True
            self._pool.stop()
        return self._pool.join(timeout_s)

    @property
    def core(self) -> Core:
        """The tier's parts."""
        return self._core


def _do_nothing() -> None:
    """A short deadline of the caller's says nothing about the device."""


class ReadJob:
    """One page to read, pinned until done."""

    __slots__ = ("_key", "_location", "_namespace", "_out", "_position", "_reader", "_ticket")

    def __init__(
        self,
        reader: Reader,
        ticket: ReadTicket,
        position: int,
        key: bytes,
        namespace: bytes | None,
        location: Location,
        out: ByteArray,
    ) -> None:
        self._reader = reader
        self._ticket = ticket
        self._position = position
        self._key = key
        self._namespace = namespace
        self._location = location
        self._out = out

    def run(self) -> None:
        """Read (on a read thread), unless nobody waits any more."""
        if self._reader.core.closing:
            status = ReadStatus.CLOSED
        elif self._ticket.expired:
            status = ReadStatus.TIMEOUT
        else:
            status = self._reader.read_slot(self._key, self._namespace, self._location, self._out)
        self._end(status)

    def fail(self, error: BaseException) -> None:
        """Report a failure that ``run`` did not expect as a miss."""
        self._end(ReadStatus.ERROR)

    def _end(self, status: ReadStatus) -> None:
        self._reader.core.catalog.unpin(self._location)
        self._reader.settle(self._ticket, self._position, status)
