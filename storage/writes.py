"""The pieces of work that pass between the writer thread and its pools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from tierkv.storage.core import Core
from tierkv.storage.format import SlotHeader
from tierkv.storage.layout import SlabMeta
from tierkv.storage.tickets import WriteTicket
from tierkv.storage.types import FlushReport, PageWrite

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
        self.bytes += job.page.payload.nbytes
        self.unwritten += 1


class WriteJob:
    """One page on its way into one slot.

    Attributes:
        followers: everybody who waits for this key, whoever put it first in front.
        cancelled: the page was deleted while on its way; it must not be published.
        header: what was written; None until then, or when it failed with ``error``.
    """

    __slots__ = (
        "_core",
        "_done",
        "_inbox",
        "cancelled",
        "device_bytes",
        "error",
        "followers",
        "group",
        "header",
        "page",
        "seq",
        "slab",
        "slot",
    )

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        done: Callable[[WriteJob], None],
        page: PageWrite,
        slab: SlabMeta,
        slot: int,
        seq: int,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._done = done
        self.page = page
        self.slab = slab
        self.slot = slot
        self.seq = seq
        self.group: Group | None = None
        self.followers: list[tuple[PageWrite, WriteTicket, int]] = []
        self.cancelled = False
        self.header: SlotHeader | None = None
        self.device_bytes = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Hash, encode and write the page (on a write thread)."""
        try:
            self.header, self.device_bytes = self._core.slot_io.write(
                self.page, self.slab, self.slot, self.seq
            )
        except (OSError, MemoryError) as error:
            self.error = error
        self._inbox.put(lambda: self._done(self))

    def fail(self, error: BaseException) -> None:
        """Report a failure that ``run`` did not expect."""
        self.error = error
        self._inbox.put(lambda: self._done(self))


class SyncJob:
    """The fdatasync of one group, over every slab that it touched."""

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
        """Sync (on the sync thread)."""
        core = self._core
        for slab_id in dict.fromkeys(j.slab.id for j in self.group.jobs if j.header is not None):
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
        self.done = threading.Event()
        self.report: FlushReport | None = None

    def finish(self, report: FlushReport) -> None:
        """Hand the report over (the writer's side)."""
        self.report = report
        self.done.set()

    def wait(self, timeout_s: float | None) -> FlushReport | None:
        """Return the report, or None when time ran out."""
        return self.report if self.done.wait(timeout_s) else None
