"""What becomes of each page, and what an attached pool did so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from tierkv.stats import Found
from tierkv.tiers import Tier


class LoadResult(StrEnum):
    """What became of one page that was to be loaded into the engine's blocks."""

    LOADED = "loaded"
    MISSED = "missed"  # the lease has ended: nothing was copied
    FAILED = "failed"  # a copy failed: what the blocks hold is undefined
    LATE = "late"  # not over yet; ask again


class SaveResult(StrEnum):
    """What became of one page that was to be saved from the engine's blocks."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # held already, or being saved by another call: not copied
    NO_ROOM = "no_room"  # running transfers, leases and pins leave no room for it
    FAILED = "failed"  # a copy failed, or the save was cancelled: not kept
    LATE = "late"  # not over yet; ask again


def _by_tier() -> dict[str, int]:
    return dict.fromkeys((tier.label for tier in Tier), 0)


@dataclass(slots=True, kw_only=True)
class PoolCounters:
    """Mutable counters of an attached pool; changed under the store's lock only."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=_by_tier)
    pages_loaded: int = 0
    pages_missed: int = 0
    load_failures: int = 0
    pages_saved: int = 0
    pages_duplicate: int = 0
    pages_no_room: int = 0
    save_failures: int = 0
    leases_expired: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0

    def count_found(self, found: Found) -> None:
        """Add the tokens found by a query."""
        for tier in Tier:
            self.hit_tokens[tier.label] += getattr(found, tier.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A snapshot of an attached pool.

    Attributes:
        queries: calls of ``match``.
        query_tokens: tokens asked for, those that the engine held itself left out.
        hits: tokens promised, by the tier that held them.
        pages_loaded: pages copied into the engine's blocks.
        pages_missed: pages asked of a lease that had ended.
        load_failures: pages whose copy failed.
        pages_saved: pages that became visible.
        pages_duplicate: pages that were held already.
        pages_no_room: pages that host memory had no room for.
        save_failures: pages whose copy failed, or whose save was cancelled.
        leases: leases that hold now.
        leases_expired: leases that ended because their time was up.
        running: loads and saves that run now.
        bytes_loaded: bytes copied into the engine's blocks.
        bytes_saved: bytes copied out of them into pages that became visible.
    """

    queries: int
    query_tokens: int
    hits: Found
    pages_loaded: int
    pages_missed: int
    load_failures: int
    pages_saved: int
    pages_duplicate: int
    pages_no_room: int
    save_failures: int
    leases: int
    leases_expired: int
    running: int
    bytes_loaded: int
    bytes_saved: int

    @classmethod
    def of(cls, counters: PoolCounters, *, leases: int, running: int) -> PoolStats:
        """Return a snapshot of counters."""
        values = asdict(counters)
        hits = Found(**values.pop("hit_tokens"))
        return cls(hits=hits, leases=leases, running=running, **values)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)
