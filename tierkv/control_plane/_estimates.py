"""The times that a load plan weighs, as they stand when it is made.

Reads, copies and the forward pass are lanes.  What a lane takes for the first p tokens is
linear in p inside a run of pages, so one look-up gives it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from tierkv.control_plane.pipeline import uniform_finish
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.control_plane.costs import Costs
    from tierkv.control_plane.load_plan import Prefix


class Estimates:
    """Predicted times for one prompt; later observations do not change them.

    Args:
        prefix: what was found.
        costs: the present costs.
        reads_overlap: reads run beside the forward pass, as the copies do.

    Attributes:
        known: whether the time of a forward pass is known.
        compute_s: seconds of a forward over (new, past) tokens; 0 while unknown.
        links: by tier (seconds an operation, seconds a byte).
    """

    __slots__ = (
        "_copies",
        "_loads",
        "_reads",
        "compute_s",
        "ends",
        "flops_per_s",
        "forward_s",
        "known",
        "links",
        "prefix",
        "reads_overlap",
    )

    def __init__(self, prefix: Prefix, costs: Costs, *, reads_overlap: bool) -> None:
        self.prefix = prefix
        self.reads_overlap = reads_overlap
        compute = costs.compute
        self.compute_s: Callable[[float, float], float] = _unknown
        self.flops_per_s = self.forward_s = 0.0
        self.known = compute is not None and compute.known
        if compute is not None and compute.known:
            self.compute_s = compute.predictor()
            self.flops_per_s, self.forward_s = compute.flops_per_s, compute.forward_s
        self.links = {t: (link.alpha_s, link.s_per_byte) for t, link in costs.links.items()}
        self.ends, self._reads, self._copies, self._loads = [0], [0.0], [0.0], [0.0]
        read = copied = 0.0
        for run in prefix.runs:
            alpha, per_byte = self.links[run.tier]
            seconds = run.ops * alpha + run.nbytes * per_byte
            if run.tier > Tier.HOST:
                read += seconds
                alpha, per_byte = self.links[Tier.HOST]
                seconds = run.ops * alpha + run.nbytes * per_byte
            copied += seconds
            self.ends.append(run.end)
            self._reads.append(read)
            self._copies.append(copied)
            self._loads.append(read + copied)

    def lanes(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of reads and of copies for the first ``tokens`` tokens."""
        i = bisect_left(self.ends, tokens)
        if not i:
            return 0.0, 0.0
        start, read, copied = self.ends[i - 1], self._reads[i - 1], self._copies[i - 1]
        share = (tokens - start) / (self.ends[i] - start)
        return (
            read + share * (self._reads[i] - read),
            copied + share * (self._copies[i] - copied),
        )

    def load_s(self, tokens: int) -> float:
        """Return the seconds of loading so many tokens, nothing overlapped."""
        i = bisect_left(self.ends, tokens)
        if not i:
            return 0.0
        start, before = self.ends[i - 1], self._loads[i - 1]
        return before + (tokens - start) * (self._loads[i] - before) / (self.ends[i] - start)

    def joined(self, tokens: int) -> float:
        """Return the time to the first token when a prefix is loaded, the rest computed."""
        read, copied = self.lanes(tokens)
        compute = self.compute_s(self.prefix.prompt_tokens - tokens, tokens)
        if self.reads_overlap:
            return uniform_finish((read, copied, compute), self.prefix.layers)
        return read + uniform_finish((copied, compute), self.prefix.layers)

    def split(self, tokens: int, front: int) -> float:
        """Return it when ``front`` tokens are computed while those up to ``tokens`` load."""
        load = self.load_s(tokens) - self.load_s(front)
        rest = self.compute_s(self.prefix.prompt_tokens - tokens, tokens)
        return max(self.compute_s(front, 0), load) + rest

    def level(self, stops: Sequence[int]) -> Sequence[int]:
        """Return the stops, two at most, around the length from which the load is slower.

        Slower than computing the rest; the load grows with the length, and the rest shrinks.
        """
        prompt, forward = self.prefix.prompt_tokens, self.compute_s
        loads = self._copies
        if self.reads_overlap:
            loads = [max(lanes) for lanes in zip(self._reads, self._copies, strict=True)]
        i = bisect_left(
            range(len(loads)),
            True,
            1,
            key=lambda i: loads[i] >= forward(prompt - self.ends[i], self.ends[i]),
        )
        if i == len(loads):
            return stops[-1:]
        # Inside the run each lane is linear.
        copies, reads = self._inside(self._copies, i), self._inside(self._reads, i)
        if not self.reads_overlap:
            reads = (0.0, 0.0)
        first = bisect_left(
            stops,
            True,
            bisect_left(stops, self.ends[i - 1]),
            bisect_left(stops, self.ends[i]),
            key=lambda p: (
                max(copies[0] + p * copies[1], reads[0] + p * reads[1]) >= forward(prompt - p, p)
            ),
        )
        return stops[max(0, first - 1) : first + 1]

    def _inside(self, lane: list[float], i: int) -> tuple[float, float]:
        """Return (a, b) of a lane's seconds, ``a + b * tokens``, inside a run."""
        start, before = self.ends[i - 1], lane[i - 1]
        slope = (lane[i] - before) / (self.ends[i] - start)
        return before - start * slope, slope

    def level_lanes(self) -> list[int]:
        """Return lengths inside runs at which the reads overtake the copies, or fall behind."""
        found = []
        for i in range(1, len(self.ends)):
            before = self._reads[i - 1] - self._copies[i - 1]
            after = self._reads[i] - self._copies[i]
            if before * after < 0:
                size = self.ends[i] - self.ends[i - 1]
                found.append(self.ends[i - 1] + int(size * before / (before - after)))
        return found

    def split_at_ends(self) -> list[float]:
        """Return, by run end x, the load for which x is the best front, in seconds.

        That is the load of x tokens and what computing them takes: they are not loaded, and
        what is loaded beyond them takes as long as they do.
        """
        forward = self.compute_s
        return [forward(x, 0) + load for x, load in zip(self.ends, self._loads, strict=True)]

    def split_turns(self, at_ends: Sequence[float]) -> list[int]:
        """Return the lengths whose best front ends where pages begin to load faster."""
        slopes = [0.0, *(self._inside(self._loads, i)[1] for i in range(1, len(self.ends)))]
        return [
            self._loaded_in(at_ends[i])
            for i in range(1, len(slopes) - 1)
            if slopes[i + 1] < slopes[i]
        ]

    def _loaded_in(self, seconds: float) -> int:
        """Return how many tokens are loaded after so long, nothing overlapped."""
        i = bisect_left(self._loads, seconds)
        if i >= len(self.ends):
            return self.ends[-1]
        if not i:
            return 0
        start, before = self.ends[i - 1], self._loads[i - 1]
        return start + int((self.ends[i] - start) * (seconds - before) / (self._loads[i] - before))

    def fronts(self, tokens: int, at_ends: Sequence[float]) -> range:
        """Return the whole pages, two at most, around the best front for a prefix.

        At the best front x of a prefix p, ``F(x) / G = load(x, p)``: what the left side takes
        grows with x, and the right side shrinks.

        Args:
            tokens: p.
            at_ends: what :meth:`split_at_ends` returned.
        """
        unit, whole = self.prefix.unit, self.load_s(tokens)
        fronts = range(unit, tokens, unit)
        i = bisect_left(at_ends, whole, 1, len(at_ends) - 1)
        base, slope = self._inside(self._loads, i)
        forward, level = self.compute_s, whole - base
        first = bisect_left(
            fronts,
            True,
            self.ends[i - 1] // unit,
            min(self.ends[i] // unit, len(fronts)),
            key=lambda x: forward(x, 0) + slope * x >= level,
        )
        return fronts[max(0, first - 1) : first + 1]


def _unknown(new: float, past: float) -> float:
    return 0.0
