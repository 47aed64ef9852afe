"""A load plan in words and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.control_plane._estimates import Estimates
    from tierkv.control_plane.load_plan import Alternative, LoadPlan

_LINKS = {
    Tier.DEVICE: "inside the device",
    Tier.HOST: "host to device",
    Tier.DISK: "disk to host",
    Tier.REMOTE: "remote to host",
}


def explain(plan: LoadPlan, times: Estimates) -> str:
    """Return what is where, what each link and the forward take, each way's time, the choice."""
    lines = [*_found(times), *_links(times)]
    if times.known:
        lines.append(
            f"forward: {_rate(times.flops_per_s, 'FLOP/s')} and {_time(times.forward_s)} a pass"
        )
    for way in plan.alternatives:
        mark = "*" if way == plan.chosen else " "
        lines.append(f"{mark} {way.decision.value:<8}{_time(way.seconds):>9}  {_way(way, times)}")
    lines.append(f"{plan.name}: {plan.reason}")
    return "\n".join(lines)


def _found(times: Estimates) -> Iterator[str]:
    prefix = times.prefix
    yield f"found {prefix.tokens} of {prefix.prompt_tokens} prompt tokens"
    start = 0
    for run in prefix.runs:
        moved = f"{_size(run.nbytes)} in {run.ops} operations" if run.nbytes else "nothing to move"
        yield f"  {start} to {run.end} on {run.tier.label}: {moved}"
        start = run.end


def _links(times: Estimates) -> Iterator[str]:
    """Yield a line for each link that would be used: bytes, bandwidth, latency, time."""
    for tier, (alpha, per_byte) in times.links.items():
        # Whatever is read from below passes through host memory.
        runs = [
            run
            for run in times.prefix.runs
            if run.tier is tier or (tier is Tier.HOST and run.tier > Tier.HOST)
        ]
        nbytes, ops = sum(run.nbytes for run in runs), sum(run.ops for run in runs)
        if nbytes or ops:
            rate = _rate(1 / per_byte, "B/s") if per_byte else "no limit"
            seconds = nbytes * per_byte + ops * alpha
            yield (
                f"{_LINKS[tier]}: {_size(nbytes)} at {rate} + {ops} x {_time(alpha)} "
                f"= {_time(seconds)}"
            )


def _way(way: Alternative, times: Estimates) -> str:
    """Return what a way does, each part with its time."""
    steps = []
    load = times.load_s(way.prefix_tokens) - times.load_s(way.front_tokens)
    if way.front_tokens:
        front = _time(times.compute_s(way.front_tokens, 0))
        steps.append(f"compute {way.front_tokens} in {front} while {way.load_tokens} load in")
        steps.append(f"{_time(load)}, then")
    elif way.load_tokens:
        read, copied = times.lanes(way.prefix_tokens)
        how = "read beside it" if times.reads_overlap else "read first"
        reads = f"{_time(read)}, {how}, and " if read else ""
        steps.append(f"load {way.load_tokens} in {reads}{_time(copied)} layer by layer,")
    rest = times.prefix.prompt_tokens - way.prefix_tokens
    if not times.known:
        steps.append(f"compute {rest} in an unknown time")
    else:
        steps.append(f"compute {rest} in {_time(times.compute_s(rest, way.prefix_tokens))}")
    return " ".join(steps)


def _size(nbytes: int) -> str:
    return _scaled(nbytes, "B")


def _rate(value: float, unit: str) -> str:
    return _scaled(value, unit)


def _scaled(value: float, unit: str) -> str:
    """Return a value with a decimal prefix and three significant digits."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{_digits(value / factor)} {letter}{unit}"
    return f"{_digits(value)} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{_digits(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} us" if seconds else "0 s"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
