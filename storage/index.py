"""The persistent index: page key to slot, in LMDB, with guards against its failure modes.

LMDB does not notice a flipped bit and kills the process when its file is cut short.  So each
record carries its own checksum, and the file's length is checked before every use.  One
thread writes (the tier's writer); others may read.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lmdb

from tierkv.errors import StoreError
from tierkv.storage.backend import IOBackend
from tierkv.storage.format import IndexRecord, decode_record, encode_record

START_MAP_BYTES = 16 << 20
_META_PAGE = mmap.PAGESIZE
_MAGIC = 0xBEEFC0DE
_USAGE = struct.Struct("<QQ")
_SCAN_BATCH = 2048
_LOCK_FILE_BYTES = 8192


class IndexDamagedError(StoreError):
    """The index file cannot be trusted; it is rebuilt from the slabs."""


@dataclass(frozen=True, slots=True)
class IndexHead:
    """The newer of LMDB's two meta pages."""

    txnid: int
    last_page: int

    @property
    def file_bytes(self) -> int:
        """How long the file must be for LMDB to read it safely."""
        return (self.last_page + 1) * _META_PAGE


def read_head(fd: int, name: str) -> IndexHead:
    """Return the newer meta page of a data file.

    Raises:
        IndexDamagedError: unreadable, empty or no meta page.
    """
    try:
        pages = [os.pread(fd, 256, at) for at in (0, _META_PAGE)]
    except OSError as error:
        raise IndexDamagedError(f"{name}: {error.strerror}") from error
    heads = [
        IndexHead(*reversed(struct.unpack_from("<QQ", page, 136)))
        for page in pages
        if len(page) == 256 and struct.unpack_from("<I", page, 16)[0] == _MAGIC
    ]
    if not heads:
        raise IndexDamagedError(f"{name}: no LMDB meta page")
    return max(heads, key=lambda head: head.txnid)


def check_length(fd: int, name: str) -> IndexHead:
    """Check that a data file is as long as its newer meta page says, and return that page.

    Raises:
        IndexDamagedError: see ``read_head``; or cut short (LMDB would die of SIGBUS).
    """
    head = read_head(fd, name)
    size = os.fstat(fd).st_size
    if head.file_bytes > size:
        raise IndexDamagedError(f"{name}: cut to {size} bytes of {head.file_bytes}")
    return head


class LmdbIndex:
    """The index of an open store.

    Databases: ``pages`` (key to record) and ``usage`` (key to hits and last use).
    """

    def __init__(
        self,
        path: str,
        backend: IOBackend,
        *,
        read_only: bool = False,
        lock: bool = True,
        map_bytes: int = START_MAP_BYTES,
        max_map_bytes: int = 1 << 40,
    ) -> None:
        """Open (or create) the index at ``path``.

        ``lock=False`` reads without a place in LMDB's reader table, which takes writing to a
        file: only where nobody else has the index open.

        Raises:
            IndexDamagedError: the file cannot be trusted.
        """
        self._path = path
        self._backend = backend
        self._max_map_bytes = max_map_bytes
        # Held while the map is resized and while a batch is read: LMDB forbids both at once.
        self._map_lock = threading.Lock()
        self._open = True
        self._data = os.path.join(path, "data.mdb")
        exists = os.path.exists(self._data)
        if exists:
            mode = os.O_RDONLY if read_only else os.O_RDWR
            self._fd = os.open(self._data, mode | os.O_CLOEXEC)
        elif read_only:
            raise IndexDamagedError(f"{self._data}: missing")
        try:
            if exists:
                self.head()
                map_bytes = max(map_bytes, os.path.getsize(self._data))
            self._env = self._open_env(read_only, lock, map_bytes)
        except BaseException:
            if exists:
                os.close(self._fd)
            raise
        if not exists:
            self._fd = os.open(self._data, os.O_RDWR | os.O_CLOEXEC)
            self._pad()

    def _open_env(self, read_only: bool, lock: bool, map_bytes: int) -> lmdb.Environment:
        if lock and not read_only:
            _allocate_lock_file(os.path.join(self._path, "lock.mdb"))
        try:
            env = lmdb.open(
                self._path,
                map_size=map_bytes,
                max_dbs=4,
                sync=False,
                writemap=False,
                readonly=read_only,
                lock=lock,
                mode=0o600,
            )
        except lmdb.Error as error:
            raise IndexDamagedError(f"{self._path}: {error}") from error
        try:
            env.reader_check()
            self._pages, self._usage = (
                env.open_db(name, create=not read_only) for name in (b"pages", b"usage")
            )
        except lmdb.Error as error:
            env.close()
            raise IndexDamagedError(f"{self._path}: {error}") from error
        return env

    @property
    def map_bytes(self) -> int:
        """Size of the map; doubled by the writer thread when it is full."""
        return int(self._env.info()["map_size"])

    def commit(
        self,
        *,
        delete: Iterable[bytes] = (),
        put: Sequence[bytes] = (),
        keys: Sequence[bytes] = (),
        usage: Mapping[bytes, tuple[int, int]] | None = None,
    ) -> None:
        """Apply one transaction: deletions first, then records and usage.

        Args:
            delete: page keys to drop, with their usage.
            put: encoded records, under ``keys``.
            keys: keys of ``put``.
            usage: hits and last use by key; ignored for pages that are not there.

        Raises:
            IndexDamagedError: the file was cut short or is damaged.
            lmdb.Error: the disk is full, or I/O failed; nothing was changed.
        """
        delete = list(delete)
        while True:
            self.head()
            try:
                self._commit_once(delete, put, keys, usage or {})
                return
            except lmdb.MapFullError:
                self._grow()

    def _commit_once(
        self,
        delete: Sequence[bytes],
        put: Sequence[bytes],
        keys: Sequence[bytes],
        usage: Mapping[bytes, tuple[int, int]],
    ) -> None:
        txn = self._env.begin(write=True)
        try:
            for key in delete:
                txn.delete(key, db=self._pages)
                txn.delete(key, db=self._usage)
            for key, value in zip(keys, put, strict=True):
                txn.put(key, value, db=self._pages)
            for key, (hits, last_used) in usage.items():
                if txn.get(key, db=self._pages) is not None:
                    txn.put(key, _USAGE.pack(hits, last_used), db=self._usage)
            self._backend.commit_index(self._path, txn.commit)
            self._pad()
        except BaseException:
            txn.abort()
            raise

    def _pad(self) -> None:
        """Keep the file as long as its meta page says.

        LMDB leaves pages at the end that a transaction took and gave back unwritten; without
        them a whole file could not be told from one that was cut.
        """
        size = read_head(self._fd, self._data).file_bytes
        if size > os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, size)

    def _grow(self) -> None:
        with self._map_lock:
            size = self.map_bytes * 2
            if size > self._max_map_bytes:
                raise lmdb.MapFullError(f"index map at its bound of {self.map_bytes} bytes")
            self._env.set_mapsize(size)

    def sync(self) -> None:
        """Make all commits so far durable."""
        self._backend.sync_index(self._path, lambda: self._env.sync(True))

    def head(self) -> IndexHead:
        """Check the file's length and return its newer meta page.

        Raises:
            IndexDamagedError: the file was cut short or is damaged.
        """
        return check_length(self._fd, self._data)

    def get(self, key: bytes) -> IndexRecord | None:
        """Return the record under ``key`` if it is there and checks out."""
        with self._map_lock:
            value = self._begin_get(self._pages, key)
        return None if value is None else decode_record(key, value)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, encoded record) of all pages in key order.

        Reads in batches of one short transaction each, so commits in between may or may not
        be seen, and a slow consumer holds nothing up.
        """
        return self._items(self._pages)

    def usage(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return (hits, last use) of pages, zeros where nothing was recorded."""
        with self._map_lock:
            self._check_readable()
            with self._begin() as txn:
                values = [txn.get(key, db=self._usage) for key in keys]
        return [_USAGE.unpack(v) if v and len(v) == _USAGE.size else (0, 0) for v in values]

    def _items(self, db: Any) -> Iterator[tuple[bytes, bytes]]:
        after: bytes | None = None
        while True:
            with self._map_lock:
                batch = self._batch(db, after)
            yield from batch
            if len(batch) < _SCAN_BATCH:
                return
            after = batch[-1][0]

    def _batch(self, db: Any, after: bytes | None) -> list[tuple[bytes, bytes]]:
        self._check_readable()
        try:
            with self._begin() as txn, txn.cursor(db=db) as cursor:
                found = cursor.first() if after is None else cursor.set_range(after)
                if found and after is not None and cursor.key() == after:
                    found = cursor.next()
                batch: list[tuple[Any, Any]] = []
                while found and len(batch) < _SCAN_BATCH:
                    batch.append(cursor.item())
                    found = cursor.next()
                return batch
        except lmdb.Error as error:
            raise IndexDamagedError(f"{self._path}: {error}") from error

    def _begin_get(self, db: Any, key: bytes) -> bytes | None:
        self._check_readable()
        with self._begin() as txn:
            value: Any = txn.get(key, db=db)
        return None if value is None else bytes(value)

    def _begin(self) -> lmdb.Transaction:
        try:
            return self._env.begin()
        except lmdb.MapResizedError:  # a live writer in another process grew the map
            self._env.set_mapsize(0)
            return self._env.begin()

    def _check_readable(self) -> None:
        if not self._open:
            raise IndexDamagedError(f"{self._path}: closed")
        self.head()

    def close(self) -> None:
        """Close without syncing.  Safe to call twice."""
        with self._map_lock:
            if self._open:
                self._open = False
                self._env.close()
                os.close(self._fd)


def _allocate_lock_file(path: str) -> None:
    """Give LMDB's lock file its blocks.

    LMDB makes it sparse and writes to it through a memory map, which kills the process on
    a full filesystem.

    Raises:
        StoreError: there is no space.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _LOCK_FILE_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(f"{path}: no space left; free some and open again") from error
        # A filesystem that cannot allocate ahead: LMDB does as it always does.
    finally:
        os.close(descriptor)


def write_index(path: str, backend: IOBackend, records: Sequence[IndexRecord]) -> None:
    """Create a new index at ``path`` with the given records, and make it durable."""
    os.makedirs(path, mode=0o700)
    index = LmdbIndex(path, backend)
    try:
        for at in range(0, len(records), _SCAN_BATCH):
            batch = records[at : at + _SCAN_BATCH]
            index.commit(put=list(map(encode_record, batch)), keys=[r.info.key for r in batch])
        index.sync()
    finally:
        index.close()
