"""Whether sequences fit into device pool and host tier, and the arithmetic when they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.control_plane.spilling import (
    can_spill,
    fits,
    longest_that_fits,
    pages_needed,
    pages_per_ring_slot,
)
from tierkv.errors import InvalidInputError, PoolExhaustedError, SequenceTooLongError
from tierkv.identity.keys import as_tokens
from tierkv.tiers import Tier
from tierkv.units import format_bytes, suggest_bytes

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.identity.keys import TokenArray


def check_prompt(
    core: Core, token_ids: Any, max_new_tokens: int, limit: int | None, device_pages: int | None
) -> TokenArray:
    """Return the ids of a prompt that a sequence can be begun with.

    Raises:
        InvalidInputError: it cannot; see :meth:`tierkv.Store.begin`.
    """
    if not core.pool.num_slots:
        raise InvalidInputError(
            "begin: the store was opened with device=None and has no device pool of its own; "
            "attach an engine's pool with attach_pool, or open it with a budget for device"
        )
    tokens = as_tokens(token_ids)
    if not len(tokens):
        raise InvalidInputError("begin: token_ids is empty; a sequence needs one token or more")
    if not isinstance(max_new_tokens, int) or not 0 <= max_new_tokens < 2**32:
        raise InvalidInputError(
            f"begin: max_new_tokens must be an integer >= 0, got {max_new_tokens!r}"
        )
    for name, value in (("limit", limit), ("device_pages", device_pages)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise InvalidInputError(f"begin: {name} must be an integer >= 0, got {value!r}")
    return tokens


def check_fits(core: Core, tokens: int, device_pages: int | None = None) -> None:
    """Refuse a sequence that an empty device pool and host tier could not hold.

    Args:
        core: the store's parts.
        tokens: tokens of the sequence in the end.
        device_pages: most pages of the pool that it may take.

    Raises:
        SequenceTooLongError: with the arithmetic.
    """
    spec, host = core.spec, core.planner.capacity(Tier.HOST)
    device = core.pool.num_slots
    if device_pages is not None:
        device = min(device, device_pages)
    if fits(spec, tokens, device=device, host=host):
        return
    pages = pages_needed(spec, tokens)
    needed = sum(pages)
    parts = " + ".join(
        f"{count} of {g.name!r} ({g.page_tokens} tokens each)"
        for g, count in zip(spec.groups, pages, strict=True)
    )
    rings = ", ".join(
        f"{pages_per_ring_slot(g)} of {g.name!r}" for g in spec.groups if can_spill(g)
    )
    spilling = (
        f"The host tier can keep {host} more ({format_bytes(host * spec.slot_bytes)}), each page "
        f"of the pool then streaming {rings}: that makes "
        f"{longest_that_fits(spec, device=device, host=host)} tokens in all"
        if rings
        else "No layer group has layers enough to stream its pages from host memory"
    )
    raise SequenceTooLongError(
        f"sequence of {tokens} tokens: needs {needed} pages ({parts}) of "
        f"{format_bytes(spec.slot_bytes)} = {format_bytes(needed * spec.slot_bytes)}, but the "
        f"device pool has {device} ({format_bytes(device * spec.slot_bytes)}). {spilling}. Give "
        f"device='{suggest_bytes(needed * spec.slot_bytes)}' or more"
        f"{', give a larger host=' if rings else ''}, or shorten the sequence"
    )


def no_room(core: Core, tokens: int, pages: int) -> PoolExhaustedError:
    """Return the error for a sequence that got no ``pages`` pages for ``tokens`` tokens in all.

    Raises:
        SequenceTooLongError: it would not fit into an empty pool and host tier either.
    """
    check_fits(core, tokens)
    with core.lock:
        free = core.planner.free(Tier.DEVICE)
    return PoolExhaustedError(
        f"device pool: {pages} more pages of {format_bytes(core.spec.slot_bytes)} are needed "
        f"for {tokens} tokens; of {core.pool.num_slots} pages {free} are free and the rest "
        "belong to running sequences and pins; finish some, or give the pool a larger budget"
    )
