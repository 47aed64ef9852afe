"""Reading every page at rest."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.columns import Location
from tierkv.storage.core import Core
from tierkv.storage.format import decode_record
from tierkv.storage.listing import list_records
from tierkv.storage.types import VerifyReport
from tierkv.storage.wanted import Wanted
from tierkv.storage.writer import Writer


def verify_core(
    core: Core,
    writer: Writer | None,
    *,
    repair: bool,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Check every page against its checksums; see ``SsdTier.verify``.

    Works beside readers and a writer: a page that goes away meanwhile is left out.
    """
    keys = core.catalog.keys()
    bad: list[bytes] = []
    unreadable = repaired = checked = 0
    buffer = aligned_empty(0)
    for number, key in enumerate(keys, 1):
        location, _ = core.catalog.pin(key, None)
        if location is not None:
            try:
                if buffer.nbytes < location.raw_bytes:
                    buffer = aligned_empty(location.raw_bytes)
                out = buffer[: location.raw_bytes]
                slab = core.catalog.slab(location.slab)
                fault = core.slot_io.read(slab, Wanted(key, None, location, out)).fault
            except OSError:
                unreadable += 1
                fault = None
            finally:
                core.catalog.unpin(location)
            checked += 1
            if fault is not None and _is_still_there(core, writer, key, location):
                bad.append(key)
                if repair and writer is not None:
                    repaired += writer.forget(key, location)
        if progress is not None:
            progress(number, len(keys))
    lost = _lost_pages(core)
    bad += lost
    return VerifyReport(
        pages=checked + len(lost),
        bad=len(bad),
        bad_keys=bad,
        unreadable=unreadable,
        repaired=repaired,
        index_mismatches=_index_mismatches(core, writer),
        damaged_slabs=_damaged_slabs(core),
        unknown_files=core.layout.files()[1],
    )


def _is_still_there(core: Core, writer: Writer | None, key: bytes, location: Location) -> bool:
    if writer is not None:
        return core.catalog.is_current(key, location)
    record = core.index.get(key)  # another process may have moved it
    return record is not None and record.seq == location.seq


def _index_mismatches(core: Core, writer: Writer | None) -> int:
    """Count records that do not check out, and pages that only one side knows."""
    if writer is not None:
        return writer.count_mismatches()
    return sum(decode_record(key, value) is None for key, value in core.index.records())


def _lost_pages(core: Core) -> list[bytes]:
    """Return the pages that the index still names in slabs whose files are not whole.

    Opening for writing has dropped them already, so there are none then.
    """
    lost = {slab.id for slab in core.files.meta.slabs if core.files.damage(slab) is not None}
    lost -= {slab.id for slab in core.catalog.slab_metas()}
    if not lost:
        return []
    return [r.info.key for r, _, _ in list_records(core.index) if r.slab in lost]


def _damaged_slabs(core: Core) -> list[str]:
    damages = ((slab.id, core.files.damage(slab)) for slab in core.files.meta.slabs)
    return [f"slabs/{number:04d} is {damage}" for number, damage in damages if damage is not None]
