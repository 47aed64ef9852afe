"""The file in which a running store publishes its statistics for other processes.

Only the owner of a store directory knows what its device and host tiers hold.  It writes a
snapshot, as JSON, into the file ``live`` of the directory; ``tierkv stat`` reads that file.
Neither side waits for the other: the file holds two slots, written in turn, each with its
own sequence number and checksum, so that one of them is always whole.

    0     header   magic "TKVLIVE1", slot bytes u32, zeros up to 4096
    4096  slot 0   sequence u64, payload bytes u32, CRC-32 u32, payload (UTF-8 JSON)
    ...   slot 1   likewise; the CRC covers sequence, length and payload

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

from tierkv.errors import ForkError, InvalidInputError, StoreClosedError, StoreError

LIVE_NAME = "live"
_MAGIC = b"TKVLIVE1"
_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sI")
_SLOT = struct.Struct("<QII")
_SLOT_BYTES = 32 * 1024
_READ_TRIES = 16


@dataclass(frozen=True, slots=True)
class LiveStats:
    """What became of the snapshots given to a ``LiveFile``.

    Attributes:
        published: snapshots written.
        dropped: snapshots not written, being too long or because of an I/O error.
        bytes_written: bytes of those written.
    """

    published: int
    dropped: int
    bytes_written: int


class LiveFile:
    """The writing side, owned by the process that owns the store directory.

    Not thread-safe: the store publishes under its own lock.
    """

    def __init__(self, path: Path, descriptor: int, slot_bytes: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._slot_bytes = slot_bytes
        self._pid = os.getpid()
        self._sequence = 0
        self._dropped = 0
        self._bytes = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, slot_bytes: int = _SLOT_BYTES) -> Self:
        """Create the file, or take over the one that an earlier owner left.

        Args:
            path: the file, by convention ``DIR/live``.
            slot_bytes: room for one snapshot, its header of 16 bytes included.

        Raises:
            InvalidInputError: ``slot_bytes`` leaves no room for a snapshot.
            StoreError: the file cannot be created or has no space.
        """
        if slot_bytes <= _SLOT.size:
            raise InvalidInputError(f"live file: slot_bytes must exceed {_SLOT.size}")
        target = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(target, flags, 0o644)
        except OSError as error:
            raise StoreError(f"{target}: cannot create the live file: {error.strerror}") from error
        file = cls(target, descriptor, slot_bytes)
        try:
            file._lay_out()
        except OSError as error:
            os.close(descriptor)
            raise StoreError(f"{target}: cannot write the live file: {error.strerror}") from error
        return file

    def publish(self, snapshot: Mapping[str, Any]) -> bool:
        """Write a snapshot, with the owner's ``pid`` added, for readers to find.

        Returns:
            Whether it was written; a snapshot that is too long or meets an I/O error is
            dropped and counted, since a store works on without being watched.

        Raises:
            StoreClosedError: after ``close()``.
            ForkError: in a child process that inherited the file.
        """
        self._require_usable()
        payload = json.dumps({"pid": self._pid, **snapshot}, separators=(",", ":")).encode()
        if _SLOT.size + len(payload) > self._slot_bytes:
            self._dropped += 1
            return False
        sequence = self._sequence + 1
        record = _encode(sequence, payload)
        try:
            written = os.pwrite(self._descriptor, record, self._offset(sequence))
        except OSError:
            written = 0
        if written != len(record):  # the other slot still holds the snapshot before
            self._dropped += 1
            return False
        self._sequence = sequence
        self._bytes += written
        return True

    def stats(self) -> LiveStats:
        """Return what became of the snapshots so far."""
        return LiveStats(self._sequence, self._dropped, self._bytes)

    def check(self) -> None:
        """Raise AssertionError unless the file holds the last snapshot published."""
        if self._descriptor >= 0 and self._sequence:
            found = _newest(_read_all(self._path))
            assert found is not None, "live: no whole snapshot in the file"
            assert found[0] == self._sequence, "live: the file holds another snapshot than the last"

    def close(self) -> None:
        """Withdraw the snapshot and close the file; does nothing the second time."""
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
        size = self._offset(1) + self._slot_bytes
        os.ftruncate(self._descriptor, 0)  # an earlier owner's snapshots must not be read
        os.posix_fallocate(self._descriptor, 0, size)
        os.pwrite(self._descriptor, _HEADER.pack(_MAGIC, self._slot_bytes), 0)

    def _offset(self, sequence: int) -> int:
        return _HEADER_BYTES + (sequence % 2) * self._slot_bytes

    def _require_usable(self) -> None:
        if self._descriptor < 0:
            raise StoreClosedError(f"{self._path}: the live file is closed")
        if os.getpid() != self._pid:
            raise ForkError(
                f"{self._path}: opened by process {self._pid} and used in its child {os.getpid()}; "
                "open the store in the process that uses it"
            )


def read_live(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the newest snapshot in a live file, or None when there is no valid one.

    Never disturbs the writer and never raises for what the file holds.  Whether the
    snapshot is of a process that still owns the directory is for the caller to decide, by
    comparing its ``pid`` with the lock's.
    """
    for _ in range(_READ_TRIES):  # both slots torn needs two writes within one read
        try:
            found = _newest(_read_all(Path(path)))
        except OSError:
            return None
        if found is not None:
            return found[1]
    return None


def _read_all(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        return file.read(_HEADER_BYTES + 64 * _SLOT_BYTES)


def _encode(sequence: int, payload: bytes) -> bytes:
    head = _SLOT.pack(sequence, len(payload), 0)
    return _SLOT.pack(sequence, len(payload), zlib.crc32(payload, zlib.crc32(head))) + payload


def _newest(data: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return (sequence, snapshot) of the newest whole slot."""
    if len(data) < _HEADER_BYTES:
        return None
    magic, slot_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or slot_bytes <= _SLOT.size:
        return None
    slots = [_decode(data[_HEADER_BYTES + i * slot_bytes :][:slot_bytes]) for i in range(2)]
    return max((slot for slot in slots if slot is not None), default=None, key=lambda s: s[0])


def _decode(slot: bytes) -> tuple[int, dict[str, Any]] | None:
    if len(slot) < _SLOT.size:
        return None
    sequence, length, _ = _SLOT.unpack_from(slot)
    payload = slot[_SLOT.size : _SLOT.size + length]
    if not sequence or slot[: _SLOT.size + length] != _encode(sequence, payload):
        return None
    try:
        snapshot = json.loads(payload)
    except ValueError:
        return None
    return (sequence, snapshot) if isinstance(snapshot, dict) else None
