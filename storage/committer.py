"""Everything the writer thread does to the index: commits, deletions, syncs, the clean mark."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import lmdb

from tierkv.storage.columns import Location
from tierkv.storage.core import Core
from tierkv.storage.format import IndexRecord, decode_record, encode_record, record_sum
from tierkv.storage.index import LmdbIndex
from tierkv.storage.layout import CleanMark, encode_sealed, hash_file
from tierkv.storage.slabs import NO_SPACE_ERRNOS
from tierkv.storage.types import WriteStatus

_ALMOST_FULL_BYTES = 1 << 20

logger = logging.getLogger(__name__)

_NOWHERE = Location(-1, -1, 0, 0, 0)


class Committer:
    """Owns the index's write transactions.  Belongs to the writer thread, but for what says
    otherwise.

    A deletion goes through three steps: the page leaves the catalog (any thread), the index
    in the next commit, and its slot becomes free with the next sync after that.
    """

    def __init__(self, core: Core, index: LmdbIndex) -> None:
        self._core = core
        self._index = index
        self._doomed: list[tuple[bytes, Location]] = []
        self._epoch = 0
        self._unsynced = False
        self._sync_at = 0.0
        self._lock = threading.Lock()
        self._usage: dict[bytes, tuple[int, int]] = {}
        # Gone from the catalog, not yet from the index: how often, since a key may come back.
        self._leaving: Counter[bytes] = Counter()

    # -- any thread ----------------------------------------------------------------------

    def record_usage(self, usage: Mapping[bytes, tuple[int, int]]) -> None:
        """Keep hits and last use until the next commit."""
        with self._lock:
            self._usage.update(usage)

    def note_leaving(self, keys: Iterable[bytes]) -> None:
        """Note pages just removed from the catalog; ``doom`` must follow for each."""
        with self._lock:
            self._leaving.update(keys)

    # -- the writer thread ---------------------------------------------------------------

    def doom(self, key: bytes, location: Location) -> None:
        """Delete a removed page from the index with the next commit."""
        self._arm_timer()
        self._doomed.append((key, location))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete pages whose slab was dropped: their slots exist no more."""
        core = self._core
        core.removed.add(keys)
        core.counters.add("removed_pages", len(keys))
        self.note_leaving(keys)
        for key in keys:
            self.doom(key, _NOWHERE)

    def publish(self, records: Sequence[IndexRecord]) -> WriteStatus | None:
        """Commit pages, then make them findable.  None, or why nothing was committed."""
        values = [encode_record(record) for record in records]
        status = self._commit([record.info.key for record in records], values)
        if status is None:
            sums = map(record_sum, values)
            self._core.catalog.publish(list(zip(records, sums, strict=True)))
        return status

    def commit_and_sync(self) -> bool:
        """Make index and deletions durable; slots freed before become reusable."""
        core = self._core
        if core.write_fault is not None:
            return False
        if (self._doomed or self._usage) and self._commit((), ()) is not None:
            self._postpone()
            return False
        if not self._unsynced:
            core.catalog.release(self._epoch)  # what a read kept back before
            return True
        try:
            self._index.sync()
        except (lmdb.Error, OSError) as error:
            # A failed sync is never tried again: the second one would succeed and lie.
            core.counters.add("error_index_sync")
            self.stop_writing(f"the index cannot be made durable: {error}")
            return False
        core.counters.add("index_syncs")
        self._unsynced = False
        self._epoch += 1
        core.catalog.release(self._epoch)
        return True

    def wait_s(self) -> float | None:
        """Return how long the next timed sync is away, None when nothing needs one."""
        if self._core.write_fault is not None or not (self._unsynced or self._doomed):
            return None
        return max(0.0, self._sync_at - self._core.clock.monotonic())

    def stop_writing(self, reason: str) -> None:
        """Take no more writes until the directory is opened anew (which rebuilds the index)."""
        if self._core.write_fault is None:
            self._core.write_fault = reason
            logger.error("%s: %s; pages are still read", self._core.layout.root, reason)

    def mark_clean(self, max_seq: int, durable_seq: int) -> None:
        """Write the clean-shutdown marker, if all pages are indeed in the durable index."""
        core = self._core
        if core.write_fault is not None or self._unsynced or self._doomed:
            return
        catalog = core.catalog
        try:
            size, digest = hash_file(os.path.join(core.layout.index, "data.mdb"))
        except OSError as error:  # the next open scans, as after any unclean stop
            logger.warning("%s: no clean mark: %s", core.layout.root, error)
            return
        mark = CleanMark(len(catalog), catalog.record_sum, max_seq, durable_seq, size, digest)
        core.backend.write_file(core.layout.clean, encode_sealed(asdict(mark)))

    def count_mismatches(self) -> int:
        """Return how many pages only the index or only the catalog knows.

        The caller keeps pages from being removed meanwhile.
        """
        catalog = self._core.catalog
        agreed = strange = 0
        for key, value in self._index.records():
            record = decode_record(key, value)
            if record is not None and catalog.holds(record):
                agreed += 1
            elif not self._leaving[key]:
                strange += 1
        return strange + len(catalog) - agreed

    def _commit(self, keys: Sequence[bytes], values: Sequence[bytes]) -> WriteStatus | None:
        """Commit records together with all deletions so far; None when it worked."""
        core = self._core
        if core.write_fault is not None:
            return WriteStatus.READ_ONLY
        with self._lock:
            usage, self._usage = self._usage, {}
        doomed = [key for key, _ in self._doomed]
        try:
            self._index.commit(delete=doomed, put=values, keys=keys, usage=usage)
        except (lmdb.Error, OSError) as error:
            core.counters.add("error_commit")
            with self._lock:
                self._usage = {**usage, **self._usage}
            if _is_no_space(error, self._core.layout.index):
                return WriteStatus.NO_SPACE
            self.stop_writing(f"the index failed: {error}")
            return WriteStatus.FAILED
        core.counters.add("index_commits")
        self._arm_timer()
        self._unsynced = True
        core.catalog.defer((location for _, location in self._doomed), self._epoch)
        self._doomed = []
        with self._lock:
            self._leaving.subtract(doomed)
            self._leaving = +self._leaving
        return None

    def _arm_timer(self) -> None:
        if not (self._unsynced or self._doomed):
            self._postpone()

    def _postpone(self) -> None:
        self._sync_at = self._core.clock.monotonic() + self._core.config.sync_interval_s


def _is_no_space(error: BaseException, folder: str) -> bool:
    if isinstance(error, lmdb.Error) and os.strerror(errno.EIO) in str(error):
        # LMDB says this of a short write as well, which a full filesystem causes.
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize < _ALMOST_FULL_BYTES
    if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
        return True
    return isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or "No space" in str(error)
