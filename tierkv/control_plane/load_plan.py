"""Load or compute: what of a prompt's reusable prefix to bring in, and what to compute.

Four ways to a prompt's first token, of which the quickest by the estimates of
:class:`~tierkv.control_plane.costs.Costs` is taken:

* load everything found and compute the rest;
* load a shorter prefix (such as what is in memory) and compute more;
* split: compute the first tokens while the pages after them load, then the rest.  A token
  costs the more to compute the later it comes, so the front is computed and the back loaded
  (Cake, Jin et al. 2024; KVPR, Jiang et al. 2024);
* compute everything.

Copies to the device run layer by layer beside the forward pass.  Pages from disk or remote are
read first, unless the caller can restart the forward with a shorter prefix: then reads are one
more lane of that pipeline.  What a split loads is read, then copied, and joined with its front
before the rest is computed.  A part of a run costs its share of the run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tierkv.control_plane._estimates import Estimates
from tierkv.control_plane._explain import explain
from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from tierkv.control_plane.costs import Costs
    from tierkv.tiers import Tier

_SAME = 1 - 1e-9  # times closer than this count as equal


class Decision(StrEnum):
    """What to do about a prompt's reusable prefix."""

    LOAD = "load"
    PARTIAL = "partial"
    SPLIT = "split"
    COMPUTE = "compute"


class Run(NamedTuple):
    """Tokens, one after the other, whose pages one tier holds.

    Attributes:
        end: where the run ends, in tokens; it begins where the one before ends.
        tier: the nearest tier that holds them.
        nbytes: bytes to move to the device, of all layer groups; 0 where they are there.
        ops: operations that this takes on each link.
    """

    end: int
    tier: Tier
    nbytes: int
    ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The reusable prefix of a prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        runs: where the prefix is, from its beginning; none when nothing was found.
        layers: layers of the model.
        unit: tokens of a page; the least common multiple where groups differ.
        stops: shorter lengths from which the prompt can be resumed, ascending; None for every
            multiple of ``unit``.  The whole prefix and nothing always can.

    Raises:
        InvalidInputError: numbers that describe no prefix.
    """

    prompt_tokens: int
    runs: Sequence[Run]
    layers: int
    unit: int
    stops: Sequence[int] | None = None

    def __post_init__(self) -> None:
        end = 0
        for run in self.runs:
            if run.end <= end or run.nbytes < 0 or run.ops < 0:
                raise InvalidInputError(
                    f"load plan: {run} follows a run that ends at {end}; ends must ascend, bytes "
                    "and operations not be negative"
                )
            end = run.end
        if end >= self.prompt_tokens or self.layers < 1 or self.unit < 1:
            raise InvalidInputError(
                f"load plan: a prefix of {end} tokens in a prompt of {self.prompt_tokens}, "
                f"{self.layers} layers, pages of {self.unit}: one token at least is left to "
                "compute, and layers and pages are not empty"
            )
        if self.stops and not 0 < self.stops[0] <= self.stops[-1] < end:
            raise InvalidInputError(
                f"load plan: lengths from {self.stops[0]} to {self.stops[-1]} to resume from, in a "
                f"prefix of {end} tokens: they ascend, and lie inside it"
            )

    @property
    def tokens(self) -> int:
        """Length of the whole prefix."""
        return self.runs[-1].end if self.runs else 0


class Alternative(NamedTuple):
    """One way to the first token.

    Attributes:
        decision: its kind.
        prefix_tokens: where the computation of the rest begins.
        front_tokens: computed before that, while the others load.
        seconds: predicted time to the first token; without the forward pass while that is
            unknown.
    """

    decision: Decision
    prefix_tokens: int
    front_tokens: int
    seconds: float

    @property
    def load_tokens(self) -> int:
        """Tokens whose state is loaded: from ``front_tokens`` to ``prefix_tokens``."""
        return self.prefix_tokens - self.front_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to load and what to compute.

    Attributes:
        chosen: the way taken.
        alternatives: the best of each kind that was weighed, the chosen one among them.
        reason: why, in a few words.
    """

    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    reason: str
    _estimates: Estimates = field(repr=False, compare=False)

    @property
    def decision(self) -> Decision:
        """What to do."""
        return self.chosen.decision

    @property
    def name(self) -> str:
        """The decision's name, for counters: ``load``, ``partial``, ``split``, ``compute``."""
        return self.chosen.decision.value

    @property
    def prefix_tokens(self) -> int:
        """Length of the prefix to resume from."""
        return self.chosen.prefix_tokens

    @property
    def front_tokens(self) -> int:
        """Tokens at the beginning that are computed although they were found."""
        return self.chosen.front_tokens

    @property
    def load_tokens(self) -> int:
        """Tokens to load: those from ``front_tokens`` to ``prefix_tokens``."""
        return self.chosen.load_tokens

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted time to the first token of each alternative, by name."""
        return {a.decision.value: a.seconds for a in self.alternatives}

    def explain(self) -> str:
        """Return the arithmetic in a few lines."""
        return explain(self, self._estimates)


def plan_load(
    prefix: Prefix,
    costs: Costs,
    *,
    restartable: bool = False,
    can_split: bool = False,
    measure: bool = False,
) -> LoadPlan:
    """Return the quickest way to a prompt's first token; of equal ones, the one loading most.

    Everything found is loaded while the time of a forward pass is unknown.  Looks at run ends
    and at the lengths where one lane overtakes another, not at every page.

    Args:
        prefix: what was found.
        costs: present estimates; read only.
        restartable: the caller can begin the forward again with a shorter prefix, so reads may
            run beside it.
        can_split: the caller can compute the front while the back loads.
        measure: load everything, since links that are avoided are not measured any more.
    """
    times = Estimates(prefix, costs, reads_overlap=restartable)
    found = prefix.tokens
    if not found:
        nothing = Alternative(Decision.COMPUTE, 0, 0, times.compute_s(prefix.prompt_tokens, 0))
        return _plan(nothing, (nothing,), "nothing was found", times)
    everything = Alternative(Decision.LOAD, found, 0, times.joined(found))
    if measure or not times.known:
        reason = "the time of a forward pass is not known yet"
        if measure:
            reason = "to measure what loading takes now"
        return _plan(everything, (everything,), reason, times)
    stops = range(prefix.unit, found, prefix.unit) if prefix.stops is None else prefix.stops
    ends = _stops_at([run.end for run in prefix.runs], stops)
    ways = [everything]
    part = _best(_partials(times, stops, ends, found))
    if part is not None:
        ways.append(part)
    if can_split:
        split = _best(_splits(times, stops, ends, found))
        if split is not None:
            ways.append(split)
    ways.append(Alternative(Decision.COMPUTE, 0, 0, times.compute_s(prefix.prompt_tokens, 0)))
    best = _best(iter(ways))
    assert best is not None
    return _plan(best, tuple(ways), "the quickest", times)


def _plan(
    chosen: Alternative, ways: tuple[Alternative, ...], reason: str, times: Estimates
) -> LoadPlan:
    return LoadPlan(chosen=chosen, alternatives=ways, reason=reason, _estimates=times)


def _best(ways: Iterator[Alternative]) -> Alternative | None:
    best = None
    for way in ways:
        if best is None:
            best = way
            continue
        quicker = way.seconds < best.seconds * _SAME
        as_quick = way.seconds * _SAME <= best.seconds
        if quicker or (as_quick and way.load_tokens > best.load_tokens):
            best = way
    return best


def _stops_at(lengths: Sequence[int], stops: Sequence[int]) -> set[int]:
    """Return the nearest lengths to resume from, at and around each of ``lengths``."""
    near: set[int] = set()
    for length in lengths:
        after = bisect_left(stops, length)
        if after < len(stops):
            near.add(stops[after])
            if stops[after] == length:
                continue
        if after:
            near.add(stops[after - 1])
    return near


def _partials(
    times: Estimates, stops: Sequence[int], ends: set[int], found: int
) -> Iterator[Alternative]:
    """Yield shorter prefixes, the best of them included.

    Between two run ends the time is concave as long as the same lane is the slowest: what is
    loaded grows linearly, and what is computed shrinks the faster the longer the prefix.  So
    the best length is at a run end or where another lane becomes the slowest.
    """
    lengths = set(ends)
    lengths.update(times.level(stops))
    if times.reads_overlap:
        lengths |= _stops_at(times.level_lanes(), stops)
    for length in lengths:
        if 0 < length < found:
            yield Alternative(Decision.PARTIAL, length, 0, times.joined(length))


def _splits(
    times: Estimates, stops: Sequence[int], ends: set[int], found: int
) -> Iterator[Alternative]:
    """Yield splits, the best of them included up to the rounding to pages.

    With x the best front of length p, and load and forward slopes s and c, the time changes
    with p by ``s(p) * c(x) / (c(x) + s(x)) - c(p)``.  It is least at a run end, or where s(x)
    drops at a run end passed by the front.  (Very long prompts over links slower than
    computing can have their best in between, less than a page's time lower.)
    """
    at_ends, best = times.split_at_ends(), math.inf
    prompt = times.prefix.prompt_tokens
    for length in sorted(
        {*ends, found} | _stops_at(times.split_turns(at_ends), stops), reverse=True
    ):
        if length <= times.prefix.unit or times.compute_s(prompt - length, length) > best:
            continue  # whatever its front
        for front in times.fronts(length, at_ends):
            way = Alternative(Decision.SPLIT, length, front, times.split(length, front))
            best = min(best, way.seconds)
            yield way
