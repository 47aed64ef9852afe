"""Counters of the SSD tier and the frozen record that shows them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


class Counters:
    """Named counters; thread-safe, only ever growing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._values[name] += amount

    def add_many(self, **amounts: int) -> None:
        """Add to several counters at once."""
        with self._lock:
            self._values.update(amounts)

    def snapshot(self) -> Counter[str]:
        """Return a copy of all counters, taken at one instant."""
        with self._lock:
            return Counter(self._values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdStats:
    """State and counters of an SSD tier since it was opened.

    ``lookups = hits + misses + corrupt + errors + timeouts + closed + reads_in_flight``.

    Attributes:
        capacity_bytes: capacity_pages slots, headers included.
        used_bytes: slots that hold pages, headers included.
        page_bytes: bytes of all pages before codecs.
        free_slots: slots that a page could be written into now or after preallocation.
        deferred_slots: freed, but not reusable before the next index sync.
        writing_slots: being written.
        slab_bytes: bytes of all slab files on disk.
        direct: O_DIRECT is in use.
        read_only: opened for reading only, or writing stopped; ``write_fault`` says why.
        breaker: ``closed`` (in service) or ``open`` (out of service after I/O errors).
        clean_open: the last shutdown was orderly, so the index was taken as it was.
        recover_seconds: time that rebuilding the index took.
        recovered_pages: pages that the rebuild found.
        errors_by_kind: failures by what failed (header, payload, stale, io_read, ...).
        logical_bytes_read: payload bytes served; ``device_bytes_read`` includes headers,
            padding, re-reads and codecs.  Likewise for writing.
    """

    capacity_bytes: int
    used_bytes: int
    pages: int
    page_bytes: int
    free_slots: int
    deferred_slots: int
    writing_slots: int
    slabs: int
    slab_bytes: int
    direct: bool
    read_only: bool
    write_fault: str | None
    breaker: str
    clean_open: bool
    recover_seconds: float
    recovered_pages: int
    queue_bytes: int
    reads_in_flight: int
    lookups: int
    hits: int
    misses: int
    corrupt: int
    errors: int
    timeouts: int
    closed: int
    throttled: int
    fingerprint_mismatch: int
    checksum_header: int
    checksum_payload: int
    stale_slots: int
    torn_pages: int
    retry_reads: int
    quarantined: int
    put_pages: int
    written_pages: int
    duplicate_pages: int
    rejected_queue_full: int
    rejected_no_space: int
    rejected_failed: int
    rejected_read_only: int
    deleted_pages: int
    removed_pages: int
    logical_bytes_read: int
    logical_bytes_written: int
    device_bytes_read: int
    device_bytes_written: int
    slab_syncs: int
    index_commits: int
    index_syncs: int
    worker_errors: int
    callback_errors: int
    retired_slabs: int
    errors_by_kind: dict[str, int] = field(default_factory=dict)


COUNTED = (
    "lookups",
    "hits",
    "misses",
    "corrupt",
    "errors",
    "timeouts",
    "closed",
    "throttled",
    "fingerprint_mismatch",
    "checksum_header",
    "checksum_payload",
    "stale_slots",
    "torn_pages",
    "retry_reads",
    "quarantined",
    "put_pages",
    "written_pages",
    "duplicate_pages",
    "rejected_queue_full",
    "rejected_no_space",
    "rejected_failed",
    "rejected_read_only",
    "deleted_pages",
    "removed_pages",
    "logical_bytes_read",
    "logical_bytes_written",
    "device_bytes_read",
    "device_bytes_written",
    "slab_syncs",
    "index_commits",
    "index_syncs",
    "worker_errors",
    "callback_errors",
    "retired_slabs",
)
