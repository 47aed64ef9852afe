"""What a store did and holds: records that the CLI and metrics read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tierkv.tiers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Tokens of a prompt whose state was found, by the nearest tier that held it."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """Tokens found in all."""
        return self.device + self.host + self.disk + self.remote


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """What a commit made visible.

    Attributes:
        pages: full pages that became visible.
        tail_pages: partial pages saved at the end of a turn.
        shared: pages that were visible already, committed by somebody else.
        skipped: pages that could not be kept for want of room; they will be computed again.
        bytes: bytes of the new pages.
    """

    pages: int = 0
    tail_pages: int = 0
    shared: int = 0
    skipped: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier: what fits, what is there, what was found there."""

    capacity_bytes: int
    used_bytes: int
    capacity_pages: int
    pages: int
    pinned: int
    held: int
    hit_tokens: int
    bytes_in: int
    bytes_out: int


def _by_tier() -> dict[str, int]:
    return dict.fromkeys((tier.label for tier in Tier), 0)


def _plans() -> dict[str, int]:
    """Return a counter for each decision of the planner."""
    return dict.fromkeys(("load", "partial", "split", "compute"), 0)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Mutable counters of a store; changed under its lock only."""

    begins: int = 0
    prompt_tokens: int = 0
    found_tokens: dict[str, int] = field(default_factory=_by_tier)
    committed_pages: int = 0
    tail_pages: int = 0
    shared_pages: int = 0
    skipped_pages: int = 0
    superseded_pages: int = 0
    promoted_pages: int = 0
    demoted_to_host: int = 0
    demoted_to_disk: int = 0
    dropped_pages: int = 0
    delay_hits: int = 0
    announced_pages: int = 0
    prefetched_pages: int = 0
    gated_pages: int = 0
    disk_misses: int = 0
    disk_corrupt: int = 0
    disk_errors: int = 0
    disk_timeouts: int = 0
    write_failures: int = 0
    late_copies: int = 0
    spilled_pages: int = 0
    streamed_bytes: int = 0
    plans: dict[str, int] = field(default_factory=_plans)
    callback_errors: int = 0
    bytes_in: dict[str, int] = field(default_factory=_by_tier)
    bytes_out: dict[str, int] = field(default_factory=_by_tier)

    def count_streamed(self, nbytes: int) -> None:
        """Count bytes of spilled pages that passed from host memory to the device."""
        self.streamed_bytes += nbytes
        self.bytes_out[Tier.HOST.label] += nbytes
        self.bytes_in[Tier.DEVICE.label] += nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A snapshot of a store.

    Attributes:
        tiers: by tier name: ``device``, ``host``, ``disk``.
        counters: every counter by name.
        sequences: sequences running now.
        namespace: hex digest of the store's namespace.
        page_bytes: bytes of a slot.
    """

    tiers: dict[str, TierStats]
    counters: dict[str, Any]
    sequences: int
    namespace: str
    page_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReport:
    """What a flush made durable.

    Attributes:
        durable_pages: pages of this store that are on disk and synced now.
        written_pages: pages this flush wrote.
        failed_pages: committed pages that could not be written; they live in memory only.
        ok: every committed page is durable.
    """

    durable_pages: int
    written_pages: int
    failed_pages: int
    ok: bool
