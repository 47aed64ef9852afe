"""What the tierkv methods of the multi-turn benchmark share: budgets, and bytes written."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_turn_schedule import Workload

from tierkv import CacheSpec, CommitReport
from tierkv.storage.format import HEADER_BYTES
from tierkv.units import parse_bytes

TIER_METHODS = {"tierkv_host": "host", "tierkv_ssd": "disk", "tierkv_restart": "disk"}


@dataclass(kw_only=True)
class Served:
    """What a method did in one turn.

    Attributes:
        tokens: the ids generated.
        found: tokens of the prompt whose state was found, by tier.
        ttft_s: time to the first token; None where the state was handed over.
        rest_s: time from there to the last token.
        keep_s: time after the last token until the state is kept (and durable, on disk).
        written: bytes written to keep it.
    """

    tokens: list[int] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    ttft_s: float | None = None
    rest_s: float = 0.0
    keep_s: float = 0.0
    written: int = 0


def found_by_tier(holder: Any) -> dict[str, int]:
    """Return the tokens that a sequence or cache found, by tier."""
    return {tier: getattr(holder.found, tier) for tier in ("device", "host", "disk", "remote")}


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes of each tier; None to take what the workload needs.

    Attributes:
        device: the pool: one conversation and little more.
        host: host memory of ``tierkv_host``: all conversations.
        staging: host memory of the methods on disk: half a conversation, so that pages must
            come from disk.
        disk: all conversations.
    """

    device: str | None = None
    host: str | None = None
    staging: str | None = None
    disk: str | None = None

    def options(self, method: str, spec: CacheSpec, workload: Workload) -> dict[str, Any]:
        """Return the ``device``, ``host`` and ``disk`` arguments of a method's store."""
        pages = sum(group.pages_for(workload.longest) for group in spec.groups)
        spare = 4 * len(spec.groups)
        slot, everything = spec.slot_bytes, workload.clients * (pages + spare)
        device = self.device or (pages + spare) * slot
        if method == "tierkv_host":
            return {"device": device, "host": self.host or (everything + 16) * slot, "disk": None}
        # Slots of superseded tails are free again only after the next sync of the index.
        disk = self.disk or (everything * 5 // 4 + 64) * (slot + HEADER_BYTES)
        staging = self.staging or max(16, pages // 2) * slot
        return {"device": device, "host": staging, "disk": disk}


def describe(options: dict[str, Any]) -> dict[str, int]:
    """Return the budgets of a store in bytes."""
    return {
        name: 0 if value is None else parse_bytes(value, name=name)
        for name, value in options.items()
    }


class TierSide:
    """One open store, its counters across reopening, and the limit on what it writes."""

    def __init__(self, method: str, path: Path | None, open_: Callable[[], Any]) -> None:
        """Open the store.

        Args:
            method: one of ``TIER_METHODS``.
            path: the store's directory, None in memory.
            open_: opens it; the result has ``store`` and ``close()``.
        """
        self.method = method
        self.on_disk = path is not None
        self.reopen_s: list[float] = []
        self.payload = self.allowed = 0
        self._open = open_
        self._past: Counter[str] = Counter()  # of stores closed since
        self._seen: Counter[str] = Counter()  # at the end of the turn before
        self.handle = open_()

    @property
    def store(self) -> Any:
        """The open store."""
        return self.handle.store

    def begin_round(self, number: int) -> None:
        """Close the store and open it again, where the method is about that."""
        if self.method == "tierkv_restart" and number > 1:
            self._past = self._counts()
            self.store.check()
            self.handle.close()
            self.handle = None
            gc.collect()  # a new process would not have what the closed store still holds
            started = time.perf_counter()
            self.handle = self._open()
            self.reopen_s.append(time.perf_counter() - started)

    def keep(self, report: CommitReport, before: int, after: int) -> int:
        """Make a turn durable where the method has a disk; return the bytes it wrote.

        The headers of pages on disk are included, the index of the disk tier is not.

        Args:
            report: what the turn's commit said.
            before: tokens whose state was there before the turn.
            after: tokens whose state is there now.
        """
        allowed, payload, headers = self.check_bound(report, before, after), report.bytes, 0
        if self.on_disk:
            assert self.store.flush().ok, "the flush failed"
            # After each flush every page is on disk, so that evictions write nothing.
            now = self._counts()
            turn, self._seen = now - self._seen, now
            payload, headers = turn["bytes"], turn["pages"] * HEADER_BYTES
            assert payload <= allowed, f"{payload} bytes written, {allowed} allowed"
        self.payload += payload
        self.allowed += allowed
        return payload + headers

    def check_bound(self, report: CommitReport, before: int, after: int) -> int:
        """Assert that a commit published new pages once and a tail a group; return that limit."""
        groups = self.store.spec.groups
        new = {g.name: after // g.page_tokens - before // g.page_tokens for g in groups}
        tails = sum(1 for g in groups if after % g.page_tokens)
        assert report.pages <= sum(new.values()), f"{report} for {new} new pages"
        assert report.tail_pages <= tails, f"{report} for {tails} partial pages"
        limit = sum((new[g.name] + 1) * g.page_bytes for g in groups)
        assert report.bytes <= limit, f"{report} for {limit} bytes"
        return limit

    def held(self) -> dict[str, int]:
        """Return the bytes in use in each tier now."""
        return {name: tier.used_bytes for name, tier in self.store.stats().tiers.items()}

    def close(self) -> None:
        """Check and close the store."""
        self.store.check()
        self.handle.close()

    def _counts(self) -> Counter[str]:
        counters = self.store.stats().counters
        now = Counter(bytes=counters["bytes_in"]["disk"], pages=counters["demoted_to_disk"])
        return self._past + now
