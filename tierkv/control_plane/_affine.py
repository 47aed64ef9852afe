"""A running fit of ``seconds = constant * count + slope * amount``."""

from __future__ import annotations

import math

_KEEP = 1 - 1 / 32  # weight of what was learned before, at each new observation
_KEEP_AFTER_CHANGE = 0.5  # likewise when two observations in a row say that much has changed
_SURPRISE = 2.0  # how far an observation may be off and be believed at once
_DOUBTED = 1.5  # what counts of one that is off farther, unless the one before was off as well
_INERTIA = 0.25  # weight of the present values, in observations
_STEP = 2.0  # the slope at most doubles or halves at an observation
_LEAST_SLOPE = 1e-9  # of its scale
_MISFIT = 8.0  # how far a coefficient may be from its scale


class AffineFit:
    """Exponentially decayed least squares for two coefficients that are not negative.

    Observations are divided by ``constant_scale * count + slope_scale * amount``, so that
    small and large ones count alike, whatever they take.  What the observations leave open
    (all of one size) stays near what it was: the present values count as a quarter of an
    observation each.

    One observation that is off by more than a factor of two (the first touch of memory, a
    stall) counts as one and a half times what was expected, or that much less.  When the next
    one is off as well, it is believed, and what was learned before loses half its weight.

    Args:
        constant: seconds each, to begin with.
        slope: seconds a unit of amount, to begin with; may be 0.
        constant_scale: the size the constant usually has, positive.
        slope_scale: likewise of the slope.

    Attributes:
        constant: seconds each, never negative.
        slope: seconds a unit of amount; positive once something was observed.
        observations: those that were taken in.
        surprises: those that were off by more than a factor of two.
        ignored: those that cannot be one.
    """

    __slots__ = (
        "_before",
        "_scales",
        "_sums",
        "_values",
        "constant",
        "ignored",
        "observations",
        "slope",
        "surprises",
    )

    def __init__(
        self, *, constant: float, slope: float, constant_scale: float, slope_scale: float
    ) -> None:
        assert min(constant, slope) >= 0
        assert min(constant_scale, slope_scale) > 0
        self._scales = (constant_scale, slope_scale)
        self._values = (constant / constant_scale, slope / slope_scale)
        self.constant, self.slope = constant, slope
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of uu, uv, vv, uz, vz
        self._before = 1.0  # the last observation, as a multiple of what was expected
        self.observations = 0
        self.surprises = 0
        self.ignored = 0

    def observe(self, *, count: float, amount: float, seconds: float) -> None:
        """Learn from one observation; what cannot be one is counted as ignored."""
        measured = math.isfinite(count) and math.isfinite(amount) and math.isfinite(seconds)
        if not measured or seconds <= 0 or count < 0 or amount < 0 or count + amount <= 0:
            self.ignored += 1
            return
        self.observations += 1
        u, v = count * self._scales[0], amount * self._scales[1]
        scale = u + v
        u, v, z = u / scale, v / scale, seconds / scale
        expected = u * self._values[0] + v * self._values[1]
        if expected > 0:
            z, keep = self._believed(z / expected)
            z *= expected
        else:
            keep = _KEEP
        uu, uv, vv, uz, vz = (keep * total for total in self._sums)
        self._sums = (uu + u * u, uv + u * v, vv + v * v, uz + u * z, vz + v * z)
        self._values = self._solve()
        self._rescale()
        self.constant = self._values[0] * self._scales[0]
        self.slope = self._values[1] * self._scales[1]

    def _believed(self, ratio: float) -> tuple[float, float]:
        """Return what is made of an observation, as a multiple of what was expected.

        And the weight that what was learned before keeps.
        """
        before, self._before = self._before, ratio
        if 1 / _SURPRISE <= ratio <= _SURPRISE:
            return ratio, _KEEP
        self.surprises += 1
        # Two in a row are believed, the second at most twice as far off as the first.
        if ratio > 1:
            limit = before * _SURPRISE if before > _SURPRISE else _DOUBTED
            believed = min(ratio, limit)
        else:
            limit = before / _SURPRISE if before < 1 / _SURPRISE else 1 / _DOUBTED
            believed = max(ratio, limit)
        changed = not 1 / _SURPRISE <= believed <= _SURPRISE
        return believed, _KEEP_AFTER_CHANGE if changed else _KEEP

    def _solve(self) -> tuple[float, float]:
        """Return the best coefficients; each that would be negative is held at its bound."""
        uu, uv, vv, uz, vz = self._sums
        constant, slope = self._values
        uu, vv = uu + _INERTIA, vv + _INERTIA
        uz, vz = uz + _INERTIA * constant, vz + _INERTIA * slope
        # Inertia keeps the determinant away from 0.
        best = (uu * vz - uv * uz) / (uu * vv - uv * uv)
        low = slope / _STEP if slope > 0 else _LEAST_SLOPE
        high = slope * _STEP if slope > 0 else math.inf
        if uz < uv * best:  # the constant would be negative
            best = vz / vv
        best = max(min(max(best, low), high), _LEAST_SLOPE)
        return max(0.0, (uz - uv * best) / uu), best

    def _rescale(self) -> None:
        """Begin anew from the present values when a scale no longer tells small from large."""
        (constant, slope), (constant_scale, slope_scale) = self._values, self._scales
        if 1 / _MISFIT <= slope <= _MISFIT and constant <= _MISFIT:
            return
        if constant > _MISFIT:  # a constant may be next to nothing, and be so for good
            constant, constant_scale = 1.0, constant * constant_scale
        self._values, self._scales = (constant, 1.0), (constant_scale, slope * slope_scale)
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
