"""Asks the planner what of a found prefix to load, and keeps its estimates up to date."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.load_plan import Decision, LoadPlan, Prefix, Run, plan_load
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tierkv.control_plane.match import GroupMatch, Match
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Traffic


_MEASURE_EVERY = 16


class Planning:
    """Plans loads of one store.  Call with the store's lock held.

    Args:
        core: the store's parts.
        traffic: by the tier that is read, what its transfers took so far.
    """

    def __init__(self, core: Core, traffic: Mapping[Tier, Callable[[], Traffic]]) -> None:
        self._core = core
        self._traffic = dict(traffic)
        self._before = {tier: read() for tier, read in self._traffic.items()}
        self._avoided = 0  # plans in a row that left something found out

    def plan(
        self,
        found: Match,
        tiers: Mapping[int, Tier],
        prompt: int,
        *,
        restartable: bool,
        can_split: bool,
    ) -> LoadPlan:
        """Return what to do about a found prefix, and count the decision.

        Args:
            found: the pages.
            tiers: by row, the nearest tier that holds a page.
            prompt: tokens of the prompt.
            restartable: reads may run beside the forward pass.
            can_split: the caller can compute the front while the back loads.
        """
        self.observe()
        core, spec = self._core, self._core.spec
        unit = int(np.lcm.reduce([group.page_tokens for group in spec.groups]))
        windowed = not all(group.kind.needs_every_page for group in spec.groups)
        prefix = Prefix(
            prompt_tokens=prompt,
            runs=_runs(core, found, tiers),
            layers=len(spec.layer_to_group),
            unit=unit,
            # Windows of shorter prefixes may not be there.
            stops=() if windowed else None,
        )
        plan = plan_load(
            prefix,
            core.costs,
            restartable=restartable,
            can_split=can_split,
            measure=self._avoided >= _MEASURE_EVERY,
        )
        if found.tokens:
            core.counters.plans[plan.name] += 1
            avoids = plan.decision in (Decision.PARTIAL, Decision.COMPUTE)
            self._avoided = self._avoided + 1 if avoids else 0
        return plan

    def observe(self) -> None:
        """Take in what transfers took since the last call."""
        for tier, read in self._traffic.items():
            now, before = read(), self._before[tier]
            batches, nbytes = now.batches - before.batches, now.bytes - before.bytes
            seconds = now.seconds - before.seconds
            if batches > 0 and nbytes > 0 and seconds > 0:
                self._core.costs.links[tier].observe(nbytes=nbytes, seconds=seconds, ops=batches)
                self._before[tier] = now


def _runs(core: Core, found: Match, tiers: Mapping[int, Tier]) -> list[Run]:
    """Return where the prefix is, page by page of the anchor, joined by tier.

    The other groups' pages are moved with the anchor page that ends where they do or behind.
    """
    spec, anchor = core.spec, found.groups[core.spec.anchor]
    size = spec.groups[spec.anchor].page_tokens
    if not len(anchor.rows):
        return []
    moved = np.zeros(len(anchor.rows), np.int64)
    for number, group in enumerate(found.groups):
        moved += _bytes_to_move(core, number, group, tiers, anchor.first_page, len(moved))
    ends = np.minimum((anchor.first_page + 1 + np.arange(len(moved))) * size, found.tokens)
    places = np.asarray([tiers[row] for row in anchor.rows.tolist()])
    borders = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
    runs = []
    for start, stop in pairwise(borders):
        tier, nbytes = Tier(int(places[start])), int(moved[start:stop].sum())
        ops = _operations(core, tier) if nbytes else 0
        runs.append(Run(int(ends[stop - 1]), tier, nbytes, ops))
    return runs


def _operations(core: Core, tier: Tier) -> int:
    """Return the batches that moving a run takes: one a layer from memory, one read below."""
    return 1 if tier > Tier.HOST else len(core.spec.layer_to_group)


def _bytes_to_move(
    core: Core,
    number: int,
    group: GroupMatch,
    tiers: Mapping[int, Tier],
    first_page: int,
    pages: int,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return, by anchor page, the bytes of a group that are not on the device."""
    spec, moved = core.spec, np.zeros(pages, np.int64)
    size, anchor = spec.groups[number].page_tokens, spec.groups[spec.anchor].page_tokens
    for page, row in enumerate(group.rows.tolist(), start=group.first_page):
        if tiers[row] is not Tier.DEVICE:
            at = ((page + 1) * size - 1) // anchor - first_page
            moved[min(max(at, 0), pages - 1)] += spec.groups[number].page_bytes
    return moved
