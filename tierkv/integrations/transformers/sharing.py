"""Shares a device pool among the rows of a batch that do not fit into it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.control_plane.spilling import pages_needed
from tierkv.errors import SequenceTooLongError
from tierkv.units import format_bytes, suggest_bytes

if TYPE_CHECKING:
    from tierkv.store import Store


def share_pool(store: Store, totals: Sequence[int]) -> list[int | None]:
    """Return the most device pages that each row may take; None where all rows fit.

    Args:
        store: whose device pool it is.
        totals: tokens of each row in the end.

    Returns:
        Shares in proportion to what each row would take; what does not fit into its share a
        row keeps in host memory.
    """
    needed = [sum(pages_needed(store.spec, total)) for total in totals]
    there = store.stats().tiers["device"].capacity_pages
    if len(totals) == 1 or sum(needed) <= there:
        return [None] * len(totals)
    return [there * pages // sum(needed) for pages in needed]


def check_copies(store: Store, prompt: int, new_tokens: int, copies: int) -> None:
    """Refuse beams or samples of a prompt that the device pool cannot hold beside them.

    Raises:
        SequenceTooLongError: with the arithmetic.
    """
    groups, there = store.spec.groups, store.stats().tiers["device"].capacity_pages
    shared = pages_needed(store.spec, prompt + new_tokens)
    apart = sum(
        count if group.window is not None else count - (prompt - 1) // group.page_tokens
        for group, count in zip(groups, shared, strict=True)
    )
    needed = sum(shared) + (copies - 1) * apart
    if copies > 1 and needed > there:
        size = needed * store.spec.slot_bytes
        raise SequenceTooLongError(
            f"{copies} beams or samples of {prompt} + {new_tokens} tokens: they share the prompt's "
            f"pages and need {needed} of {format_bytes(store.spec.slot_bytes)}, but the device "
            f"pool has {there}, and only a sequence alone can be longer than the pool; give "
            f"device='{suggest_bytes(size)}' or more"
        )
