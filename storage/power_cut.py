"""Power cuts and kills without either: what a store's directory would look like afterwards."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence

from tierkv.storage.aligned import ByteArray
from tierkv.storage.backend import OsBackend


class CrashBackend(OsBackend):
    """Keeps, beside the live directory, an image of what a power cut would leave.

    Slab writes reach the image when their file is synced, the index when it is synced, small
    files and renames at once (they are synced by contract).  From sync number ``freeze_at``
    on the image stays as it is, so that a test can cut the power at each sync in turn.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        image: str | os.PathLike[str],
        *,
        freeze_at: int | None = None,
        inherit: CrashBackend | None = None,
    ) -> None:
        """Args:
        root: the store's directory.
        image: where the image is kept; may hold one already.
        freeze_at: when the power goes.
        inherit: the backend of a dead process whose unsynced writes are still in the
            device's cache; ``root`` is a copy of its directory.
        """
        self._root = os.path.abspath(root)
        self._image = os.path.abspath(image)
        self._freeze_at = freeze_at
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self._pending: dict[str, list[tuple[int, bytes]]] = {}
        if inherit is not None:
            with inherit._lock:
                for path, writes in inherit._pending.items():
                    here = os.path.join(self._root, os.path.relpath(path, inherit._root))
                    self._pending[here] = list(writes)
        self.syncs = 0
        os.makedirs(self._image, exist_ok=True)

    @property
    def frozen(self) -> bool:
        """Whether the power is gone already."""
        return self._freeze_at is not None and self.syncs >= self._freeze_at

    def _twin(self, path: str) -> str:
        twin = os.path.join(self._image, os.path.relpath(path, self._root))
        os.makedirs(os.path.dirname(twin), exist_ok=True)
        return twin

    def _durable(self, mirror: Callable[[], None]) -> None:
        with self._lock:
            self.syncs += 1
            if not self.frozen:
                mirror()

    def open(self, path: str, *, write: bool, direct: bool, create: bool = False) -> int:
        """See ``IOBackend``."""
        fd = super().open(path, write=write, direct=direct, create=create)
        with self._lock:
            self._paths[fd] = path
        return fd

    def pwritev(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """See ``IOBackend``."""
        with self._lock:
            if not self.frozen:
                data = b"".join(b.tobytes() for b in buffers)
                self._pending.setdefault(self._paths[fd], []).append((offset, data))
            return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """See ``IOBackend``."""
        with self._lock:
            path = self._paths[fd]
            writes = self._pending.get(path, [])
            taken = len(writes)
        super().fdatasync(fd)
        self._durable(lambda: self._apply(path, writes[:taken]))
        with self._lock:
            if not self.frozen:
                del writes[:taken]

    def _apply(self, path: str, writes: Sequence[tuple[int, bytes]]) -> None:
        twin = self._twin(path)
        if os.path.exists(twin):
            with open(twin, "r+b") as file:
                for offset, data in writes:
                    file.seek(offset)
                    file.write(data)

    def fallocate(self, fd: int, size: int) -> None:
        """See ``IOBackend``."""
        super().fallocate(fd, size)
        path = self._paths[fd]
        self._durable(lambda: _truncate(self._twin(path), size))

    def sync_index(self, path: str, sync: Callable[[], None]) -> None:
        """See ``IOBackend``."""
        super().sync_index(path, sync)
        data = os.path.join(path, "data.mdb")
        self._durable(lambda: _copy(data, self._twin(data)))

    def write_file(self, path: str, data: bytes) -> None:
        """See ``IOBackend``."""
        super().write_file(path, data)
        self._durable(lambda: OsBackend.write_file(_PLAIN, self._twin(path), data))

    def remove_file(self, path: str) -> None:
        """See ``IOBackend``."""
        super().remove_file(path)
        self._durable(lambda: OsBackend.remove_file(_PLAIN, self._twin(path)))

    def rename(self, source: str, target: str) -> None:
        """See ``IOBackend``.  Called by ``write_file`` too, for files that the image lacks."""
        super().rename(source, target)
        with self._lock:
            if source in self._pending:
                self._pending[target] = self._pending.pop(source)
        twin = self._twin(source)
        if os.path.exists(twin):
            self._durable(lambda: os.rename(twin, self._twin(target)))

    def tear(self, rng: random.Random) -> None:
        """Let some 4 KiB units of the unsynced writes have reached the image after all."""
        with self._lock:
            for path, writes in self._pending.items():
                for offset, data in writes:
                    units = range(0, len(data), 4096)
                    kept = [(offset + u, data[u : u + 4096]) for u in units if rng.random() < 0.5]
                    self._apply(path, kept)


_PLAIN = OsBackend()


def _truncate(path: str, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def _copy(source: str, target: str) -> None:
    shutil.copyfile(source, target + ".copy")
    os.replace(target + ".copy", target)


def kill_image(source: str, target: str) -> None:
    """Copy a live store's directory: what a process killed at this instant leaves behind.

    Exact while nothing is being written: call it between puts that have completed.
    """
    shutil.copytree(source, target)
