"""The pieces of work that pass between the writer thread and its pools."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence, Set
from queue import SimpleQueue

from tierkv.storage.core import Core
from tierkv.storage.format import IndexRecord
from tierkv.storage.layout import SlabMeta
from tierkv.storage.slabs import NO_SPACE_ERRNOS
from tierkv.storage.tickets import WriteTicket
from tierkv.storage.types import FlushReport, PageWrite, WriteStatus
from tierkv.storage.wanted import Placed

Inbox = SimpleQueue[Callable[[], object] | None]


class Group:
    """Pages that share one fdatasync and, up to 256 at a time, one index transaction."""

    __slots__ = ("bytes", "jobs", "unwritten")

    def __init__(self) -> None:
        self.jobs: list[WriteJob] = []
        self.bytes = 0
        self.unwritten = 0

    def add(self, job: WriteJob) -> None:
        """Add a page that is about to be written."""
        self.jobs.append(job)
        self.bytes += job.placed.page.payload.nbytes
        self.unwritten += 1


class WriteJob:
    """One page on its way into one slot; the writer thread's, but for record and error.

    Attributes:
        followers: everybody who waits for this key, whoever put it first in front.
        cancelled: the page was deleted while on its way; it must not be published.
        record: what to index; None until the page is written, or when that failed.
    """

    __slots__ = ("cancelled", "error", "followers", "group", "placed", "record", "slab")

    def __init__(self, slab: SlabMeta, placed: Placed, group: Group) -> None:
        self.slab = slab
        self.placed = placed
        self.group = group
        self.followers: list[tuple[PageWrite, WriteTicket, int]] = []
        self.cancelled = False
        self.record: IndexRecord | None = None
        self.error: BaseException | None = None

    @property
    def key(self) -> bytes:
        """The page's key."""
        return self.placed.page.info.key


class DurableMark:
    """Up to which sequence number every write is whole and synced.

    A failed write stops the count for good: what it left in its slot must be read in full
    before a later recovery may believe it.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self._counting = True

    def count(self, group: Group, failed_slabs: Set[int]) -> None:
        """Count a group that was synced, if all before it were and all of it went well."""
        for job in group.jobs:
            if job.record is None or job.slab.id in failed_slabs:
                self._counting = False
        if self._counting:
            self.seq = max(job.placed.seq for job in group.jobs)

    def stop(self) -> None:
        """Count no more."""
        self._counting = False


class WriteRun:
    """Pages for adjacent slots, written together (on a write thread)."""

    __slots__ = ("_core", "_done", "_inbox", "jobs")

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        done: Callable[[WriteRun], None],
        jobs: Sequence[WriteJob],
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._done = done
        self.jobs = jobs

    def run(self) -> None:
        """Hash, encode and write the pages."""
        try:
            records, size = self._core.slot_io.write(
                self.jobs[0].slab, [job.placed for job in self.jobs]
            )
        except (OSError, MemoryError) as error:
            self.fail(error)
            return
        for job, record in zip(self.jobs, records, strict=True):
            job.record = record
        self._core.counters.add("device_bytes_written", size)
        self._inbox.put(lambda: self._done(self))

    def fail(self, error: BaseException) -> None:
        """Report that the pages were not written."""
        for job in self.jobs:
            job.error = error
        self._inbox.put(lambda: self._done(self))


class SyncJob:
    """The fdatasync of one group, over every slab that it touched (on the sync thread)."""

    __slots__ = ("_core", "_done", "_inbox", "errors", "group")

    def __init__(
        self, core: Core, inbox: Inbox, done: Callable[[SyncJob], None], group: Group
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._done = done
        self.group = group
        self.errors: dict[int, BaseException] = {}

    def run(self) -> None:
        """Sync; a slab's error leaves the others' pages good."""
        core = self._core
        for slab_id in dict.fromkeys(j.slab.id for j in self.group.jobs if j.record is not None):
            try:
                core.backend.fdatasync(core.files.descriptor(slab_id))
                core.counters.add("slab_syncs")
            except OSError as error:
                self.errors[slab_id] = error
        self._inbox.put(lambda: self._done(self))

    def fail(self, error: BaseException) -> None:
        """Report a failure that ``run`` did not expect: nothing of the group is durable."""
        self.errors = {job.slab.id: error for job in self.group.jobs}
        self._inbox.put(lambda: self._done(self))


class FlushRequest:
    """Somebody waits for everything so far to be durable."""

    def __init__(self) -> None:
        self.last_group: Group | None = None
        self._done = threading.Event()
        self._report: FlushReport | None = None

    def finish(self, report: FlushReport) -> None:
        """Hand the report over (the writer's side)."""
        self._report = report
        self._done.set()

    def wait(self, timeout_s: float | None) -> FlushReport | None:
        """Return the report, or None when time ran out."""
        return self._report if self._done.wait(timeout_s) else None


STATUS_COUNTERS = {
    WriteStatus.DUPLICATE: "duplicate_pages",
    WriteStatus.NO_SPACE: "rejected_no_space",
    WriteStatus.FAILED: "rejected_failed",
    WriteStatus.READ_ONLY: "rejected_read_only",
}


def failure_status(error: BaseException | None) -> WriteStatus:
    """Return what a page is told whose write ended with ``error``."""
    full = isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS
    return WriteStatus.NO_SPACE if full else WriteStatus.FAILED


def errno_name(error: BaseException) -> str:
    """Return the name of an error for a counter: ``EIO``, or the exception's class."""
    number = getattr(error, "errno", None)
    return errno.errorcode.get(number or 0, type(error).__name__)
