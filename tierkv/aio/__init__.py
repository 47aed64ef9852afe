"""tierkv for asyncio: the same store, its waiting calls awaited.

:class:`AsyncStore` and what it gives out here; for models of Transformers,
``from tierkv.aio.transformers import AsyncTierKV``.  docs/async.md says what may be
cancelled when.
"""

from __future__ import annotations

from tierkv.aio.pool import AsyncPool
from tierkv.aio.sequence import AsyncLayer, AsyncSequence
from tierkv.aio.store import AsyncStore
from tierkv.aio.workers import Workers, WorkersStats

__all__ = ["AsyncLayer", "AsyncPool", "AsyncSequence", "AsyncStore", "Workers", "WorkersStats"]
