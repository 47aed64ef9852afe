"""What loading and computing cost: a model of each link and of the forward pass.

Both are kept up to date from what is observed while the store runs.  The caller serialises
access (the store's lock).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.control_plane._affine import AffineFit
from tierkv.errors import InvalidInputError
from tierkv.tiers import Tier

# Where nothing was measured yet: seconds an operation and bytes a second, on the cautious
# side of present hardware.
_FIRST_GUESS = {
    Tier.DEVICE: (5e-6, 100e9),
    Tier.HOST: (15e-6, 20e9),
    Tier.DISK: (100e-6, 3e9),
    Tier.REMOTE: (1e-3, 1e9),
}
_LATENCY_SCALE_S = 1e-6  # of a link said to have no latency
_BYTE_SCALE_S = 1e-12  # of a link said to have no limit
_FORWARD_SCALE_S = 1e-3
# A forward over fewer tokens waits for memory: it says little about the rate.
LEAST_TOKENS = 16


class Link:
    """The time of a transfer, ``t(n) = alpha + n / beta`` an operation or batch.

    Args:
        alpha_s: seconds an operation, to begin with.
        bytes_per_s: beta, to begin with; may be infinite.

    Raises:
        InvalidInputError: a negative latency, or a bandwidth that is not positive.
    """

    __slots__ = ("_fit",)

    def __init__(self, alpha_s: float, bytes_per_s: float) -> None:
        if not (0 <= alpha_s < math.inf and bytes_per_s > 0):
            raise InvalidInputError(
                "a link has a latency of 0 or more seconds and a positive bandwidth in bytes a "
                f"second, got {alpha_s=}, {bytes_per_s=}"
            )
        slope = 1 / bytes_per_s
        self._fit = AffineFit(
            constant=alpha_s,
            slope=slope,
            constant_scale=alpha_s or _LATENCY_SCALE_S,
            slope_scale=slope or _BYTE_SCALE_S,
        )

    @property
    def alpha_s(self) -> float:
        """Seconds an operation; never negative."""
        return self._fit.constant

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth beta; always positive."""
        return 1 / self._fit.slope if self._fit.slope > 0 else math.inf

    @property
    def s_per_byte(self) -> float:
        """Seconds a byte, ``1 / beta``."""
        return self._fit.slope

    @property
    def observations(self) -> int:
        """Observations so far."""
        return self._fit.observations

    def seconds(self, nbytes: float, *, ops: float = 1) -> float:
        """Return what a transfer of ``nbytes`` bytes in ``ops`` operations takes."""
        return ops * self._fit.constant + nbytes * self._fit.slope

    def observe(self, *, nbytes: int, seconds: float, ops: int = 1) -> None:
        """Learn what one transfer took.

        Args:
            nbytes: bytes moved, all operations together.
            seconds: time that the link was busy with it; one that is not positive and finite
                is counted as ignored.
            ops: operations (or batches) that paid the latency.
        """
        self._fit.observe(count=ops, amount=nbytes, seconds=seconds)

    def stats(self) -> dict[str, float]:
        """Return the present estimate and what it rests on."""
        return {
            "alpha_s": self.alpha_s,
            "bytes_per_s": self.bytes_per_s,
            "observations": self._fit.observations,
            "surprises": self._fit.surprises,
            "ignored": self._fit.ignored,
        }


class ComputeCost:
    """The time of a forward pass over new tokens after a past.

    FLOPs of a causal forward from nothing: ``F(p) = 2*P*p + 2*L*H*d*p**2`` (P active
    parameters without embeddings, L layers of H query heads of dimension d), which is 2 a
    parameter and token, and 4*H*d a layer and pair of query and key, of which there are
    ``p**2 / 2``.  New tokens after a past cost the difference ``F(past + new) - F(past)``.
    A sliding layer's queries see at most ``window`` keys.

    Seconds are a constant a forward pass plus FLOPs over the rate reached; unknown until the
    first observation, unless the rate is given.  Make it with :meth:`from_model`.
    """

    __slots__ = ("_fit", "_linear", "_pairs", "_sliding_pairs", "_window")

    def __init__(
        self, linear: float, pairs: float, *, sliding_pairs: float = 0.0, window: int = 0
    ) -> None:
        if not (linear > 0 and pairs >= 0 and sliding_pairs >= 0 and window >= 0):
            raise InvalidInputError(
                "a forward pass costs FLOPs: give a positive number of parameters and layers, "
                f"heads, dimensions and a window that are not negative, got {linear=}, {pairs=}, "
                f"{sliding_pairs=}, {window=}"
            )
        self._linear = linear  # FLOPs a token
        self._pairs = pairs  # FLOPs a pair of query and key, full layers together
        self._sliding_pairs = sliding_pairs
        self._window = window
        self._fit: AffineFit | None = None

    @classmethod
    def from_model(
        cls,
        params: int,
        layers: int,
        heads: int,
        head_dim: int,
        *,
        sliding_layers: int = 0,
        window: int | None = None,
        flops_per_s: float | None = None,
        forward_s: float = 0.0,
    ) -> ComputeCost:
        """Return the cost of a decoder's forward pass.

        Args:
            params: parameters that a token uses, without the embedding.
            layers: layers with attention, the sliding ones included.
            heads: query heads.
            head_dim: dimension of a head.
            sliding_layers: how many of the layers are sliding.
            window: tokens that those attend to.
            flops_per_s: the rate reached, where it is known beforehand.
            forward_s: constant time of a forward pass, likewise.

        Raises:
            InvalidInputError: numbers that no model has.
        """
        if not 0 <= sliding_layers <= layers or (sliding_layers > 0 and not window):
            raise InvalidInputError(
                f"{sliding_layers} sliding layers of {layers} with window={window}: at most all "
                "layers are sliding, and those need a window"
            )
        pair = 4.0 * heads * head_dim
        cost = cls(
            2.0 * params,
            (layers - sliding_layers) * pair,
            sliding_pairs=sliding_layers * pair,
            window=window or 0,
        )
        if flops_per_s is not None:
            if not (flops_per_s > 0 and forward_s >= 0):
                raise InvalidInputError(
                    f"a forward pass takes time: got {flops_per_s=}, {forward_s=}"
                )
            cost._begin(1 / flops_per_s, forward_s)
        return cost

    @property
    def known(self) -> bool:
        """Whether there is a rate to go by."""
        return self._fit is not None

    @property
    def flops_per_s(self) -> float:
        """Rate reached; 0 while unknown."""
        if self._fit is None:
            return 0.0
        return 1 / self._fit.slope if self._fit.slope > 0 else math.inf

    @property
    def forward_s(self) -> float:
        """Constant time of a forward pass."""
        return self._fit.constant if self._fit is not None else 0.0

    def flops(self, new: float, past: float = 0) -> float:
        """Return the FLOPs of a causal forward over ``new`` tokens after ``past``."""
        end = past + new
        total = self._linear * new + self._pairs * (end * end - past * past) / 2
        if self._sliding_pairs:
            total += self._sliding_pairs * (self._windowed(end) - self._windowed(past))
        return total

    def seconds(self, new: float, past: float = 0) -> float:
        """Return what such a forward takes; 0 for no tokens.

        Raises:
            InvalidInputError: the rate is not known yet.
        """
        return self.predictor()(new, past)

    def predictor(self) -> Callable[[float, float], float]:
        """Return :meth:`seconds` of (new, past) as it is now: a function that never changes.

        Raises:
            InvalidInputError: the rate is not known yet.
        """
        if self._fit is None:
            raise InvalidInputError(
                "the time of a forward pass is unknown: observe one, or give flops_per_s"
            )
        each, rate = self._fit.constant, self._fit.slope
        linear, half_pairs = self._linear * rate, self._pairs * rate / 2
        sliding = self._sliding_pairs * rate

        def seconds(new: float, past: float) -> float:
            if new <= 0:
                return 0.0
            time = each + new * (linear + half_pairs * (new + 2 * past))
            if sliding:
                time += sliding * (self._windowed(past + new) - self._windowed(past))
            return time

        return seconds

    def observe(self, *, new: int, past: int, seconds: float) -> None:
        """Learn what a forward took that waited for no loads.

        Steps of fewer than ``LEAST_TOKENS`` new tokens are counted as ignored.
        """
        if self._fit is None:
            usable = new >= LEAST_TOKENS and past >= 0 and 0 < seconds < math.inf
            if not usable:
                return
            self._begin(seconds / self.flops(new, past), 0.0)
            assert self._fit is not None
        amount = self.flops(new, past) if new >= LEAST_TOKENS and past >= 0 else math.nan
        self._fit.observe(count=1, amount=amount, seconds=seconds)

    def stats(self) -> dict[str, float]:
        """Return the present estimate and what it rests on."""
        fit = self._fit
        return {
            "flops_per_s": self.flops_per_s,
            "forward_s": self.forward_s,
            "observations": 0 if fit is None else fit.observations,
            "surprises": 0 if fit is None else fit.surprises,
            "ignored": 0 if fit is None else fit.ignored,
        }

    def _begin(self, slope: float, forward_s: float) -> None:
        self._fit = AffineFit(
            constant=forward_s,
            slope=slope,
            constant_scale=forward_s or _FORWARD_SCALE_S,
            slope_scale=slope or _BYTE_SCALE_S,
        )

    def _windowed(self, tokens: float) -> float:
        """Return the pairs of query and key of the first ``tokens`` queries of one layer."""
        near = min(tokens, self._window)
        return near * near / 2 + self._window * (tokens - near)


class Costs:
    """The links by the tier that is read, and the forward pass.

    ``DEVICE`` is a copy inside the device (a tail page that is appended to), ``HOST`` host to
    device, ``DISK`` disk to host, ``REMOTE`` remote to host.

    Args:
        compute: the model's forward pass; without it, everything found is loaded.
        links: instead of the first guesses.
    """

    __slots__ = ("compute", "links")

    def __init__(
        self, compute: ComputeCost | None = None, *, links: Mapping[Tier, Link] | None = None
    ) -> None:
        self.compute = compute
        self.links = {tier: Link(*_FIRST_GUESS[tier]) for tier in Tier} | dict(links or {})

    def stats(self) -> dict[str, Any]:
        """Return every estimate: by tier, and of ``compute`` (None without a model)."""
        links = {tier.label: link.stats() for tier, link in self.links.items()}
        return {**links, "compute": None if self.compute is None else self.compute.stats()}

    def check(self) -> None:
        """Raise AssertionError when an estimate is none."""
        for tier, link in self.links.items():
            assert 0 <= link.alpha_s < math.inf, f"{tier.label}: a latency of {link.alpha_s} s"
            assert link.bytes_per_s > 0, f"{tier.label}: {link.bytes_per_s} bytes a second"
        if self.compute is not None and self.compute.known:
            assert self.compute.flops_per_s > 0, "a forward pass that never ends"


def minimum_bandwidth(*, kv_bytes: float, flops: float, flops_per_s: float) -> float:
    """Return the bandwidth in bytes a second at which loading a prefix equals computing it.

    ``B = b_kv * p * G_eff / F(p)``: below it the prefix is better computed.  With its own
    count of FLOPs this is the minimum-bandwidth condition of Mooncake (Qin et al., FAST 2025).

    Args:
        kv_bytes: bytes of the whole prefix, ``b_kv * p``.
        flops: of computing it, ``F(p)``.
        flops_per_s: rate reached.
    """
    return kv_bytes * flops_per_s / flops
