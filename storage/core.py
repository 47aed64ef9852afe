"""The parts of an open tier, shared by its reader, its writer and its facade."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tierkv.errors import InvalidInputError
from tierkv.storage.backend import IOBackend
from tierkv.storage.breaker import Breaker
from tierkv.storage.catalog import Catalog
from tierkv.storage.clock import Clock
from tierkv.storage.codec import make_codec
from tierkv.storage.counters import Counters
from tierkv.storage.format import slot_bytes
from tierkv.storage.index import LmdbIndex
from tierkv.storage.layout import Layout
from tierkv.storage.lock import DirectoryLock
from tierkv.storage.memory_index import MemoryIndex
from tierkv.storage.slabs import SlabFiles
from tierkv.storage.slotio import SlotIO

GROUP_BYTES = 32 << 20
COMMIT_RECORDS = 256
EXTRA_THREADS = 1  # beyond the I/O depth: one hashes while the others transfer
RUN_BYTES = 1 << 20  # small pages for adjacent slots are written in one call up to this


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig:
    """How an SSD tier is opened; see ``SsdTier.open`` for the meaning of each field."""

    path: str
    capacity_bytes: int
    slot_payload_bytes: int
    codec: str = "raw"
    io_threads: int = 4
    sync_interval_s: float = 2.0
    io_timeout_s: float = 30.0
    direct: bool = True
    read_only: bool = False
    slab_bytes: int | None = None
    max_queue_bytes: int = 1 << 30
    breaker_threshold: int = 8
    namespaces: Mapping[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make_codec(self.codec)
        for name in ("capacity_bytes", "slot_payload_bytes", "io_threads", "max_queue_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InvalidInputError(f"{name}: must be a positive integer, got {value!r}")
        for name in ("sync_interval_s", "io_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(
                    f"{name}: must be more than zero seconds, got {getattr(self, name)!r}"
                )
        if self.slot_payload_bytes >= 1 << 31:
            raise InvalidInputError(
                f"slot_payload_bytes: a page has less than 2 GiB, got {self.slot_payload_bytes}"
            )
        if self.slab_bytes is not None and self.slab_bytes < self.slot_bytes:
            raise InvalidInputError(
                f"slab_bytes: {self.slab_bytes} cannot hold one slot of {self.slot_bytes} bytes"
            )

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: header, payload, padding."""
        return slot_bytes(self.slot_payload_bytes)


class Removed:
    """Keys that the tier dropped by itself, until somebody asks.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: list[bytes] = []

    def add(self, keys: Iterable[bytes]) -> None:
        """Note keys."""
        with self._lock:
            self._keys.extend(keys)

    def take(self) -> list[bytes]:
        """Return the keys noted since the last call."""
        with self._lock:
            keys, self._keys = self._keys, []
        return keys


@dataclass(slots=True, kw_only=True)
class Core:
    """An open tier's parts.  Only the writer thread changes files, index and write_fault."""

    config: SsdConfig
    layout: Layout
    backend: IOBackend
    clock: Clock
    lock: DirectoryLock | None
    files: SlabFiles
    index: LmdbIndex | MemoryIndex
    catalog: Catalog
    slot_io: SlotIO
    counters: Counters
    breaker: Breaker
    removed: Removed
    capacity_bytes: int
    next_seq: int
    durable_seq: int
    pid: int
    clean_open: bool
    recover_seconds: float
    recovered_pages: int
    closing: bool = False
    write_fault: str | None = None

    @property
    def slot_bytes(self) -> int:
        """Size of the slots that new pages go into."""
        return self.config.slot_bytes

    @property
    def capacity_pages(self) -> int:
        """How many pages of the configured size fit."""
        return self.capacity_bytes // self.slot_bytes

    def release(self) -> None:
        """Close files and index and give the directory up.  No I/O may be in flight."""
        self.index.close()
        self.files.close()
        if self.lock is not None:
            self.lock.release()
