"""The SSD tier: pages in preallocated slab files, found through a persistent index."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Self

from tierkv.errors import ForkError, InvalidInputError, StoreClosedError, StoreReadOnlyError
from tierkv.storage.aligned import ByteArray
from tierkv.storage.backend import IOBackend, OsBackend
from tierkv.storage.clock import Clock, SystemClock
from tierkv.storage.core import Core, SsdConfig
from tierkv.storage.counters import SsdStats
from tierkv.storage.format import PAGE_TAIL, IndexRecord, PageInfo
from tierkv.storage.health import Progress, check_tier, collect_stats
from tierkv.storage.index import LmdbIndex
from tierkv.storage.layout import load_names
from tierkv.storage.lifetime import Lifetime
from tierkv.storage.listing import list_records
from tierkv.storage.opening import open_core
from tierkv.storage.reader import Reader
from tierkv.storage.tickets import ReadTicket, WriteTicket
from tierkv.storage.types import (
    FlushReport,
    PageWrite,
    RangeRead,
    ReadStatus,
    VerifyReport,
    WriteStatus,
    check_buffer,
    check_page,
    check_range,
)
from tierkv.storage.verify import verify_core
from tierkv.storage.wanted import Head
from tierkv.storage.writer import Writer

__all__ = [
    "PAGE_TAIL",
    "FlushReport",
    "PageInfo",
    "PageWrite",
    "RangeRead",
    "ReadStatus",
    "ReadTicket",
    "SsdStats",
    "SsdTier",
    "VerifyReport",
    "WriteStatus",
    "WriteTicket",
]


class SsdTier:
    """One directory of pages on disk.  Thread-safe; owned by one process at a time.

    A read returns exactly the bytes that were put under the key, or it is a miss: a storage
    fault is counted, never raised.  What ``flush`` reports survives anything; what was
    written before the process died is found again when the directory is next opened.

    Misuse raises: ``StoreClosedError`` after ``close``, ``ForkError`` in a forked child,
    ``InvalidInputError`` for a page that cannot fit.
    """

    def __init__(self, core: Core) -> None:
        """Use ``SsdTier.open``."""
        self._core = core
        self._writer = None
        self._progress = Progress(core.counters)
        if isinstance(core.index, LmdbIndex) and not core.config.read_only:
            self._writer = Writer(core, core.index)
        self._reader = Reader(core, self._writer)
        self._lifetime = Lifetime(core, self._reader, self._writer)
        self._finalizer = weakref.finalize(self, self._lifetime.abandon)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        slot_payload_bytes: int,
        codec: str = "raw",
        io_threads: int = 4,
        sync_interval_s: float = 2.0,
        io_timeout_s: float = 30.0,
        direct: bool = True,
        read_only: bool = False,
        slab_bytes: int | None = None,
        max_queue_bytes: int = 1 << 30,
        breaker_threshold: int = 8,
        namespaces: Mapping[bytes, str] | None = None,
        backend: IOBackend | None = None,
        clock: Clock | None = None,
    ) -> SsdTier:
        """Open a store directory, creating it when it is missing or empty.

        Args:
            path: the directory.
            capacity_bytes: bound on the slab files; cut, with a warning, to what the
                filesystem has free.
            slot_payload_bytes: the largest page; each page takes one slot of this size plus a
                4 KiB header.
            codec: ``"raw"``, or ``"zstd"`` to compress payloads where that gains 5 %.
            io_threads: threads, and so depth, for reading and as many for writing.
            sync_interval_s: the index is made durable this long after a change.
            io_timeout_s: how long a read may take before it is a miss.
            direct: use O_DIRECT where the filesystem allows it.
            read_only: look only: no lock is taken and nothing is written, so another process
                may be using the directory.
            slab_bytes: size of new slab files; chosen from the capacity when None.
            max_queue_bytes: bound on payload bytes waiting to be written.
            breaker_threshold: I/O errors in a row that take the tier out of service.
            namespaces: digests and descriptions of namespaces, kept for people to read.
            backend: the operating system, or a test's stand-in.
            clock: likewise.

        Raises:
            StoreLockedError: another process owns the directory.
            NotAStoreError: something else is in the directory (or nothing, read-only).
            StoreVersionError: written by another version of the format.
            StoreReadOnlyError: on a read-only filesystem.
            StoreError: the directory cannot be used.
            CapacityError: the capacity holds no page, or exceeds the filesystem.
            InvalidInputError: an argument makes no sense.
        """
        config = SsdConfig(
            path=os.path.abspath(os.fspath(path)),
            capacity_bytes=capacity_bytes,
            slot_payload_bytes=slot_payload_bytes,
            codec=codec,
            io_threads=io_threads,
            sync_interval_s=sync_interval_s,
            io_timeout_s=io_timeout_s,
            direct=direct,
            read_only=read_only,
            slab_bytes=slab_bytes,
            max_queue_bytes=max_queue_bytes,
            breaker_threshold=breaker_threshold,
            namespaces=dict(namespaces or {}),
        )
        return cls(open_core(config, backend or OsBackend(), clock or SystemClock()))

    # -- pages ---------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The directory."""
        return self._core.config.path

    @property
    def capacity_pages(self) -> int:
        """How many pages of ``slot_payload_bytes`` fit."""
        return self._core.capacity_pages

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._core.closing

    @property
    def read_only(self) -> bool:
        """Whether this tier was opened for reading only."""
        return self._writer is None

    def put(
        self,
        pages: Sequence[PageWrite],
        *,
        done: Callable[[list[WriteStatus]], None] | None = None,
    ) -> WriteTicket:
        """Queue pages for writing and return at once.

        The payloads' memory must not change until the ticket is done.  Written pages are
        found from then on, and are durable after the next flush (or index sync).

        Args:
            pages: what to write; a page whose key is present already is not written again.
            done: called with the statuses on the writer thread, once pages are published.

        Raises:
            InvalidInputError: a page that does not fit; nothing was queued.
            StoreClosedError, ForkError: see the class.
        """
        self._enter()
        for page in pages:
            check_page(page, self._core.config.slot_payload_bytes)
        ticket = WriteTicket(len(pages), self._core.counters)
        if done is not None:
            ticket.add_done_callback(done)
        self._core.counters.add("put_pages", len(pages))
        if self._writer is None:
            self._core.counters.add("rejected_read_only", len(pages))
            for position in range(len(pages)):
                ticket.resolve(position, WriteStatus.READ_ONLY)
        else:
            self._writer.put(pages, ticket)
        return ticket

    def read(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[ByteArray],
        *,
        namespace: bytes | None = None,
        timeout_s: float | None = None,
    ) -> list[ReadStatus]:
        """Read pages and wait for them; see ``submit_read``."""
        ticket = self.submit_read(keys, destinations, namespace=namespace, timeout_s=timeout_s)
        return ticket.wait()

    def submit_read(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[ByteArray],
        *,
        namespace: bytes | None = None,
        timeout_s: float | None = None,
    ) -> ReadTicket:
        """Start reading pages, each checked in full before it counts as a hit.

        Args:
            keys: which pages.
            destinations: for each page, an array of exactly its size (another size is a
                miss); memory on 4 KiB boundaries is read into without a copy.
            namespace: the namespace the pages must belong to; None accepts any.
            timeout_s: deadline for ``wait``; ``io_timeout_s`` when None.

        Returns:
            A ticket.  A destination holds a page where its status is ``HIT``, else anything; it
            is in use until the ticket is settled, after a timeout later than ``wait`` returns.
        """
        self._enter(closed_ok=True)
        if len(keys) != len(destinations):
            raise InvalidInputError(f"read: {len(keys)} keys but {len(destinations)} destinations")
        for destination in destinations:
            check_buffer(destination, "read destination")
        timeout = self._core.config.io_timeout_s if timeout_s is None else timeout_s
        return self._reader.submit(keys, destinations, namespace, timeout)

    def submit_ranges(
        self,
        batches: Sequence[Sequence[RangeRead]],
        *,
        namespace: bytes | None = None,
        timeout_s: float | None = None,
    ) -> list[ReadTicket]:
        """Start reading parts of pages, batch after batch; return a ticket for each batch.

        As ``submit_read``, but a part is a hit once the page's header, read with its first
        part, and the checksums of the part's own ranges are right, whatever the rest is like.
        Where a part is no whole number of ranges, or the page is compressed (see
        ``in_ranges``), the page is read whole for each part.

        Raises:
            InvalidInputError: a part that is not inside its page; nothing was started.
        """
        self._enter(closed_ok=True)
        for read in chain.from_iterable(batches):
            check_range(read)
        timeout = self._core.config.io_timeout_s if timeout_s is None else timeout_s
        heads: dict[bytes, Head] = {}
        return [self._reader.submit_ranges(b, heads, namespace, timeout) for b in batches]

    def in_ranges(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages ``submit_ranges`` can read in parts without reading the rest."""
        self._enter(closed_ok=True)
        return [self._core.catalog.is_raw(key) for key in keys]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are here."""
        self._enter(closed_ok=True)
        return self._core.catalog.contains(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, including those that earlier puts have still to write.

        Gone at once for readers; their slots are reused after the next index sync.

        Returns:
            How many there were.

        Raises:
            StoreReadOnlyError: opened read-only.
        """
        self._enter()
        if self._writer is None:
            raise StoreReadOnlyError(f"{self.path}: opened read-only; nothing can be deleted")
        return self._writer.delete(keys)

    def pages(self) -> Iterator[tuple[PageInfo, int, int]]:
        """Yield (info, hits, last use in Unix seconds) of all pages, from the index alone.

        Beside a writer, pages that come or go meanwhile may or may not appear.
        """
        for record, hits, last_used in self.records():
            yield record.info, hits, last_used

    def records(self) -> Iterator[tuple[IndexRecord, int, int]]:
        """Yield (index record, hits, last use) of all pages: ``pages`` with sizes and places."""
        self._enter()
        return list_records(self._core.index)

    @property
    def namespaces(self) -> dict[bytes, str]:
        """Descriptions of the namespaces ever opened here, by digest."""
        self._enter()
        return load_names(self._core.layout.names)

    def record_usage(self, usage: Mapping[bytes, tuple[int, int]]) -> None:
        """Keep (hits, last use in Unix seconds) of pages; written with the next flush."""
        self._enter()
        if self._writer is not None:
            self._writer.committer.record_usage(usage)

    def take_removed(self) -> list[bytes]:
        """Return the pages that the tier dropped by itself since the last call."""
        return self._core.removed.take()

    # -- the whole tier ------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Make everything put or deleted before durable, and say what is.

        Args:
            timeout_s: how long to wait; None waits for as long as something is written or
                synced every ``io_timeout_s``.
        """
        self._enter()
        catalog = self._core.catalog
        if self._writer is None:
            return FlushReport(len(catalog), catalog.page_bytes, True, [])
        request = self._writer.flush()
        patience = self._core.config.io_timeout_s if timeout_s is None else timeout_s
        report = request.wait(patience)
        while report is None and timeout_s is None and self._progress.made():
            report = request.wait(patience)
        return report or FlushReport(0, 0, False, [])

    def verify(
        self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read and check every page at rest, and compare index, memory and files.

        Args:
            repair: drop the pages that are bad.
            progress: called with (pages checked, pages in all).

        Raises:
            StoreReadOnlyError: a repair was asked of a read-only tier.
        """
        self._enter()
        if repair and self._writer is None:
            raise StoreReadOnlyError(f"{self.path}: opened read-only; nothing can be repaired")
        return verify_core(self._core, self._writer, repair=repair, progress=progress)

    def stats(self) -> SsdStats:
        """Return state and counters."""
        self._check_process()
        return collect_stats(self._core, self._reader, self._writer)

    def check(self) -> None:
        """Prove that slots, pages, index and counters agree.

        Raises:
            AssertionError: naming what does not hold.
        """
        self._enter()
        check_tier(self._core, self._reader, self._writer)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush, mark the store as cleanly closed, end all threads, give the directory up.

        Idempotent.  Returns False when a system call did not return in time: then its
        thread, the files and the directory's lock are left to the process's end, because a
        late write must not meet a reused descriptor.
        """
        self._check_process()
        return self._lifetime.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, *, closed_ok: bool = False) -> None:
        self._check_process()
        if self._core.closing and not closed_ok:
            raise StoreClosedError(f"{self.path}: the disk tier was closed")

    def _check_process(self) -> None:
        if os.getpid() != self._core.pid:
            raise ForkError(
                f"{self.path}: opened by process {self._core.pid}, used in its fork "
                f"{os.getpid()}; open the store after forking"
            )
