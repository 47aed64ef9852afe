"""LMCache's side: its LocalCPUBackend and LocalDiskBackend, used as its storage manager does.

Objects are allocated from its pool, filled, and put; from disk they are read into its pool by
``batched_get_blocking``, its concurrent way.  It syncs nothing: syncs are made here, and timed
apart.  Runs in an environment of its own that has no tierkv.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from serve import (
    claim_stdout,
    drop_from_page_cache,
    fill,
    fresh,
    scramble,
    serve,
    timed,
)

_MODEL = "meta-llama/Meta-Llama-3-8B"
_TOKENS, _LAYERS, _HEADS, _DIM = 256, 32, 8, 128
_WAIT_S = 120.0


class LMCacheSide:
    """``count`` objects of ``size`` bytes, in memory and on disk in one of its settings."""

    def __init__(self, folder: str, count: int, size: int, direct: bool) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        torch.set_num_threads(1)
        whole = 2 * _LAYERS * _TOKENS * _HEADS * _DIM * 2
        if size == whole:  # a whole object: K and V of all layers
            self._shape = torch.Size([2, _LAYERS, _TOKENS, _HEADS * _DIM])
            self._format = MemoryFormat.KV_2LTD
        else:  # layer-wise objects, one layer each
            tokens = size // (2 * _HEADS * _DIM * 2)
            self._shape = torch.Size([tokens, 2, _HEADS * _DIM])
            self._format = MemoryFormat.KV_T2D
        self._dtype = torch.bfloat16
        self._count = count
        self._direct = direct
        self._path = Path(folder) / f"lmcache-{'direct' if direct else 'default'}-{size}"
        # Room for what is kept and for what is read from disk.
        gigabytes = 2 * count * size / 2**30 + 0.0625
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=_TOKENS,
            local_cpu=True,
            max_local_cpu_size=gigabytes,
            local_disk=str(self._path),
            max_local_disk_size=gigabytes + 1.0,
            use_layerwise=size != whole,
            extra_config={"use_odirect": True} if direct else None,
        )
        metadata = LMCacheMetadata(
            model_name=_MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._dtype,
            kv_shape=(_LAYERS, 2, _TOKENS, _HEADS, _DIM),
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._cpu = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._cpu.memory_allocator.buffer.zero_()  # touched, as ours is
        self._disk = LocalDiskBackend(config, loop, self._cpu, dst_device="cpu", metadata=metadata)
        self._source, target = fresh(count, size), fresh(count, size)
        fill(self._source)
        self._target = target
        self._from = [self._tensor(page) for page in self._source]
        self._to = [self._tensor(page) for page in target]
        self._keys: list[Any] = []

    def describe(self) -> dict[str, Any]:
        """Return what a reader must know."""
        from importlib import metadata

        return {
            "lmcache": metadata.version("lmcache"),
            "torch": metadata.version("torch"),
            "direct": self._disk.use_odirect,
        }

    def renew(self, number: int) -> dict[str, Any]:
        """Forget everything, files included, and choose new keys."""
        from lmcache.utils import CacheEngineKey

        for key in self._keys:
            self._cpu.remove(key)
            self._disk.remove(key)
        # What its own eviction does and ``remove`` leaves out: account for the room.
        self._disk.current_cache_size = 0.0
        self._keys = [
            CacheEngineKey(_MODEL, 1, 0, number * 1_000_003 + page, self._dtype)
            for page in range(self._count)
        ]
        return {}

    def host_put(self) -> dict[str, Any]:
        """Copy every object into its memory pool and put it into its hot cache."""
        result: dict[str, Any] = {}
        with timed(result):
            objects = self._cpu.batched_allocate(
                self._shape, self._dtype, self._count, self._format
            )
            for held, page in zip(objects, self._from, strict=True):
                held.tensor.copy_(page)
            self._cpu.batched_submit_put_task(self._keys, objects)
            for held in objects:
                held.ref_count_down()
        return result

    def host_get(self) -> dict[str, Any]:
        """Copy every object out of its hot cache."""
        result: dict[str, Any] = {}
        for page in self._target:
            scramble(page)
        with timed(result):
            for key, page in zip(self._keys, self._to, strict=True):
                held = self._cpu.get_blocking(key)
                page.copy_(held.tensor)
                held.ref_count_down()
        assert np.array_equal(self._target, self._source), "wrong bytes"
        return result

    def disk_put(self) -> dict[str, Any]:
        """Write every object of its hot cache to disk; then sync files and folder, timed apart."""
        result: dict[str, Any] = {}
        objects = [self._cpu.get_blocking(key) for key in self._keys]
        left, done = threading.Semaphore(0), 0
        with timed(result, "durable_seconds"):
            with timed(result):
                self._disk.batched_submit_put_task(
                    self._keys, objects, on_complete_callback=lambda _: left.release()
                )
                while done < self._count:
                    assert left.acquire(timeout=_WAIT_S), "a write did not end"
                    done += 1
            for path in [*self._files(), self._path]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        for held in objects:
            held.ref_count_down()
        result["syncs"] = 0
        return result

    def disk_get(self, warm: bool = False) -> dict[str, Any]:
        """Read every object from disk into its memory pool.

        Args:
            warm: from the page cache, which has been filled by reading all files; else the
                page cache has dropped them (with O_DIRECT it never had them).
        """
        result: dict[str, Any] = {}
        for path in self._files():
            drop_from_page_cache(str(path), sync=True)
            if warm:
                path.read_bytes()
        with timed(result):
            objects = self._disk.batched_get_blocking(self._keys)
        for held, right in zip(objects, self._source, strict=True):
            assert held is not None, "a read failed"
            page = np.frombuffer(held.byte_array, np.uint8)
            assert np.array_equal(page, right), "wrong bytes"
            scramble(page)
            held.ref_count_down()
        return result

    def close(self) -> dict[str, Any]:
        """Remove the files; its threads end with the process."""
        self.renew(-1)
        return {}

    def _files(self) -> list[Path]:
        return [Path(self._disk.dict[key].path) for key in self._keys]

    def _tensor(self, page: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(page).view(self._dtype).view(self._shape)


if __name__ == "__main__":
    out = claim_stdout()
    serve(LMCacheSide(**json.loads(sys.argv[1])), out)
    os._exit(0)  # it has threads that are no daemons
