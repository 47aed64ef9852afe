"""tierkv's side: the host arena and the SSD tier as the store uses them, index included.

Putting into the host tier finds slots, copies and enters the pages in the prefix index; getting
looks them up by key and copies.  On disk, pages are put and flushed: checksums, index and syncs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from serve import claim_stdout, fill, fresh, scramble, serve, timed

from tierkv import Tier
from tierkv.control_plane.index import PrefixIndex
from tierkv.control_plane.planner import Planner
from tierkv.identity.keys import key_array
from tierkv.storage.arena import HostArena
from tierkv.storage.format import slot_bytes
from tierkv.storage.ssd import PageInfo, PageWrite, ReadStatus, SsdTier, WriteStatus

NAMESPACE = bytes(32)
_LAYERS = 32
_WAIT_S = 120.0
_ROOT = hashlib.sha256(b"root").digest()


class TierKVSide:
    """``count`` objects of ``size`` bytes, in memory and on disk."""

    def __init__(self, folder: str, count: int, size: int, io_threads: int) -> None:
        self._count, self._layer = count, max(4096, size // _LAYERS)
        self._source, self._target = fresh(count, size), fresh(count, size)
        fill(self._source)
        # Half for the host tier, half for what is read from disk.
        self._arena = HostArena(2 * count, size)
        self._arena.touch()
        self._index = PrefixIndex(4 * count + 1024)
        self._planner = Planner(self._index, slots={Tier.DEVICE: 1, Tier.HOST: count}, disk_pages=0)
        self._tier = SsdTier.open(
            Path(folder) / f"tierkv-{size}",
            capacity_bytes=slot_bytes(size) * count,
            slot_payload_bytes=size,
            max_queue_bytes=4 << 30,
            io_threads=io_threads,
        )
        self._keys: list[bytes] = []
        self._rows = np.empty(0, np.int32)

    def describe(self) -> dict[str, Any]:
        """Return what a reader must know."""
        return {"direct": self._tier.stats().direct}

    def renew(self, number: int) -> dict[str, Any]:
        """Forget everything, durably, and choose new keys."""
        if self._keys:
            self._planner.evict(Tier.HOST, self._rows)
            self._tier.delete(self._keys)
            assert self._tier.flush().ok, "the flush failed"
        self._keys = [
            hashlib.sha256(f"{number}/{page}".encode()).digest() for page in range(self._count)
        ]
        return {}

    def host_put(self) -> dict[str, Any]:
        """Copy every object into the host tier."""
        result: dict[str, Any] = {}
        pages, numbers = list(self._source), np.arange(1, self._count + 1)
        with timed(result):
            slots = self._planner.take(Tier.HOST, self._count)
            assert slots is not None
            self._arena.save(slots, pages)
            self._rows = self._index.insert(
                key_array(self._keys),
                key_array([_ROOT, *self._keys[:-1]]),
                group=0,
                end_tokens=numbers * 256,
                num_tokens=np.full(self._count, 256),
                flags=np.zeros(self._count, np.uint8),
            )
            self._planner.install(Tier.HOST, self._rows, slots)
        return result

    def host_get(self) -> dict[str, Any]:
        """Copy every object out of the host tier, by key."""
        result: dict[str, Any] = {}
        pages = list(self._target)
        for page in pages:
            scramble(page)
        with timed(result):
            rows = self._index.find(key_array(self._keys), within=1 << Tier.HOST)
            assert rows.min() >= 0
            self._arena.load(self._index.slot(rows, Tier.HOST).tolist(), pages)
            self._index.touch(rows)
        self._compare(self._target)
        return result

    def disk_put(self) -> dict[str, Any]:
        """Write every object of the host tier to disk until found there; then flush, timed too."""
        slots = self._index.slot(self._rows, Tier.HOST).tolist()
        before, result = self._syncs(), {}
        with timed(result, "durable_seconds"):
            with timed(result):
                ticket = self._tier.put(
                    [
                        PageWrite(PageInfo(key, NAMESPACE), self._arena.slot(slot), self._layer)
                        for key, slot in zip(self._keys, slots, strict=True)
                    ]
                )
                statuses = ticket.wait(_WAIT_S)
            report = self._tier.flush()
        assert report.ok, "the flush failed"
        assert statuses == [WriteStatus.WRITTEN] * self._count, "a write failed"
        result["syncs"] = self._syncs() - before
        return result

    def disk_get(self, warm: bool = False) -> dict[str, Any]:
        """Read every object from disk into host memory, checked; the page cache is not used."""
        result: dict[str, Any] = {}
        slots = range(self._count, 2 * self._count)
        pages = [self._arena.slot(slot) for slot in slots]
        for page in pages:
            scramble(page)
        with timed(result):
            statuses = self._tier.read(self._keys, pages, namespace=NAMESPACE)
        assert statuses == [ReadStatus.HIT] * self._count, "a read failed"
        self._compare(pages)
        return result

    def close(self) -> dict[str, Any]:
        """Check and close everything."""
        self._planner.check()
        self._arena.check()
        self._tier.check()
        self._tier.close()
        return {}

    def _compare(self, pages: Any) -> None:
        for page, right in zip(pages, self._source, strict=True):
            assert np.array_equal(page, right), "wrong bytes"

    def _syncs(self) -> int:
        stats = self._tier.stats()
        return stats.slab_syncs + stats.index_syncs


if __name__ == "__main__":
    out = claim_stdout()
    serve(TierKVSide(**json.loads(sys.argv[1])), out)
