"""Slab files: creating, opening, retiring and removing them, and the ``meta`` that lists them."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import uuid
from dataclasses import dataclass, replace

from tierkv.errors import CapacityError
from tierkv.storage.aligned import ALIGNMENT, aligned_empty
from tierkv.storage.backend import IOBackend
from tierkv.storage.layout import Layout, SlabMeta, StoreMeta, encode_meta
from tierkv.units import format_bytes

logger = logging.getLogger(__name__)

MIN_SLAB_BYTES = 256 << 20
MIN_SLAB_SLOTS = 64
MAX_SLABS = 256

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def choose_slab_slots(capacity_bytes: int, slot_bytes: int) -> int:
    """Return how many slots a new slab gets.

    At least 256 MiB and 64 slots, so that slabs are few; at most about 256 slabs, so that
    descriptors are few; never more than the capacity.
    """
    wanted = max(MIN_SLAB_BYTES, MIN_SLAB_SLOTS * slot_bytes, capacity_bytes // MAX_SLABS)
    return max(1, min(wanted, capacity_bytes) // slot_bytes)


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Free and total bytes of the filesystem, and what the tier leaves alone."""

    free: int
    total: int

    @property
    def reserve(self) -> int:
        """Bytes kept free for the index and for others: 1 % of the filesystem, 1 GiB at most.

        A small filesystem keeps 2 %, since the index does not shrink with it.
        """
        return min(1 << 30, self.total // (50 if self.total < 1 << 30 else 100))

    @property
    def usable(self) -> int:
        """Bytes that new slabs may take."""
        return max(0, self.free - self.reserve)


def disk_space(path: str) -> DiskSpace:
    """Return the space of the filesystem that holds ``path``."""
    status = os.statvfs(path)
    return DiskSpace(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)


class SlabFiles:
    """The slab files of one directory and their open descriptors.

    ``descriptor`` may be called from any thread; everything that changes files belongs to
    the writer thread (or to opening, before it runs).
    """

    def __init__(
        self, layout: Layout, meta: StoreMeta, backend: IOBackend, *, write: bool, direct: bool
    ) -> None:
        self._layout = layout
        self._backend = backend
        self._write = write
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self.meta = meta
        self.direct = direct and self._probe_direct()
        if direct and not self.direct:
            logger.warning(
                "%s: O_DIRECT is refused here; the SSD tier works through the page cache",
                layout.slabs,
            )

    @property
    def fingerprint(self) -> bytes:
        """The store's fingerprint, 16 bytes, repeated in every slot header."""
        return bytes.fromhex(self.meta.fingerprint)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slab files."""
        return sum(slab.file_bytes for slab in self.meta.slabs if slab.state != "dropped")

    def descriptor(self, slab_id: int) -> int:
        """Return the open descriptor of a slab, opening it on first use.

        Raises:
            OSError: it cannot be opened; nothing is remembered, so a later call tries again.
        """
        fd = self._fds.get(slab_id)
        if fd is not None:
            return fd
        with self._lock:
            fd = self._fds.get(slab_id)
            if fd is None:
                fd = self._backend.open(
                    self._layout.slab(slab_id), write=self._write, direct=self.direct
                )
                self._fds[slab_id] = fd
            return fd

    def damage(self, slab: SlabMeta) -> str | None:
        """Return what is wrong with a slab file as a whole, or None."""
        try:
            size = os.stat(self._layout.slab(slab.id)).st_size
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return error.strerror
        if size != slab.file_bytes:
            return f"{size} bytes long instead of {slab.file_bytes}"
        return None

    def create(self, slot_bytes: int, slots: int) -> SlabMeta:
        """Preallocate a new slab, list it in ``meta`` and return it.

        Raises:
            OSError: no space, or I/O failed; no file is left behind.
        """
        slab = SlabMeta(self.meta.next_slab, uuid.uuid4().hex, slot_bytes, slots)
        space = disk_space(self._layout.slabs)
        if slab.file_bytes > space.usable:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._layout.slabs)
        path = self._layout.slab(slab.id)
        try:
            fd = self._backend.open(path + ".new", write=True, direct=False, create=True)
            try:
                self._backend.fallocate(fd, slab.file_bytes)
            finally:
                self._backend.close(fd)
            self._backend.rename(path + ".new", path)
            # Listed last: a file beyond ``next_slab`` never held a page, and may be removed.
            self._save(self.meta.with_slab(slab))
        except OSError:
            self._remove_quietly(path + ".new")
            self._remove_quietly(path)
            raise
        return slab

    def retire(self, slab_id: int) -> SlabMeta:
        """Write no more into a slab (its pages stay readable) and return its new meta."""
        slab = replace(self.find(slab_id), state="retired")
        self._save(self.meta.with_slab(slab))
        return slab

    def retire_in_memory(self, slab_id: int) -> SlabMeta:
        """Likewise, when ``meta`` cannot be written either."""
        slab = replace(self.find(slab_id), state="retired")
        self.meta = self.meta.with_slab(slab)
        return slab

    def drop(self, slab_id: int) -> None:
        """Remove a slab file.  Its pages must have been forgotten before."""
        slab = replace(self.find(slab_id), state="dropped")
        # Listed as dropped first, so that a crash between the two leaves no stray file.
        self._save(self.meta.with_slab(slab))
        with self._lock:
            fd = self._fds.pop(slab_id, None)
        if fd is not None:
            self._backend.close(fd)
        self._remove_quietly(self._layout.slab(slab_id))
        self._save(self.meta.without_slab(slab_id))

    def sweep(self) -> None:
        """Finish what a crash interrupted: remove slabs dropped or never listed."""
        for slab in self.meta.slabs:
            if slab.state == "dropped":
                self._remove_quietly(self._layout.slab(slab.id))
                self._save(self.meta.without_slab(slab.id))
        for name in os.listdir(self._layout.slabs):
            unlisted = re.fullmatch(r"\d{4,}", name) and int(name) >= self.meta.next_slab
            if unlisted or name == ".probe" or re.fullmatch(r"\d{4,}\.new", name):
                self._remove_quietly(os.path.join(self._layout.slabs, name))

    def find(self, slab_id: int) -> SlabMeta:
        """Return a slab's meta."""
        return next(slab for slab in self.meta.slabs if slab.id == slab_id)

    def close(self) -> None:
        """Close all descriptors.  No I/O may be in flight: a number could be reused."""
        with self._lock:
            while self._fds:
                self._backend.close(self._fds.popitem()[1])

    def _save(self, meta: StoreMeta) -> None:
        self._backend.write_file(self._layout.meta, encode_meta(meta))
        self.meta = meta

    def _probe_direct(self) -> bool:
        """Try O_DIRECT once, on a scratch file (or on a slab, when nothing may be written).

        True when there is neither: nothing will be read, and nothing is refused.
        """
        path = os.path.join(self._layout.slabs, ".probe")
        if not self._write:
            slabs = [s for s in self.meta.slabs if s.state != "dropped"]
            if not slabs:
                return True
            path = self._layout.slab(slabs[0].id)
        buffer = aligned_empty(ALIGNMENT)
        try:
            fd = self._backend.open(path, write=self._write, direct=True, create=self._write)
            try:
                if self._write:
                    self._backend.pwritev(fd, [buffer], 0)
                self._backend.preadv(fd, [buffer], 0)
            finally:
                self._backend.close(fd)
        except OSError:
            return False
        finally:
            if self._write:
                self._remove_quietly(path)
        return True

    def _remove_quietly(self, path: str) -> None:
        try:
            self._backend.remove_file(path)
        except OSError as error:
            logger.warning("%s: cannot be removed (%s)", path, error.strerror)


def fit_capacity(path: str, capacity_bytes: int, slot_bytes: int, existing: int) -> int:
    """Return the capacity that the filesystem can hold.

    Args:
        path: the slab directory.
        capacity_bytes: what was asked for.
        slot_bytes: size of a slot.
        existing: bytes that slabs take already.

    Raises:
        CapacityError: less than one slot was asked for, or more than the whole filesystem.
    """
    if capacity_bytes < slot_bytes:
        raise CapacityError(
            f"disk tier: {format_bytes(capacity_bytes)} cannot hold one page of "
            f"{format_bytes(slot_bytes)} (payload and header); give it more"
        )
    space = disk_space(path)
    if capacity_bytes > space.total:
        raise CapacityError(
            f"disk tier: {format_bytes(capacity_bytes)} asked for, but the filesystem of {path} "
            f"has {format_bytes(space.total)} in all; ask for less or use another directory"
        )
    possible = existing + space.usable
    if capacity_bytes <= possible:
        return capacity_bytes
    if possible < slot_bytes:
        raise CapacityError(
            f"disk tier: the filesystem of {path} has {format_bytes(space.free)} free, of which "
            f"{format_bytes(space.reserve)} stay reserved; one page needs "
            f"{format_bytes(slot_bytes)}"
        )
    logger.warning(
        "%s: the disk tier gets %s instead of %s: the filesystem has %s free, less a reserve of %s",
        path,
        format_bytes(possible),
        format_bytes(capacity_bytes),
        format_bytes(space.free),
        format_bytes(space.reserve),
    )
    return possible
