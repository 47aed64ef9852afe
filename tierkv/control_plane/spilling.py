"""How much of a sequence spills: which pages stay in host memory when the pool is too small.

Of a group that needs every page, the first ``s`` pages are kept in host memory and pass, layer
by layer, through a ring of device buffers.  A ring of depth ``R`` holds ``R`` layers' ranges
of every spilled page, so one pool slot of ``L`` layers serves ``L // R`` spilled pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.identity.spec import CacheSpec, LayerGroup

_DEEPEST = 3  # one layer in use, one arrived or arriving, one more to hide a late copy


def ring_depth(layers: int) -> int:
    """Return how many layers of a group a ring holds at once."""
    return max(1, min(_DEEPEST, layers // 2))


def pages_per_ring_slot(group: LayerGroup) -> int:
    """Return how many spilled pages one pool slot of a ring serves; 1 gains nothing."""
    layers = len(group.layers)
    return layers // ring_depth(layers)


def ring_slots(group: LayerGroup, spilled: int) -> int:
    """Return the pool slots that a ring for so many spilled pages takes."""
    return -(-spilled // pages_per_ring_slot(group))


def can_spill(group: LayerGroup) -> bool:
    """Return whether a group's pages can stay in host memory to the pool's gain."""
    return group.kind.needs_every_page and pages_per_ring_slot(group) > 1


def plan_spill(
    groups: Sequence[LayerGroup],
    pages: Sequence[int],
    *,
    fixed: int,
    device: int,
    host: int,
    spilled: Sequence[int] | None = None,
) -> list[int] | None:
    """Return the least number of pages to spill, by group; None when nothing is enough.

    Args:
        groups: the layer groups.
        pages: pages that each group needs, wherever they are; of groups that cannot spill
            they need the device.
        fixed: device slots wanted besides.
        device: device slots that the sequence can have in all.
        host: host slots that it can have for spilled pages in all.
        spilled: pages that are spilled already and stay so.
    """
    chosen = [0] * len(groups) if spilled is None else list(spilled)
    kept = [max(0, count - s) for count, s in zip(pages, chosen, strict=True)]

    def device_need() -> int:
        rings = sum(ring_slots(g, s) for g, s in zip(groups, chosen, strict=True) if s)
        return fixed + sum(kept) + rings

    # Spilling more never costs more slots than it frees (a ring slot serves two or more),
    # so the group with the most pages left gives first and the loop ends at the first fit.
    while device_need() > device:
        able = [i for i, g in enumerate(groups) if can_spill(g) and kept[i] > 0]
        if not able or sum(chosen) >= host:
            return None
        most = max(able, key=lambda i: (kept[i], -i))
        step = min(max(1, (device_need() - device) // 2), kept[most], host - sum(chosen))
        chosen[most] += step
        kept[most] -= step
    return chosen


def longest_that_fits(spec: CacheSpec, *, device: int, host: int) -> int:
    """Return the most tokens that an empty pool and host tier of so many slots could hold."""
    low, high = 0, 1
    while fits(spec, high, device=device, host=host):
        low, high = high, high * 2
        if high > 1 << 40:  # a window of bounded size has no longest sequence
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if fits(spec, middle, device=device, host=host) else (low, middle)
        )
    return low


def fits(spec: CacheSpec, tokens: int, *, device: int, host: int) -> bool:
    """Return whether a sequence of ``tokens`` fits into that many device and host slots."""
    pages = pages_needed(spec, tokens)
    return plan_spill(spec.groups, pages, fixed=0, device=device, host=host) is not None


def pages_needed(spec: CacheSpec, tokens: int) -> list[int]:
    """Return the most pages of each group that a step up to ``tokens`` tokens touches.

    Of a window, they are one more than resuming needs where the new token begins a page.
    """
    return [
        group.pages_for(tokens)
        if group.window is None
        else min(group.pages_for(tokens), (group.window - 2) // group.page_tokens + 2)
        for group in spec.groups
    ]
