"""Makes every committed page durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.stats import FlushReport
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Rows
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.storage.ssd import WriteTicket


def flush(core: Core, transfers: Transfers) -> FlushReport:
    """Write the pages that live only above the disk, parents first, and sync.

    Thread-safe; call without the lock.  Pages committed meanwhile may or may not be included.
    """
    if core.disk is None:
        with core.lock:
            alone = _only_above(core)
        return FlushReport(
            durable_pages=0, written_pages=0, failed_pages=len(alone), ok=not len(alone)
        )
    with core.lock:
        rows = _only_above(core)
        keys = [core.index.key(row) for row in rows.tolist()]
    last = write_pages(core, transfers, keys)
    if last is not None:
        last.wait(core.timeout_s)
    report = core.disk.flush(core.timeout_s)
    with core.lock:
        left = [row for row in core.find_rows(keys) if not core.is_in(row, Tier.DISK)]
        durable = core.index.resident_count(Tier.DISK)
    return FlushReport(
        durable_pages=durable if report.ok else 0,
        written_pages=len(keys) - len(left),
        failed_pages=len(left),
        ok=report.ok and not left,
    )


def write_pages(core: Core, transfers: Transfers, keys: list[bytes]) -> WriteTicket | None:
    """Start writing pages to disk that are not there; return the last batch's ticket.

    Thread-safe; call without the lock.  Waits only for the batch before the last one.
    """
    last: WriteTicket | None = None
    step = max(1, core.planner.capacity(Tier.HOST) // 4)
    for start in range(0, len(keys), step):
        ticket = _write_batch(core, transfers, keys[start : start + step])
        if ticket is not None:
            # One batch ahead keeps the disk busy while the next is copied to the host.
            if last is not None and last.wait(core.timeout_s) is None:
                return ticket  # the disk hangs: the rest stays where it is
            last = ticket
    return last


def _write_batch(core: Core, transfers: Transfers, keys: list[bytes]) -> WriteTicket | None:
    """Bring pages to host memory where they are not there, and start writing them."""
    with core.lock:
        found = core.find_rows(keys)
        rows = _array(
            [
                r
                for r in found
                if not core.is_in(r, Tier.DISK) and not transfers.writer.is_writing(r)
            ]
        )
        in_host = [row for row in rows.tolist() if core.is_in(row, Tier.HOST)]
        above = _array([row for row in rows.tolist() if row not in set(in_host)])
        core.index.pin(_array(in_host), Tier.HOST)
        core.index.pin(above, Tier.DEVICE)
    deadline = core.deadline()
    copied = transfers.copy_to_host(above, deadline) if len(above) else above
    left = above[len(copied) :]
    with core.lock:
        core.index.unpin(copied, Tier.DEVICE)
        ready = _array([*in_host, *copied.tolist()])
        transfers.begin_moves(Tier.HOST, len(ready))
        transfers.begin_moves(Tier.DEVICE, len(left))
    last = transfers.write_down(ready, then_evict=False) if len(ready) else None
    return transfers.spill(left, then_evict=False, deadline=deadline) or last


def _only_above(core: Core) -> Rows:
    """Return the pages that the disk does not hold, parents before children."""
    rows = core.index.select(within=(Tier.DEVICE, Tier.HOST), without=(Tier.DISK,))
    return rows[np.argsort(core.index.end_token(rows), kind="stable")]


def _array(rows: list[int]) -> Rows:
    return np.asarray(rows, np.int32)
