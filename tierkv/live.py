"""The file in which a running store publishes what it holds, for other processes to read.

Only the owner of a store directory knows what its device and host tiers hold.  It writes
its statistics and, more rarely, the list of pages in those tiers into the file ``live`` of
the directory; ``tierkv stat`` and ``tierkv ls`` read them.  Neither side waits for the
other: each section has two slots, written in turn, each with its own sequence number and
checksum, so that one of them is always whole.

    0     header: magic "TKVLIVE2", bytes of a statistics slot u32, of a page list slot u32
    4096  statistics, slot 0 and 1: UTF-8 JSON
    ...   page list, slot 0 and 1: records of PAGE_DTYPE

    slot: sequence u64, payload bytes u32, CRC-32 u32 over sequence, length and payload; payload

The file is written with ``pwrite`` into the page cache (a few microseconds, no fsync) and
not through a memory map, where a full disk or a truncated file would kill the process.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ForkError, InvalidInputError, StoreClosedError, StoreError

LIVE_NAME = "live"

# One page in the list.  ``tiers`` has bit ``1 << Tier`` set for each tier that holds it.
PAGE_DTYPE = np.dtype(
    [
        ("key", "V32"),
        ("parent", "V32"),
        ("end_token", "<u8"),
        ("created_s", "<u8"),
        ("last_used_s", "<u8"),
        ("hits", "<u4"),
        ("num_tokens", "<u4"),
        ("group", "<u2"),
        ("flags", "<u2"),
        ("tiers", "<u4"),
    ]
)
PageRecords = NDArray[np.void]  # of PAGE_DTYPE, one-dimensional

_MAGIC = b"TKVLIVE2"
_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII")
_SLOT = struct.Struct("<QII")
_SLOT_BYTES = 32 * 1024
_MAX_FILE_BYTES = 1 << 30
_READ_TRIES = 16


@dataclass(frozen=True, slots=True)
class LiveStats:
    """What became of what was given to a ``LiveFile``.

    Attributes:
        published: statistics and page lists written.
        dropped: those not written, being too long or because of an I/O error.
        bytes_written: bytes of those written.
    """

    published: int
    dropped: int
    bytes_written: int


@dataclass(slots=True)
class _Section:
    """Two slots of one kind, written in turn."""

    offset: int
    slot_bytes: int
    sequence: int = 0

    def slot_offset(self, sequence: int) -> int:
        return self.offset + (sequence % 2) * self.slot_bytes

    @property
    def end(self) -> int:
        return self.offset + 2 * self.slot_bytes

    def newest(self, data: bytes) -> tuple[int, bytes] | None:
        """Return (sequence, payload) of the newest whole slot in the file's bytes."""
        slots = [
            _decode(data[self.slot_offset(i) : self.slot_offset(i) + self.slot_bytes])
            for i in range(2)
        ]
        return max((slot for slot in slots if slot is not None), default=None)


class LiveFile:
    """The writing side, owned by the process that owns the store directory.

    Not thread-safe: the store publishes under its own lock.
    """

    def __init__(self, path: Path, descriptor: int, sections: tuple[_Section, _Section]) -> None:
        self._path = path
        self._descriptor = descriptor
        self._stats, self._pages = sections
        self._pid = os.getpid()
        self._dropped = 0
        self._bytes = 0

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, max_pages: int = 0, slot_bytes: int = _SLOT_BYTES
    ) -> Self:
        """Create the file, or take over the one that an earlier owner left.

        Args:
            path: the file, by convention ``DIR/live``.
            max_pages: pages that a page list may have: the slots of the device and host tiers.
            slot_bytes: room for the statistics, the slot's header of 16 bytes included.

        Raises:
            InvalidInputError: a size that is too small, or a file of more than 1 GiB.
            StoreError: the file cannot be created or has no space.
        """
        if slot_bytes <= _SLOT.size or max_pages < 0:
            raise InvalidInputError(
                f"live file: slot_bytes must exceed {_SLOT.size} and max_pages not be negative, "
                f"got {slot_bytes} and {max_pages}"
            )
        sections = _sections(slot_bytes, _SLOT.size + max_pages * PAGE_DTYPE.itemsize)
        if sections[1].end > _MAX_FILE_BYTES:
            raise InvalidInputError(f"live file: {max_pages} pages are more than it can list")
        target = Path(path)
        try:
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{target}: cannot create the live file: {error.strerror}") from error
        file = cls(target, descriptor, sections)
        try:
            file._lay_out()
        except OSError as error:
            os.close(descriptor)
            raise StoreError(f"{target}: cannot write the live file: {error.strerror}") from error
        return file

    def publish(self, snapshot: Mapping[str, Any]) -> bool:
        """Publish statistics, with the owner's ``pid`` added.

        Returns:
            Whether they were written; what is too long or meets an I/O error is dropped and
            counted, since a store works on without being watched.

        Raises:
            StoreClosedError: after ``close()``.
            ForkError: in a child process that inherited the file.
        """
        payload = json.dumps({"pid": self._pid, **snapshot}, separators=(",", ":")).encode()
        return self._write(self._stats, payload)

    def publish_pages(self, pages: PageRecords) -> bool:
        """Publish the pages in the device and host tiers, as records of ``PAGE_DTYPE``.

        Returns and raises like ``publish``.
        """
        assert pages.dtype == PAGE_DTYPE, f"page list: expected PAGE_DTYPE, got {pages.dtype}"
        return self._write(self._pages, pages.tobytes())

    def stats(self) -> LiveStats:
        """Return what became of what was published so far."""
        published = self._stats.sequence + self._pages.sequence
        return LiveStats(published, self._dropped, self._bytes)

    def check(self) -> None:
        """Raise AssertionError unless the file holds what was published last."""
        if self._descriptor < 0:
            return
        data = self._path.read_bytes()
        for name, section in (("statistics", self._stats), ("page list", self._pages)):
            newest = section.newest(data)
            found = newest[0] if newest else 0
            assert found == section.sequence, (
                f"live: the {name} in the file are number {found}, "
                f"published was number {section.sequence}"
            )

    def close(self) -> None:
        """Withdraw what was published and close the file; does nothing the second time."""
        if self._descriptor < 0:
            return
        try:
            if os.getpid() == self._pid:
                self._lay_out()
        except OSError:
            self._dropped += 1  # stale, but its pid no longer owns the directory
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lay_out(self) -> None:
        header = _HEADER.pack(_MAGIC, self._stats.slot_bytes, self._pages.slot_bytes)
        os.ftruncate(self._descriptor, 0)  # an earlier owner's state must not be read
        os.posix_fallocate(self._descriptor, 0, self._pages.end)
        os.pwrite(self._descriptor, header, 0)

    def _write(self, section: _Section, payload: bytes) -> bool:
        self._require_usable()
        written, record = 0, _encode(section.sequence + 1, payload)
        if len(record) <= section.slot_bytes:
            try:
                offset = section.slot_offset(section.sequence + 1)
                written = os.pwrite(self._descriptor, record, offset)
            except OSError:
                written = 0
        if written != len(record):  # the other slot still holds what was there before
            self._dropped += 1
            return False
        section.sequence += 1
        self._bytes += written
        return True

    def _require_usable(self) -> None:
        if self._descriptor < 0:
            raise StoreClosedError(f"{self._path}: the live file is closed")
        if os.getpid() != self._pid:
            raise ForkError(
                f"{self._path}: opened by process {self._pid} and used in its child {os.getpid()}; "
                "open the store in the process that uses it"
            )


def read_live(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the statistics published last, or None when there are no valid ones.

    Never disturbs the writer and never raises for what the file holds.  Whether they are of
    a process that still owns the directory is for the caller to decide, by comparing their
    ``pid`` with the lock's.
    """
    payload = _read_section(Path(path), 0)
    try:
        snapshot = json.loads(payload) if payload is not None else None
    except ValueError:
        return None
    return snapshot if isinstance(snapshot, dict) else None


def read_live_pages(path: str | os.PathLike[str]) -> PageRecords | None:
    """Return the page list published last, as records of ``PAGE_DTYPE``, or None."""
    payload = _read_section(Path(path), 1)
    if payload is None or len(payload) % PAGE_DTYPE.itemsize:
        return None
    return np.frombuffer(payload, PAGE_DTYPE)


def _read_section(path: Path, number: int) -> bytes | None:
    for _ in range(_READ_TRIES):  # both slots torn needs two writes within one read
        try:
            with path.open("rb", buffering=0) as file:
                data = file.read(min(os.fstat(file.fileno()).st_size, _MAX_FILE_BYTES))
        except OSError:
            return None
        if len(data) < _HEADER_BYTES:
            continue  # just being laid out, or not ours
        magic, stats_bytes, pages_bytes = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            return None
        found = _sections(stats_bytes, pages_bytes)[number].newest(data)
        if found is not None:
            return found[1]
    return None


def _sections(stats_bytes: int, pages_bytes: int) -> tuple[_Section, _Section]:
    stats = _Section(_HEADER_BYTES, stats_bytes)
    return stats, _Section(stats.end, pages_bytes)


def _encode(sequence: int, payload: bytes) -> bytes:
    head = _SLOT.pack(sequence, len(payload), 0)
    return _SLOT.pack(sequence, len(payload), zlib.crc32(payload, zlib.crc32(head))) + payload


def _decode(slot: bytes) -> tuple[int, bytes] | None:
    if len(slot) < _SLOT.size:
        return None
    sequence, length, _ = _SLOT.unpack_from(slot)
    payload = slot[_SLOT.size : _SLOT.size + length]
    if not sequence or slot[: _SLOT.size + length] != _encode(sequence, payload):
        return None
    return sequence, payload
