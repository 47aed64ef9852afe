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
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from tierkv.storage.allocator import Allocator
from tierkv.storage.columns import Location
from tierkv.storage.committer import Committer
from tierkv.storage.core import COMMIT_RECORDS, EXTRA_THREADS, GROUP_BYTES, RUN_BYTES, Core
from tierkv.storage.index import LmdbIndex
from tierkv.storage.ledger import Ledger
from tierkv.storage.slotio import MAX_RUN
from tierkv.storage.tickets import WriteTicket
from tierkv.storage.types import FlushReport, PageWrite, WriteStatus
from tierkv.storage.wanted import Placed
from tierkv.storage.workers import WorkerPool
from tierkv.storage.writes import (
    STATUS_COUNTERS,
    DurableMark,
    FlushRequest,
    Group,
    Inbox,
    SyncJob,
    WriteJob,
    WriteRun,
    errno_name,
    failure_status,
)

logger = logging.getLogger(__name__)

# The device has failed, not just this moment.
_IO_ERRNOS = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ENOENT})


class Writer:
    """Owns the writer thread.  Public methods may be called from any thread."""

    def __init__(self, core: Core, index: LmdbIndex) -> None:
        self._core = core
        self._inbox: Inbox = SimpleQueue()
        self._lock = threading.Lock()
        self._ledger = Ledger(core.config.max_queue_bytes)
        self._stopped = False
        self._committer = Committer(core, index)
        # From here on: the writer thread's own.
        self._allocator = Allocator(core, self._committer)
        self._pending: dict[bytes, WriteJob] = {}
        self._unsettled: set[WriteJob] = set()
        self._run_jobs: list[WriteJob] = []  # placed, not yet handed to the write pool
        self._open_group = Group()
        self._groups: deque[Group] = deque()  # closed, oldest first
        self._syncing = False
        self._flushes: list[FlushRequest] = []
        self._failed_keys: list[bytes] = []
        self._failed_slabs: set[int] = set()
        self._next_seq = core.next_seq
        self._durable = DurableMark(core.durable_seq)
        self._writes = WorkerPool("write", core.config.io_threads + EXTRA_THREADS, core.counters)
        self._syncs = WorkerPool("sync", 1, core.counters)
        self._thread = threading.Thread(target=self._run, name="tierkv-writer", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------

    def put(self, pages: Sequence[PageWrite], ticket: WriteTicket) -> None:
        """Queue pages; those beyond the queue's bound are refused at once."""
        accepted: list[tuple[PageWrite, WriteTicket, int]] = []
        refused: list[int] = []
        with self._lock:
            for position, page in enumerate(pages):
                if self._stopped or not self._ledger.admit(page):
                    refused.append(position)
                else:
                    accepted.append((page, ticket, position))
            status = WriteStatus.CLOSED if self._stopped else WriteStatus.QUEUE_FULL
            # Queued under the lock: a delete must find puts and inbox in the same order.
            if accepted:
                self._inbox.put(lambda: self._on_put(accepted))
        if refused and status is WriteStatus.QUEUE_FULL:
            self._core.counters.add("rejected_queue_full", len(refused))
        for position in refused:
            ticket.resolve(position, status)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Unpublish pages at once and queue the rest; return how many there were."""
        removed: list[tuple[bytes, Location | None]] = []
        with self._lock:
            for key in () if self._stopped else dict.fromkeys(keys):
                location = self._core.catalog.remove(key)
                if location is not None or key in self._ledger:
                    removed.append((key, location))
            self._committer.note_leaving(key for key, location in removed if location is not None)
            if removed:
                self._inbox.put(lambda: self._on_delete(removed))
        self._core.counters.add("deleted_pages", len(removed))
        return len(removed)

    def forget(self, key: bytes, location: Location) -> bool:
        """Drop a page that was found bad, unless it is a newer one by now."""
        with self._lock:
            if self._stopped or self._core.catalog.remove(key, location.seq) is None:
                return False
            self._committer.note_leaving([key])
            self._inbox.put(lambda: self._committer.doom(key, location))
        self._core.removed.add([key])
        self._core.counters.add("removed_pages")
        return True

    @property
    def committer(self) -> Committer:
        """What goes into the index; ``record_usage`` may be called from any thread."""
        return self._committer

    def flush(self) -> FlushRequest:
        """Ask for everything so far to be made durable."""
        request = FlushRequest()
        with self._lock:
            if self._stopped:
                request.finish(FlushReport(0, 0, False, []))
            else:
                self._inbox.put(lambda: self._on_flush(request))
        return request

    def count_mismatches(self) -> int:
        """Return how many pages only the index or only the catalog knows; O(pages)."""
        done = threading.Event()
        result: list[int] = []

        def count() -> None:
            try:
                with self._lock:  # nothing is removed meanwhile
                    result.append(self._committer.count_mismatches())
            finally:
                done.set()

        with self._lock:
            if self._stopped:
                return 0
            self._inbox.put(count)
        done.wait(self._core.config.io_timeout_s)
        return result[0] if result else 0

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were put and are not resolved."""
        return self._ledger.bytes

    def stop(self, timeout_s: float) -> bool:
        """Flush, mark the store clean and end all threads; False when time ran out.

        After False the threads may still be in a system call: nothing they use may be freed.
        """
        deadline = self._core.clock.monotonic() + timeout_s
        self.flush()
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
        return self._writes.join(left) and self._syncs.join(left)

    # -- the writer thread ---------------------------------------------------------------

    def _run(self) -> None:
        stopping = False
        while not (stopping and self._is_idle()):
            try:
                message = self._inbox.get(timeout=self._committer.wait_s())
            except Empty:
                message = self._committer.commit_and_sync
            if message is None:
                stopping = True
            else:
                self._guard(message)
            self._guard(self._advance)
        self._guard(self._committer.commit_and_sync)
        self._guard(lambda: self._committer.mark_clean(self._next_seq - 1, self._durable.seq))

    def _guard(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # the thread must live: tickets wait for it
            logger.exception("the writer failed; the disk tier takes no more writes")
            self._core.counters.add("worker_errors")
            self._committer.stop_writing(f"writer failed: {error!r}")
            self._give_up()

    def _is_idle(self) -> bool:
        busy = self._open_group.jobs or self._groups or self._syncing or self._flushes
        return not busy and self._inbox.empty()

    def _on_put(self, pages: Sequence[tuple[PageWrite, WriteTicket, int]]) -> None:
        for waiter in pages:
            key = waiter[0].info.key
            if key in self._core.catalog:
                self._resolve(*waiter, WriteStatus.DUPLICATE)
            elif (pending := self._pending.get(key)) is not None:
                pending.followers.append(waiter)
            else:
                self._start(waiter)
        self._hand_over()

    def _start(self, waiter: tuple[PageWrite, WriteTicket, int]) -> None:
        core = self._core
        if core.write_fault is not None:
            self._resolve(*waiter, WriteStatus.READ_ONLY)
            return
        if not core.breaker.admit():
            core.counters.add("throttled")
            self._resolve(*waiter, WriteStatus.FAILED)
            return
        place = self._allocator.take()
        if place is None:
            self._resolve(*waiter, WriteStatus.NO_SPACE)
            return
        slab, slot = place
        job = WriteJob(
            slab, Placed(waiter[0], slot, self._next_seq, self._durable.seq), self._open_group
        )
        job.followers.append(waiter)
        self._next_seq += 1
        self._pending[job.key] = job
        self._unsettled.add(job)
        self._open_group.add(job)
        self._add_to_run(job)
        if self._open_group.bytes >= GROUP_BYTES:
            self._close_group()

    def _add_to_run(self, job: WriteJob) -> None:
        """Collect small pages for adjacent slots; hand the others over as they come."""
        run = self._run_jobs
        if run and (run[-1].slab is not job.slab or run[-1].placed.slot + 1 != job.placed.slot):
            self._hand_over()
        self._run_jobs.append(job)
        per_run = min(MAX_RUN, RUN_BYTES // job.slab.slot_bytes)
        if len(self._run_jobs) >= per_run:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._run_jobs:
            self._writes.submit(WriteRun(self._core, self._inbox, self._on_written, self._run_jobs))
            self._run_jobs = []

    def _on_written(self, run: WriteRun) -> None:
        for job in run.jobs:
            job.group.unwritten -= 1
        error = run.jobs[0].error
        if error is None:
            return
        self._core.counters.add(f"error_write_{errno_name(error)}")
        if getattr(error, "errno", None) in _IO_ERRNOS:
            self._allocator.retire(run.jobs[0].slab.id)
            self._core.breaker.failure()

    def _on_delete(self, keys: Sequence[tuple[bytes, Location | None]]) -> None:
        for key, location in keys:
            pending = self._pending.pop(key, None)
            if pending is not None:
                pending.cancelled = True
            elif location is None:  # published after the caller looked
                location = self._core.catalog.remove(key)
                if location is not None:
                    self._committer.note_leaving([key])
            if location is not None:
                self._committer.doom(key, location)

    def _on_flush(self, request: FlushRequest) -> None:
        self._close_group()
        request.last_group = self._groups[-1] if self._groups else None
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
        if self._committer.wait_s() == 0:  # due, however busy the inbox keeps this thread
            self._committer.commit_and_sync()

    def _close_group(self) -> None:
        if self._open_group.jobs:
            self._hand_over()
            self._groups.append(self._open_group)
            self._open_group = Group()

    def _on_synced(self, sync: SyncJob) -> None:
        self._syncing = False
        if not self._groups or self._groups[0] is not sync.group:
            return  # given up meanwhile
        group = self._groups.popleft()
        for slab_id, error in sync.errors.items():
            self._core.counters.add(f"error_sync_{errno_name(error)}")
            self._failed_slabs.add(slab_id)
            self._allocator.retire(slab_id)
            self._core.breaker.failure()
        self._durable.count(group, self._failed_slabs)
        written: list[WriteJob] = []
        for job in group.jobs:
            # After a failed sync a later one may succeed, and lie: the slab is done for.
            if job.record is None or job.slab.id in self._failed_slabs:
                self._end(job, failure_status(job.error))
            elif job.cancelled:
                self._end(job, WriteStatus.WRITTEN)
            else:
                written.append(job)
        for at in range(0, len(written), COMMIT_RECORDS):
            self._publish(written[at : at + COMMIT_RECORDS])

    def _publish(self, jobs: Sequence[WriteJob]) -> None:
        """Commit pages to the index, make them findable, then tell whoever waits."""
        records = [job.record for job in jobs if job.record is not None]
        status = self._committer.publish(records)
        if status is not None:
            for job in jobs:
                self._end(job, status)
            return
        self._core.breaker.success()
        self._core.counters.add("written_pages", len(jobs))
        self._core.counters.add("logical_bytes_written", sum(r.raw_bytes for r in records))
        for job in jobs:
            self._settle(job, WriteStatus.WRITTEN)

    def _end(self, job: WriteJob, status: WriteStatus) -> None:
        """Settle a job that leaves no page behind."""
        self._core.catalog.abandon(job.slab.id, job.placed.slot)
        self._settle(job, status)

    def _settle(self, job: WriteJob, status: WriteStatus) -> None:
        self._unsettled.discard(job)
        if self._pending.get(job.key) is job:
            del self._pending[job.key]
        self._resolve(*job.followers[0], status)
        later = WriteStatus.DUPLICATE if status is WriteStatus.WRITTEN else status
        for waiter in job.followers[1:]:
            self._resolve(*waiter, later)

    def _resolve(
        self, page: PageWrite, ticket: WriteTicket, position: int, status: WriteStatus
    ) -> None:
        with self._lock:
            self._ledger.settle(page)
        if status is not WriteStatus.WRITTEN:
            self._core.counters.add(STATUS_COUNTERS[status])
            if status is not WriteStatus.DUPLICATE:
                self._failed_keys.append(page.info.key)
        ticket.resolve(position, status)

    def _finish_flushes(self) -> None:
        if not self._flushes:
            return
        ready = [f for f in self._flushes if f.last_group not in self._groups]
        if not ready:
            return
        durable = self._committer.commit_and_sync()
        failed, self._failed_keys = self._failed_keys, []
        catalog = self._core.catalog
        report = FlushReport(len(catalog), catalog.page_bytes, durable, failed)
        self._flushes = [f for f in self._flushes if f not in ready]
        for request in ready:
            request.finish(report)

    def _give_up(self) -> None:
        """Settle everything after a failure of this very thread; its slots stay taken."""
        self._durable.stop()
        self._groups.clear()
        self._open_group = Group()
        self._run_jobs = []
        for job in list(self._unsettled):
            self._settle(job, WriteStatus.FAILED)
        flushes, self._flushes = self._flushes, []
        for request in flushes:
            request.finish(FlushReport(0, 0, False, list(self._failed_keys)))
