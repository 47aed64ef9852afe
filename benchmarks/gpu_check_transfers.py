"""Bandwidth between host and device by page size and method, against the peak of one plain copy.

What is copied is what a load copies: a range of ``size`` bytes out of each of many slots,
256 MiB in all.  The peak is one contiguous copy of as many bytes between the same memories.
Times are the host's, from the call to the end of the copies: what it costs to issue them
counts.  Both ways at once is the sum of both directions.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from gpu_check_kernels import pinned_memory
from gpu_check_support import KIB, LONG_S, MIB, Check, same_bits

from tierkv.devices.base import CopyOp
from tierkv.kernels.layer_copy import layer_copy

SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB, 8 * MIB, 32 * MIB)
TOTAL = 256 * MIB
SMALL_SIZES, SMALL_TOTAL = (64 * KIB, 256 * KIB), MIB
GOAL = 0.9  # from 1 MiB on, by the method that is chosen
BOTH_GOAL_GB_S = 83.0  # on PCIe 5
WAYS = ("to the device", "to the host", "both ways")


def run(check: Check) -> None:
    """Measure everything."""
    sizes, total = (SMALL_SIZES, SMALL_TOTAL) if check.small else (SIZES, TOTAL)
    bench = Transfers(check, total)
    peaks = {way: bench.peak(way) for way in WAYS}
    for way, seconds in peaks.items():
        check.row(f"plain contiguous copy, {way}", bench.rate(seconds, way), "GB/s")
    for method, why in bench.missing.items():
        check.row(f"method {method}", skipped=why)
    for size in sizes:
        for method in bench.methods:
            for way in WAYS:
                with check.guarded(f"{method} {size >> 10} KiB {way}"):
                    seconds = bench.measure(method, size, way)
                    goal = GOAL if method == "auto" and size >= MIB else None
                    rate, ratio = bench.rate(seconds, way), peaks[way] / seconds
                    more = {"method": method, "bytes": size, "way": way}
                    label = f"{method} {size >> 10} KiB {way}"
                    check.row(label, rate, "GB/s", ratio=ratio, goal=goal, **more)
        with check.guarded(f"bytes at {size >> 10} KiB"):
            check.row(f"bytes at {size >> 10} KiB", ok=bench.right(size))
    best = max(
        (r["value"] for r in check.rows if r.get("way") == "both ways" and r["method"] != "kernel"),
        default=0.0,
    )
    more = {} if check.small else {"goal": 1.0}
    check.row("both ways, best copies", best, "GB/s", ratio=best / BOTH_GOAL_GB_S, **more)
    bench.close()


class Transfers:
    """Host and device memory, twice: one for each direction, so that both can run at once."""

    def __init__(self, check: Check, total: int) -> None:
        self._check, self._total = check, total
        self._owner = check.open_device()
        self._devices = {}
        self.missing = self._without()
        for method in ("auto", "plain", "batch", "2d"):
            if method not in self.missing:
                self._devices[method] = check.open_device(method)
        self.methods = [*self._devices, "kernel"]
        # Slots of twice the range's size: ranges are not adjacent.
        self._host = [pinned_memory(self._owner, 2 * total) for _ in range(2)]
        self._device = [self._owner.allocate(2 * total // 4096, 4096).view(-1) for _ in range(2)]
        for memory in (self._host[0], self._device[1]):
            memory.copy_(torch.arange(2 * total // 8).view(torch.uint8))
        check.sync()

    def rate(self, seconds: float, way: str) -> float:
        """Return GB/s."""
        return self._total * (2 if way == "both ways" else 1) / seconds / 1e9

    def peak(self, way: str) -> float:
        """Return the seconds of plain contiguous copies."""
        pairs = [(t[: self._total], s[: self._total]) for t, s in self._pairs(way)]
        streams = [torch.cuda.Stream() if self._check.is_cuda else None for _ in pairs]

        def copy() -> None:
            for (target, source), stream in zip(pairs, streams, strict=True):
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    target.copy_(source, non_blocking=True)

        return self._check.wall_seconds(copy)

    def measure(self, method: str, size: int, way: str) -> float:
        """Return the seconds of a method's copies."""
        call = self._kernels(size, way) if method == "kernel" else self._copies(method, size, way)
        return self._check.wall_seconds(call)

    def right(self, size: int) -> bool:
        """Return whether all ranges arrived, by the way of one last load."""
        self._device[0].zero_()
        self._check.sync()
        self._copies("auto", size, WAYS[0])()
        self._check.sync()
        ours, theirs = (x.view(-1, 2 * size) for x in (self._device[0], self._host[0]))
        return same_bits(ours[:, :size], theirs[:, :size]) and not bool(ours[:, size:].any())

    def close(self) -> None:
        """Give everything back."""
        self._host.clear()
        self._device.clear()
        for device in (*self._devices.values(), self._owner):
            device.close()

    def _without(self) -> dict[str, str]:
        """Return the methods that this machine cannot do, and why."""
        if not self._check.is_cuda:
            return {}
        from tierkv.devices.cuda_driver import find_driver

        driver = find_driver()
        if driver is None:
            return dict.fromkeys(("batch", "2d"), "cuda-bindings is not installed")
        return {} if driver.has_batches else {"batch": "the driver is older than CUDA 12.8"}

    def _pairs(self, way: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (target, source), flat, of each direction."""
        down, up = (self._device[0], self._host[0]), (self._host[1], self._device[1])
        return {WAYS[0]: [down], WAYS[1]: [up], WAYS[2]: [down, up]}[way]

    def _copies(self, method: str, size: int, way: str):
        device = self._devices[method]
        work = []
        for name, (target, source) in zip(("load", "save"), self._pairs(way), strict=False):
            ops = [CopyOp(target.view(-1, 2 * size)[:, :size], source.view(-1, 2 * size)[:, :size])]
            work.append((device.stream(name), ops))

        def copy() -> None:
            for stream, ops in work:
                stream.copy(ops)
            events = [stream.record() for stream, _ in work]
            self._check.sync()  # quicker than asking events, which may rest in between
            assert all(event.wait(LONG_S) for event in events), "copies are late"

        return copy

    def _kernels(self, size: int, way: str):
        offsets = torch.arange(0, 2 * self._total, 2 * size, device=self._check.device)
        pairs = self._pairs(way)
        streams = [torch.cuda.Stream() if self._check.is_cuda else None for _ in pairs]
        self._check.sync()  # the offsets are there before other streams read them

        def copy() -> None:
            for (target, source), stream in zip(pairs, streams, strict=True):
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    layer_copy(source, target, offsets, offsets, nbytes=size)

        return copy
