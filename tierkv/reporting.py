"""What a store tells the outside: statistics, the live file, use counts on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierkv.errors import StoreError
from tierkv.identity.spec import ALIGNMENT
from tierkv.live import LIVE_NAME, PAGE_DTYPE, LiveFile
from tierkv.stats import StoreStats, TierStats
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.hints import Hints
    from tierkv.data_plane.core import Core

log = logging.getLogger(__name__)
_LIST_INTERVAL_S = 1.0
_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


class Reporter:
    """Publishes a store's statistics for other processes, and keeps use counts durable."""

    def __init__(self, core: Core, directory: Path | None) -> None:
        self._core = core
        memory_pages = core.pool.num_slots + core.planner.capacity(Tier.HOST)
        self._live: LiveFile | None = None
        if directory is not None:
            try:
                self._live = LiveFile.create(directory / LIVE_NAME, max_pages=memory_pages)
            except StoreError as error:  # nobody can watch then, but the store works
                log.warning("statistics are not published: %s", error)
        self._listed_at = float("-inf")
        self._usage_saved_s = int(core.wall_clock())

    def stats(self, sequences: int, hints: Hints) -> StoreStats:
        """Return a snapshot.  Call with the lock held."""
        core = self._core
        counters = asdict(core.counters)
        return StoreStats(
            tiers={tier.label: self._tier(tier, hints) for tier in _TIERS},
            counters=counters,
            sequences=sequences,
            namespace=core.namespace.digest.hex(),
            page_bytes=core.spec.slot_bytes,
        )

    def publish(self, stats: Callable[[], StoreStats], *, pages: bool = False) -> None:
        """Write statistics to the live file, and now and then the pages in memory.

        Args:
            stats: called for the snapshot, if anybody could read it.
            pages: write the list of pages as well, however recent the last one is.
        """
        core, published = self._core, self._live is not None
        snapshot = stats().as_dict() if published else {}
        with core.lock:
            if not published or self._live is None:  # or closed meanwhile
                return
            self._live.publish(snapshot)
            now = core.clock()
            if pages or now - self._listed_at >= _LIST_INTERVAL_S:
                self._listed_at = now
                self._live.publish_pages(self._pages_in_memory())

    def save_usage(self) -> None:
        """Give the disk tier the use counts of pages used since the last call."""
        core = self._core
        if core.disk is None:
            return
        with core.lock:
            index = core.index
            rows = index.select(within=(Tier.DISK,))
            rows = rows[index.used_s(rows) >= self._usage_saved_s]
            keys = [index.key(row) for row in rows.tolist()]
            hits, used = index.hits(rows).tolist(), index.used_s(rows).tolist()
            self._usage_saved_s = int(core.wall_clock())
        if keys:
            core.disk.record_usage(
                {key: (h, u) for key, h, u in zip(keys, hits, used, strict=True)}
            )

    def close(self) -> None:
        """Withdraw what was published."""
        with self._core.lock:
            live, self._live = self._live, None
        if live is not None:
            live.close()

    def _tier(self, tier: Tier, hints: Hints) -> TierStats:
        core, planner = self._core, self._core.planner
        pages = core.index.resident_count(tier)
        held = 0 if tier is Tier.DISK else planner.held(tier)
        # A slot on disk has a header in front of the page.
        size = core.spec.slot_bytes + (ALIGNMENT if tier is Tier.DISK else 0)
        counters = core.counters
        return TierStats(
            capacity_bytes=planner.capacity(tier) * size,
            used_bytes=(pages + held) * size,
            capacity_pages=planner.capacity(tier),
            pages=pages,
            pinned=hints.pinned(tier),
            held=held,
            hit_tokens=counters.found_tokens[tier.label],
            bytes_in=counters.bytes_in[tier.label],
            bytes_out=counters.bytes_out[tier.label],
        )

    def _pages_in_memory(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        index = self._core.index
        rows = index.select(within=(Tier.DEVICE, Tier.HOST))
        records = np.zeros(len(rows), PAGE_DTYPE)
        records["key"] = index.keys(rows).view("V32").reshape(-1)
        records["parent"] = np.frombuffer(
            b"".join(index.parent_key(row) for row in rows.tolist()), "V32"
        )
        records["end_token"] = index.end_token(rows)
        records["last_used_s"] = index.used_s(rows)
        records["created_s"] = index.used_s(rows)
        records["hits"] = index.hits(rows)
        records["num_tokens"] = index.num_tokens(rows)
        records["group"] = index.group(rows)
        records["flags"] = index.flags(rows)
        records["tiers"] = index.residency(rows)
        return records
