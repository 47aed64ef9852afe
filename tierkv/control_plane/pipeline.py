"""How long a forward pass takes whose layers' state arrives while it runs.

One lane loads the layers in order, another computes them in order; a layer is computed
when it has been loaded and the layer before it has been computed.  All times in seconds.
The closed forms are those of layer-wise pre-loading in CachedAttention (Gao et al., USENIX
ATC 2024, section 3.2); the recursion is the flow shop of two machines behind them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tierkv.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when, from the moment at which load and forward were allowed to start.

    Attributes:
        loaded: by layer, when its state was there (0 for layers that were there before).
        computed: by layer, when it had been computed.
        load_s: what the loads took, added up.
        compute_s: what the computation took, added up.
    """

    loaded: tuple[float, ...]
    computed: tuple[float, ...]
    load_s: float
    compute_s: float

    @property
    def finish_s(self) -> float:
        """When the last layer had been computed."""
        return self.computed[-1] if self.computed else 0.0

    @property
    def stall_s(self) -> float:
        """Time in which the computation waited: the exposed part of the load."""
        return max(0.0, self.finish_s - self.compute_s)

    exposed_s = stall_s

    @property
    def hidden_s(self) -> float:
        """Load time that ran behind the computation."""
        return max(0.0, self.load_s - self.stall_s)


def run_layers(
    loads: Sequence[float],
    computes: Sequence[float],
    *,
    resident: int = 0,
    staging: int | None = None,
    look_ahead: int | None = None,
) -> Timeline:
    """Return the timeline by the event recursion.

    Layer i is loaded after the load before it, and computed at
    ``max(computed[i-1], loaded[i]) + computes[i]``.

    Args:
        loads: by layer; a layer with a load of 0 is resident and takes no buffer.
        computes: by layer.
        resident: the first layers, which are there already, whatever ``loads`` says.
        staging: buffers that loaded layers pass through: each is free again when its layer
            has been computed.  None for as many as there are layers.
        look_ahead: how many layers beyond the one being computed are loaded at most.

    Raises:
        InvalidInputError: lengths that differ, negative times, or no buffer at all.
    """
    loads, layers = _with_resident(loads, computes, resident), len(computes)
    if (staging is not None and staging < 1) or (look_ahead is not None and look_ahead < 0):
        raise InvalidInputError(
            f"a pipeline needs a staging buffer and no negative look-ahead, got {staging=}, "
            f"{look_ahead=}"
        )
    ahead = layers if look_ahead is None else look_ahead
    buffers = layers if staging is None else staging
    loaded: list[float] = []
    computed: list[float] = []
    in_buffers: list[int] = []  # the layers that were loaded, in order
    link_free = 0.0
    for i, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        arrival = 0.0
        if load > 0:
            start = link_free
            if i > ahead:  # layer i - ahead is reached when the one before it is done
                start = max(start, computed[i - ahead - 1])
            if len(in_buffers) >= buffers:
                start = max(start, computed[in_buffers[-buffers]])
            arrival = link_free = start + load
            in_buffers.append(i)
        loaded.append(arrival)
        computed.append(max(arrival, computed[-1] if computed else 0.0) + compute)
    return Timeline(tuple(loaded), tuple(computed), math.fsum(loads), math.fsum(computes))


def optimum(loads: Sequence[float], computes: Sequence[float], *, resident: int = 0) -> float:
    """Return the earliest finish: max over j of (loads up to j + computes from j on).

    Whatever the order of events, layer j is computed after all loads up to its own, and all
    computes from j on follow; loading without a pause reaches this bound.

    Raises:
        InvalidInputError: lengths that differ, or negative times.
    """
    loads = _with_resident(loads, computes, resident)
    ahead = list(accumulate(reversed(computes)))
    return max(map(sum, zip(accumulate(loads), reversed(ahead), strict=True)), default=0.0)


def no_overlap(loads: Sequence[float], computes: Sequence[float], *, resident: int = 0) -> float:
    """Return the finish when all is loaded before the first layer is computed.

    Raises:
        InvalidInputError: lengths that differ, or negative times.
    """
    return math.fsum(_with_resident(loads, computes, resident)) + math.fsum(computes)


def hidden_share(finish_s: float, loads: Sequence[float], computes: Sequence[float]) -> float:
    """Return which part of the time that can be hidden was hidden: 1 at the optimum.

    0 without any overlap, negative when it was slower than that; 1 when nothing can be hidden.
    """
    worst, best = no_overlap(loads, computes), optimum(loads, computes)
    return (worst - finish_s) / (worst - best) if worst > best else 1.0


def uniform_finish(lanes: Sequence[float], layers: int) -> float:
    """Return the finish of layers that pass through several lanes, all layers alike.

    Such as disk to host, host to device, compute.  With the times t of one layer in each
    lane: ``sum(t) + (layers - 1) * max(t)``, the makespan of equal jobs in a flow shop.
    For two lanes this is T(0) of :func:`preload_finish`.

    Args:
        lanes: time of all layers together, by lane.
        layers: number of layers.
    """
    slowest = max(lanes)
    return (sum(lanes) - slowest) / layers + slowest


def preload_finish(layers: int, load: float, compute: float, resident: int) -> float:
    """Return T(k), the finish when k of L equal layers are resident at the start.

    ``T(k) = max(L*c, (L-k)*l + c)``, for k = 0 also ``l + L*c``; ``T(L) = L*c``.
    The bubble is ``T(k) - L*c``.

    Args:
        layers: L.
        load: l, of one layer.
        compute: c, of one layer.
        resident: k, from 0 to L.
    """
    if resident >= layers:
        return layers * compute
    finish = max(layers * compute, (layers - resident) * load + compute)
    return finish if resident else max(finish, load + layers * compute)


def layers_to_preload(layers: int, load: float, compute: float) -> int:
    """Return k*, the fewest resident layers with which the computation never waits.

    ``k* = ceil(L - (L-1)*c/l)`` if ``l > c``, else 1 (and 0 when there is nothing to load).
    A buffer for them holds k* layers; its bytes tend to bandwidth times (time of the whole
    load - time of the whole computation) as L grows.
    """
    if load <= 0 or not layers:
        return 0
    if load <= compute:
        return 1
    # An exact quotient must not be rounded up by its last bit.
    return min(layers, math.ceil((layers - (layers - 1) * compute / load) * (1 - 1e-12)))


def overlap_limit(
    *,
    flops_per_token: float,
    kv_bytes_per_token: float,
    bytes_per_s: float,
    flops_per_s: float,
) -> float:
    """Return kappa_crit: reused tokens per new token up to which the load can be hidden.

    ``kappa_crit = (F_tok / b_kv) * (B / G_eff)``.  Below it the computation of the new tokens
    takes longer than the load, above it the time to the first token is about the load's.
    CachedAttention's condition T_load * L_hist <= T_pref * L_new is the same one.

    Args:
        flops_per_token: FLOPs of one new token, attention to the history included.
        kv_bytes_per_token: bytes to load for one token of the history.
        bytes_per_s: of the link.
        flops_per_s: reached in the forward pass.
    """
    return flops_per_token / kv_bytes_per_token * (bytes_per_s / flops_per_s)


def _with_resident(
    loads: Sequence[float], computes: Sequence[float], resident: int
) -> Sequence[float]:
    if len(loads) != len(computes) or not 0 <= resident <= len(loads):
        raise InvalidInputError(
            f"a pipeline of {len(loads)} loads, {len(computes)} computes and {resident} resident "
            "layers: give one load and one compute a layer, and at most all resident"
        )
    if min(loads, default=0) < 0 or min(computes, default=0) < 0:
        raise InvalidInputError("a pipeline's loads and computes must not be negative")
    return [0.0] * resident + list(loads[resident:]) if resident else loads
