"""What a tier says of itself: its statistics, and the proof that they add up."""

from __future__ import annotations

from tierkv.storage.core import Core
from tierkv.storage.counters import COUNTED, Counters, SsdStats
from tierkv.storage.reader import Reader
from tierkv.storage.writer import Writer

_LOOKS = 100


def collect_stats(core: Core, reader: Reader, writer: Writer | None) -> SsdStats:
    """Return state and counters; see ``SsdTier.stats``."""
    counts = core.catalog.counts()
    counted = core.counters.snapshot()
    unallocated = max(0, core.capacity_bytes - core.files.total_bytes) // core.slot_bytes
    return SsdStats(
        capacity_bytes=core.capacity_pages * core.slot_bytes,
        used_bytes=core.catalog.used_bytes,
        pages=len(core.catalog),
        page_bytes=core.catalog.page_bytes,
        free_slots=counts.free + unallocated,
        deferred_slots=counts.doomed + counts.deferred,
        writing_slots=counts.writing,
        slabs=len(core.catalog.slab_metas()),
        slab_bytes=core.files.total_bytes,
        direct=core.files.direct,
        read_only=writer is None or core.write_fault is not None,
        write_fault=core.write_fault,
        breaker="open" if core.breaker.is_open else "closed",
        clean_open=core.clean_open,
        recover_seconds=core.recover_seconds,
        recovered_pages=core.recovered_pages,
        queue_bytes=0 if writer is None else writer.queued_bytes,
        reads_in_flight=reader.in_flight,
        errors_by_kind={
            name.removeprefix("error_"): n
            for name, n in counted.items()
            if name.startswith("error_")
        },
        **{name: counted[name] for name in COUNTED},
    )


def check_tier(core: Core, reader: Reader, writer: Writer | None) -> None:
    """Prove that slots, pages, index and counters agree; see ``SsdTier.check``."""
    core.catalog.check()
    assert core.files.total_bytes <= core.capacity_bytes or writer is None, "over capacity"
    for attempt in range(_LOOKS):
        trouble = _disagreement(core, reader, writer)
        if trouble is None:
            break
        # Counters are read one after the other: others at work may move them in between.
        assert attempt < _LOOKS - 1, trouble
    if writer is not None and core.write_fault is None:
        mismatches = writer.count_mismatches()
        assert not mismatches, f"index and memory disagree about {mismatches} pages"


def _disagreement(core: Core, reader: Reader, writer: Writer | None) -> str | None:
    """Return what does not add up, None when all does."""
    stats = collect_stats(core, reader, writer)
    counts = core.catalog.counts()
    slots = sum(meta.slots for meta in core.catalog.slab_metas())
    if counts.total != slots:
        return f"slots: {counts} do not add up to {slots}"
    if counts.live != len(core.catalog):
        return "live slots and pages differ"
    outcomes = (
        stats.hits + stats.misses + stats.corrupt + stats.errors + stats.timeouts + stats.closed
    )
    if not stats.reads_in_flight and not reader.in_flight and stats.lookups != outcomes:
        return f"{stats.lookups} lookups, {outcomes} outcomes"
    return None


class Progress:
    """Whether a tier still writes, for those who wait for it."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen: tuple[int, ...] = ()

    def made(self) -> bool:
        """Return whether a write or a sync ended since the last call."""
        counted = self._counters.snapshot()
        names = ("device_bytes_written", "slab_syncs", "index_commits", "index_syncs")
        before, self._seen = self._seen, tuple(counted[name] for name in names)
        return before != self._seen
