"""Shares a device pool among the rows of a batch that do not fit into it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.control_plane.spilling import pages_needed

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
