"""Whether sequences fit into the device pool, and the arithmetic when they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import PoolExhaustedError, SequenceTooLongError
from tierkv.tiers import Tier
from tierkv.units import format_bytes, suggest_bytes

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core


def check_fits(core: Core, tokens: int) -> None:
    """Refuse a sequence that an empty device pool could not hold.

    Raises:
        SequenceTooLongError: with the arithmetic.
    """
    spec, slots = core.spec, core.pool.num_slots
    needed = spec.pages_for(tokens)
    if needed > slots:
        parts = " + ".join(
            f"{len(g.needed_pages(tokens))} of {g.name!r} ({g.page_tokens} tokens each)"
            for g in spec.groups
        )
        raise SequenceTooLongError(
            f"sequence of {tokens} tokens: needs {needed} pages ({parts}) of "
            f"{format_bytes(spec.slot_bytes)} = {format_bytes(needed * spec.slot_bytes)}, but the "
            f"device pool has {slots} ({format_bytes(slots * spec.slot_bytes)}); give "
            f"device='{suggest_bytes(needed * spec.slot_bytes)}' or more, or shorten the sequence"
        )


def no_room(core: Core, tokens: int, pages: int) -> PoolExhaustedError:
    """Return the error for a sequence that got no ``pages`` pages for ``tokens`` tokens in all.

    Raises:
        SequenceTooLongError: it would not fit into an empty pool either.
    """
    check_fits(core, tokens)
    with core.lock:
        free = core.planner.free(Tier.DEVICE)
    return PoolExhaustedError(
        f"device pool: {pages} more pages of {format_bytes(core.spec.slot_bytes)} are needed "
        f"for {tokens} tokens; of {core.pool.num_slots} pages {free} are free and the rest "
        "belong to running sequences and pins; finish some, or give the pool a larger budget"
    )
