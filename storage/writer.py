"""The writer thread: slots, groups, syncs and the index, all in one place.

It is an actor.  Everything reaches it as a message; it alone hands out slots, owns every
index transaction, and completes tickets::

    put, delete, flush --> [inbox] --slot, seq--> write pool: hash, encode, pwritev
                              ^  ^                                  |
                              |  +------------- written ------------+
                              |
                              +--- synced --- sync thread: fdatasync of a full or idle group

While group k is synced and committed, the pages of group k+1 are already being written.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue

import lmdb

from tierkv.storage.allocator import Allocator
from tierkv.storage.catalog import Location
from tierkv.storage.core import COMMIT_RECORDS, GROUP_BYTES, Core
from tierkv.storage.format import decode_record, encode_record, record_of, record_sum
from tierkv.storage.index import LmdbIndex
from tierkv.storage.layout import CleanMark, encode_sealed
from tierkv.storage.slabs import NO_SPACE_ERRNOS
from tierkv.storage.tickets import WriteTicket
from tierkv.storage.types import FlushReport, PageWrite, WriteStatus
from tierkv.storage.workers import WorkerPool
from tierkv.storage.writes import FlushRequest, Group, SyncJob, WriteJob

logger = logging.getLogger(__name__)

Message = Callable[[], object]
# The device has failed, not just this moment.
_IO_ERRNOS = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ENOENT})


class Writer:
    """Owns the writer thread.  Public methods may be called from any thread."""

    def __init__(self, core: Core, index: LmdbIndex) -> None:
        self._core = core
        self._index = index
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._queued_keys: Counter[bytes] = Counter()
        self._usage: dict[bytes, tuple[int, int]] = {}
        # Gone from the catalog, not yet from the index: how often, since a key may come back.
        self._deleting: Counter[bytes] = Counter()
        self._stopped = False
        # From here on: the writer thread's own.
        self._pending: dict[bytes, WriteJob] = {}
        self._unsettled: set[WriteJob] = set()
        self._open_group = Group()
        self._groups: deque[Group] = deque()  # closed, oldest first
        self._syncing = False
        self._flushes: list[FlushRequest] = []
        self._failed_keys: list[bytes] = []
        self._failed_slabs: set[int] = set()
        self._doomed: list[tuple[bytes, Location]] = []
        self._unsynced = False
        self._sync_at = 0.0
        self._epoch = 0
        self._next_seq = core.next_seq
        self._allocator = Allocator(core, self._commit_and_sync, self._forget)
        self._writes = WorkerPool("write", core.config.io_threads, core.counters)
        self._syncs = WorkerPool("sync", 1, core.counters)
        self._thread = threading.Thread(target=self._run, name="tierkv-writer", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------

    def put(self, pages: Sequence[PageWrite], ticket: WriteTicket) -> None:
        """Queue pages; those beyond the queue's bound are refused at once."""
        accepted: list[tuple[int, PageWrite]] = []
        refused: list[int] = []
        with self._lock:
            stopped = self._stopped
            for position, page in enumerate(() if stopped else pages):
                size = page.payload.nbytes
                bound = self._core.config.max_queue_bytes
                if self._queued_bytes and self._queued_bytes + size > bound:
                    refused.append(position)
                    continue
                self._queued_bytes += size
                self._queued_keys[page.info.key] += 1
                accepted.append((position, page))
            # Queued under the lock, so that a delete sees puts in the inbox's order.
            if accepted:
                self._inbox.put(lambda: self._on_put(accepted, ticket))
        for position in range(len(pages) if stopped else 0):
            ticket.resolve(position, WriteStatus.CLOSED)
        if refused:
            self._core.counters.add("rejected_queue_full", len(refused))
            for position in refused:
                ticket.resolve(position, WriteStatus.QUEUE_FULL)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Unpublish pages at once and queue the rest; return how many there were."""
        count = 0
        with self._lock:
            removed: list[tuple[bytes, Location | None]] = []
            for key in () if self._stopped else dict.fromkeys(keys):
                location = self._core.catalog.remove(key)
                if location is None and not self._queued_keys[key]:
                    continue
                removed.append((key, location))
                self._deleting[key] += location is not None
                count += 1
            if removed:
                self._inbox.put(lambda: self._on_delete(removed))
        self._core.counters.add("deleted_pages", count)
        return count

    def forget(self, key: bytes, location: Location) -> bool:
        """Drop a page that was found bad, unless it is a newer one by now."""
        with self._lock:
            if self._stopped or self._core.catalog.remove(key, location.seq) is None:
                return False
            self._deleting[key] += 1
            self._inbox.put(lambda: self._doom(key, location))
        self._core.removed.add([key])
        self._core.counters.add("removed_pages")
        return True

    def record_usage(self, usage: Mapping[bytes, tuple[int, int]]) -> None:
        """Keep hits and last use until the next flush."""
        with self._lock:
            self._usage.update(usage)

    def flush(self) -> FlushRequest:
        """Ask for everything so far to be made durable."""
        request = FlushRequest()
        with self._lock:
            if self._stopped:
                request.finish(FlushReport(0, 0, False, []))
            else:
                self._inbox.put(lambda: self._on_flush(request))
        return request

    def count_index_mismatches(self) -> int:
        """Return how many pages only the index or only the memory knows; O(pages)."""
        done = threading.Event()
        result: list[int] = []

        def count() -> None:
            try:
                result.append(self._count_mismatches())
            finally:
                done.set()

        with self._lock:
            if self._stopped:
                return 0
            self._inbox.put(count)
        done.wait(self._core.config.io_timeout_s)
        return result[0] if result else 0

    def _count_mismatches(self) -> int:
        with self._lock:  # nothing is deleted meanwhile
            known = set(self._core.catalog.keys())
            indexed = set()
            for key, value in self._index.records():
                record = decode_record(key, value)
                if record is not None and self._core.catalog.holds(record):
                    indexed.add(key)
                elif not self._deleting[key]:
                    indexed.add(key + b"?")
            return len(known ^ indexed)

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were put and are not resolved."""
        return self._queued_bytes

    def stop(self, timeout_s: float) -> bool:
        """Flush, mark the store clean and end all threads; False when time ran out.

        After False the threads may still be in a system call: nothing they use may be freed.
        """
        deadline = self._core.clock.monotonic() + timeout_s
        request = self.flush()
        with self._lock:
            self._stopped = True
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._writes.stop()
        self._syncs.stop()
        left = max(0.1, deadline - self._core.clock.monotonic())
        ended = self._writes.join(left) and self._syncs.join(left)
        return ended and request.done.is_set()

    # -- the writer thread ---------------------------------------------------------------

    def _run(self) -> None:
        stopping = False
        while not (stopping and self._is_idle()):
            try:
                message = self._inbox.get(timeout=self._wait_s())
            except Empty:
                message = self._commit_and_sync
            if message is None:
                stopping = True
            else:
                self._guard(message)
            self._guard(self._advance)
        self._guard(self._mark_clean)

    def _guard(self, call: Message) -> None:
        try:
            call()
        except Exception as error:  # the thread must live: tickets wait for it
            logger.exception("the writer failed; the disk tier takes no more writes")
            self._core.counters.add("worker_errors")
            self._stop_writing(f"writer failed: {error!r}")
            self._give_up()

    def _wait_s(self) -> float | None:
        if not (self._unsynced or self._doomed):
            return None
        return max(0.0, self._sync_at - self._core.clock.monotonic())

    def _is_idle(self) -> bool:
        busy = self._open_group.jobs or self._groups or self._syncing or self._flushes
        return not busy and self._inbox.empty()

    def _on_put(self, pages: Sequence[tuple[int, PageWrite]], ticket: WriteTicket) -> None:
        for position, page in pages:
            key = page.info.key
            if key in self._core.catalog:
                self._resolve(page, ticket, position, WriteStatus.DUPLICATE)
            elif (pending := self._pending.get(key)) is not None:
                pending.followers.append((page, ticket, position))
            else:
                self._start(page, ticket, position)

    def _start(self, page: PageWrite, ticket: WriteTicket, position: int) -> None:
        core = self._core
        if core.write_fault is not None:
            self._resolve(page, ticket, position, WriteStatus.READ_ONLY)
            return
        if not core.breaker.admit():
            core.counters.add("throttled")
            self._resolve(page, ticket, position, WriteStatus.FAILED)
            return
        place = self._allocator.take()
        if place is None:
            self._resolve(page, ticket, position, WriteStatus.NO_SPACE)
            return
        slab, slot = place
        job = WriteJob(core, self._inbox, self._on_written, page, slab, slot, self._next_seq)
        job.followers.append((page, ticket, position))
        job.group = self._open_group
        self._next_seq += 1
        self._pending[page.info.key] = job
        self._unsettled.add(job)
        self._open_group.add(job)
        self._writes.submit(job)
        if self._open_group.bytes >= GROUP_BYTES:
            self._close_group()

    def _on_written(self, job: WriteJob) -> None:
        assert job.group is not None
        job.group.unwritten -= 1
        if job.error is None:
            return
        self._core.counters.add(f"error_write_{_errno_name(job.error)}")
        if getattr(job.error, "errno", None) in _IO_ERRNOS:
            self._allocator.retire(job.slab.id)
            self._core.breaker.failure()

    def _on_delete(self, keys: Sequence[tuple[bytes, Location | None]]) -> None:
        for key, location in keys:
            if location is not None:
                self._doom(key, location)
            pending = self._pending.pop(key, None)
            if pending is not None:
                pending.cancelled = True
            elif location is None:
                self._remove_late(key)

    def _remove_late(self, key: bytes) -> None:
        """Remove a page that was published after the caller looked."""
        location = self._core.catalog.remove(key)
        if location is not None:
            with self._lock:
                self._deleting[key] += 1
            self._doom(key, location)

    def _doom(self, key: bytes, location: Location) -> None:
        self._arm_timer()
        self._doomed.append((key, location))

    def _on_flush(self, request: FlushRequest) -> None:
        request.last_group = self._close_group()
        self._flushes.append(request)

    def _advance(self) -> None:
        """Move groups on: close an idle one, sync a written one, finish flushes."""
        group = self._open_group
        if group.jobs and not group.unwritten and not self._groups:
            self._close_group()
        if self._groups and not self._syncing and not self._groups[0].unwritten:
            self._syncing = True
            self._syncs.submit(SyncJob(self._core, self._inbox, self._on_synced, self._groups[0]))
        self._finish_flushes()
        if self._wait_s() == 0:  # due, however busy the inbox keeps this thread
            self._commit_and_sync()

    def _close_group(self) -> Group | None:
        if self._open_group.jobs:
            self._groups.append(self._open_group)
            self._open_group = Group()
        return self._groups[-1] if self._groups else None

    def _on_synced(self, job: SyncJob) -> None:
        self._syncing = False
        if not self._groups or self._groups[0] is not job.group:
            return  # given up meanwhile
        group = self._groups.popleft()
        for slab_id, error in job.errors.items():
            self._core.counters.add(f"error_sync_{_errno_name(error)}")
            self._failed_slabs.add(slab_id)
            self._allocator.retire(slab_id)
            self._core.breaker.failure()
        written = []
        for write in group.jobs:
            if write.error is not None or write.slab.id in self._failed_slabs or not write.header:
                self._end(write, _failure_status(write.error))
            elif write.cancelled:
                self._end(write, WriteStatus.WRITTEN)
            else:
                written.append(write)
        for at in range(0, len(written), COMMIT_RECORDS):
            self._publish(written[at : at + COMMIT_RECORDS])

    def _publish(self, jobs: Sequence[WriteJob]) -> None:
        """Commit pages to the index, then make them findable, then tell whoever waits."""
        core = self._core
        records = [record_of(job.header, job.slab.id) for job in jobs if job.header is not None]
        values = [encode_record(record) for record in records]
        status = self._commit([r.info.key for r in records], values)
        if status is not None:
            for job in jobs:
                self._end(job, status)
            return
        core.breaker.success()
        for job, record, value in zip(jobs, records, values, strict=True):
            core.catalog.publish(record, record_sum(value))
            core.counters.add_many(
                written_pages=1,
                logical_bytes_written=record.raw_bytes,
                device_bytes_written=job.device_bytes,
            )
            self._settle(job, WriteStatus.WRITTEN)

    def _end(self, job: WriteJob, status: WriteStatus) -> None:
        """Settle a job that leaves no page behind."""
        self._core.catalog.abandon(job.slab.id, job.slot)
        self._settle(job, status)

    def _settle(self, job: WriteJob, status: WriteStatus) -> None:
        self._unsettled.discard(job)
        if self._pending.get(job.page.info.key) is job:
            del self._pending[job.page.info.key]
        later = WriteStatus.DUPLICATE if status is WriteStatus.WRITTEN else status
        for number, (page, ticket, position) in enumerate(job.followers):
            self._resolve(page, ticket, position, later if number else status)

    def _resolve(
        self, page: PageWrite, ticket: WriteTicket, position: int, status: WriteStatus
    ) -> None:
        key = page.info.key
        with self._lock:
            self._queued_bytes -= page.payload.nbytes
            self._queued_keys[key] -= 1
            if not self._queued_keys[key]:
                del self._queued_keys[key]
        counter = _STATUS_COUNTERS.get(status)
        if counter is not None:
            self._core.counters.add(counter)
        if status in (WriteStatus.FAILED, WriteStatus.NO_SPACE, WriteStatus.READ_ONLY):
            self._failed_keys.append(key)
        ticket.resolve(position, status)

    # -- index ---------------------------------------------------------------------------

    def _commit(self, keys: Sequence[bytes], values: Sequence[bytes]) -> WriteStatus | None:
        """Commit records together with all deletions so far; None when it worked."""
        core = self._core
        if core.write_fault is not None:
            return WriteStatus.READ_ONLY
        with self._lock:
            usage, self._usage = self._usage, {}
        doomed = self._doomed
        try:
            self._index.commit(
                delete=[key for key, _ in doomed], put=values, keys=keys, usage=usage
            )
        except (lmdb.Error, OSError) as error:
            core.counters.add("error_commit")
            with self._lock:
                self._usage = {**usage, **self._usage}
            if _is_no_space(error):
                return WriteStatus.NO_SPACE
            self._stop_writing(f"the index failed: {error}")
            return WriteStatus.FAILED
        core.counters.add("index_commits")
        self._arm_timer()
        self._doomed = []
        with self._lock:
            self._deleting.subtract(key for key, _ in doomed)
            self._deleting = +self._deleting
        core.catalog.defer((location for _, location in doomed), self._epoch)
        self._unsynced = True
        return None

    def _commit_and_sync(self) -> bool:
        """Make index and deletions durable; slots freed before become reusable."""
        core = self._core
        if core.write_fault is not None:
            self._unsynced = False
            self._doomed = []
            return False
        if (self._doomed or self._usage) and self._commit((), ()) is not None:
            self._postpone()
            return False
        if not self._unsynced:
            return True
        try:
            self._index.sync()
        except (lmdb.Error, OSError) as error:
            # A failed sync is never tried again: the second one would succeed and lie.
            core.counters.add("error_index_sync")
            self._stop_writing(f"the index cannot be made durable: {error}")
            return False
        core.counters.add("index_syncs")
        self._unsynced = False
        self._epoch += 1
        core.catalog.release(self._epoch)
        return True

    def _arm_timer(self) -> None:
        if not (self._unsynced or self._doomed):
            self._postpone()

    def _postpone(self) -> None:
        self._sync_at = self._core.clock.monotonic() + self._core.config.sync_interval_s

    def _finish_flushes(self) -> None:
        if not self._flushes:
            return
        waiting = set(map(id, self._groups))
        ready = [
            f for f in self._flushes if f.last_group is None or id(f.last_group) not in waiting
        ]
        if not ready:
            return
        durable = self._commit_and_sync()
        failed, self._failed_keys = self._failed_keys, []
        catalog = self._core.catalog
        report = FlushReport(len(catalog), catalog.page_bytes, durable, failed)
        self._flushes = [f for f in self._flushes if f not in ready]
        for request in ready:
            request.finish(report)

    # -- trouble and the end -------------------------------------------------------------

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Note keys whose slab was dropped: gone from the catalog, not yet from the index."""
        self._core.removed.add(keys)
        self._core.counters.add("removed_pages", len(keys))
        if self._commit_keys(keys) is not None:
            logger.warning("%d pages of a dropped slab are still indexed", len(keys))

    def _commit_keys(self, keys: Sequence[bytes]) -> WriteStatus | None:
        with self._lock:
            self._deleting.update(keys)
        self._doomed += [(key, Location(-1, -1, 0, 0, 0)) for key in keys]
        return self._commit((), ())

    def _give_up(self) -> None:
        """Settle everything after a failure of this very thread; its slots stay taken."""
        self._groups.clear()
        self._open_group = Group()
        for job in list(self._unsettled):
            self._settle(job, WriteStatus.FAILED)
        for request in self._flushes:
            request.finish(FlushReport(0, 0, False, list(self._failed_keys)))
        self._flushes = []

    def _stop_writing(self, reason: str) -> None:
        if self._core.write_fault is None:
            self._core.write_fault = reason
            logger.error("%s: %s; pages are still read", self._core.layout.root, reason)

    def _mark_clean(self) -> None:
        """Write the clean-shutdown marker, if everything is indeed in the durable index."""
        core = self._core
        if core.write_fault is not None or self._unsynced or self._doomed:
            return
        mark = CleanMark(
            self._index.head().txnid,
            len(core.catalog),
            core.catalog.record_sum,
            self._next_seq - 1,
        )
        core.backend.write_file(core.layout.clean, encode_sealed(asdict(mark)))


_STATUS_COUNTERS = {
    WriteStatus.DUPLICATE: "duplicate_pages",
    WriteStatus.NO_SPACE: "rejected_no_space",
    WriteStatus.FAILED: "rejected_failed",
    WriteStatus.READ_ONLY: "rejected_read_only",
}


def _failure_status(error: BaseException | None) -> WriteStatus:
    full = isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS
    return WriteStatus.NO_SPACE if full else WriteStatus.FAILED


def _is_no_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
        return True
    full = (lmdb.MapFullError, lmdb.DiskError)
    return isinstance(error, full) or "No space left" in str(error)


def _errno_name(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    return errno.errorcode.get(number or 0, type(error).__name__)
