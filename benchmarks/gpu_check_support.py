"""What the parts of the GPU check share: the device, time, and what they write down."""

from __future__ import annotations

import json
import math
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LONG_S = 30.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Check:
    """One part at work: on a GPU, or on the CPU as a rehearsal of the same code.

    Args:
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``.
        small: sizes that take a moment anywhere.
        out: the rows are appended to this file, one JSON object a line, as they come.
    """

    def __init__(self, device: str, *, small: bool, out: Path | None = None) -> None:
        self.is_cuda = device != "cpu"
        if self.is_cuda:
            index = torch.device(device).index
            torch.cuda.set_device(torch.cuda.current_device() if index is None else index)
            device = f"cuda:{torch.cuda.current_device()}"
        self.device = device
        self.small = small
        self.rows: list[dict] = []
        self._out = out

    def row(
        self,
        what: str,
        value: float | None = None,
        unit: str = "",
        *,
        ratio: float | None = None,
        goal: float | None = None,
        ok: bool | None = None,
        **more,
    ) -> None:
        """Write down one figure.

        Args:
            what: what was measured or compared.
            value: the figure.
            unit: its unit.
            ratio: to a limit of the same run; more is better.
            goal: what the ratio should reach.
            ok: whether a comparison came out right; None where nothing was compared.
            more: anything else worth keeping.
        """
        row = {"what": what, "value": value, "unit": unit, "ratio": ratio, "goal": goal, "ok": ok}
        row = {key: found for key, found in row.items() if found not in (None, "")} | more
        self.rows.append(row)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    @contextmanager
    def guarded(self, what: str):
        """Write an error of a ``with`` block down instead of ending the part.

        A broken GPU (such as after an illegal access) ends it all the same: nothing that
        follows would run.
        """
        try:
            yield
        except Exception as error:  # whatever it is, the figures that follow are still wanted
            self.row(what, ok=False, error=f"{type(error).__name__}: {error}"[:500])
            self.sync()

    def sync(self) -> None:
        """Wait for everything on the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, call, *, rounds: int = 5, repeat: int | None = None) -> float:
        """Return what a call takes on the device: the median of several rounds."""
        call()
        self.sync()
        if repeat is None:
            started = time.perf_counter()
            call()
            self.sync()
            once = max(time.perf_counter() - started, 1e-6)
            repeat = max(1, min(100, int(0.02 / once)))
        rounds = 1 if self.small else rounds
        return statistics.median(self._batch(call, repeat) / repeat for _ in range(rounds))

    def wall_seconds(self, call, *, rounds: int = 5) -> float:
        """Return what a call and all that it started take by the host's clock."""
        times = []
        for number in range(2 if self.small else rounds + 1):
            self.sync()
            started = time.perf_counter()
            call()
            self.sync()
            if number:  # the first one warms up
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def open_device(self, method: str = "auto"):
        """Return a new device of tierkv's."""
        if not self.is_cuda:
            from tierkv.devices.cpu import CpuDevice

            return CpuDevice()
        from tierkv.devices.cuda import CudaDevice

        return CudaDevice(self.device, method=method)

    def random(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """Return normally distributed numbers, the same on every device.

        Of many, the first million comes again and again: making more takes longer than all else.
        """
        made, size = torch.Generator().manual_seed(seed), math.prod(shape)
        block = torch.randn(min(size, 1 << 20), generator=made).to(dtype).to(self.device)
        return block.repeat(-(-size // block.numel()))[:size].view(shape)

    def _batch(self, call, repeat: int) -> float:
        if not self.is_cuda:
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            return time.perf_counter() - started
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeat):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes, wherever they lie."""
    return torch.equal(
        a.contiguous().cpu().view(torch.uint8), b.contiguous().cpu().view(torch.uint8)
    )
