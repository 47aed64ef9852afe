"""The hardware that the simulated device models: links with a latency and a rate, and FLOPs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from tierkv.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """Constants of a machine; times in seconds, rates in bytes (or operations) a second.

    A batch of n bytes takes ``alpha + n / bytes_per_s`` on its link, the usual model of one
    transfer.  Host to device and device to host are links of their own, so that both ways at
    once take no longer than one; the streams of one direction share its link.

    Attributes:
        name: for reports.
        h2d_alpha, h2d_bytes_per_s: host memory to device memory.
        d2h_alpha, d2h_bytes_per_s: device memory to host memory.
        d2d_alpha, d2d_bytes_per_s: inside the device's memory.
        nvme_alpha, nvme_read_bytes_per_s, nvme_write_bytes_per_s: the drive, one link.
        flops: floating-point operations a second that a model's layers reach.
    """

    name: str = "custom"
    h2d_alpha: float = 0.0
    h2d_bytes_per_s: float = 50e9
    d2h_alpha: float = 0.0
    d2h_bytes_per_s: float = 50e9
    d2d_alpha: float = 0.0
    d2d_bytes_per_s: float = 1.6e12
    nvme_alpha: float = 0.0
    nvme_read_bytes_per_s: float = 14e9
    nvme_write_bytes_per_s: float = 14e9
    flops: float = 495e12

    def __post_init__(self) -> None:
        for field in self.__slots__:
            value = getattr(self, field)
            least = 0.0 if field.endswith("alpha") else 1e-300
            if field != "name" and not least <= value < float("inf"):
                raise InvalidInputError(f"hardware model: {field} = {value} cannot be")

    def seconds(self, link: str, size: float) -> float:
        """Return what one batch of ``size`` bytes takes on a link of :data:`LINKS`."""
        alpha, rate = _CONSTANTS[link]
        return float(getattr(self, alpha) + size / getattr(self, rate))

    def compute_seconds(self, operations: float) -> float:
        """Return what so many floating-point operations take."""
        return operations / self.flops


_CONSTANTS = {
    "h2d": ("h2d_alpha", "h2d_bytes_per_s"),
    "d2h": ("d2h_alpha", "d2h_bytes_per_s"),
    "d2d": ("d2d_alpha", "d2d_bytes_per_s"),
    "read": ("nvme_alpha", "nvme_read_bytes_per_s"),
    "write": ("nvme_alpha", "nvme_write_bytes_per_s"),
}
LINKS = tuple(_CONSTANTS)

# An H100 on PCIe 5 x16 with one Gen5 NVMe drive.  50 GB/s each way is what has been measured
# there with 2 MB blocks, 14.5 us fits published points of small transfers, 495 TFLOPS are half
# of the dense bf16 peak.  Copies inside HBM3 read and write, so half of 3.35 TB/s; the drive's
# latency of 80 us and the launch of a copy inside the device, 3 us, are usual values.
H100_PCIE5 = HardwareModel(
    name="H100, PCIe 5, Gen5 NVMe",
    h2d_alpha=14.5e-6,
    h2d_bytes_per_s=50e9,
    d2h_alpha=14.5e-6,
    d2h_bytes_per_s=50e9,
    d2d_alpha=3e-6,
    d2d_bytes_per_s=1.67e12,
    nvme_alpha=80e-6,
    nvme_read_bytes_per_s=14e9,
    nvme_write_bytes_per_s=12e9,
    flops=495e12,
)


class LinkSchedule:
    """When a link is busy: each transfer takes the first gap that is long enough."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def book(self, ready: float, seconds: float, *, now: float) -> float:
        """Return when a transfer that is ready at ``ready`` starts, and keep its time.

        Args:
            ready: the earliest start, not before ``now``.
            seconds: how long it takes.
            now: nothing will be booked before that any more.
        """
        busy = self._busy
        first = 0
        while first < len(busy) and busy[first][1] <= now:
            first += 1
        del busy[:first]
        start = ready
        for begin, end in busy:
            if start + seconds <= begin:
                break
            start = max(start, end)
        at = bisect_left(busy, (start, start))
        if at and busy[at - 1][1] == start:  # goes on where another one ends
            busy[at - 1] = (busy[at - 1][0], start + seconds)
        else:
            busy.insert(at, (start, start + seconds))
        return start
