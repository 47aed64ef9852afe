"""A drive in virtual time in front of the real files of a store's disk tier.

The tier reads its files for the bytes only.  When a read counts as over is a matter of the
model: the reads of one request are handed over together, so the drive's latency counts once,
and they end one after the other at the drive's rate.  Whoever asks before that is told that
the read is not over; whoever waits moves the host's virtual clock.  The real read always
comes to its end first, so that nothing depends on how long it really takes.
"""

from __future__ import annotations

from threading import get_ident

REAL_S = 60.0  # a real read that takes longer is a fault of the machine


class ModelledTicket:
    """A read ticket whose end is at a virtual time."""

    def __init__(self, ticket, device, end_s: float) -> None:
        self._ticket = ticket
        self._device = device
        self._end_s = end_s
        self._called_back_on = 0  # the I/O thread that is telling of the real end

    def settled(self) -> bool:
        """Return whether the modelled read is over."""
        return self._device.now() >= self._end_s and self._really_over()

    def wait_settled(self, timeout_s: float) -> bool:
        """Let virtual time pass until the read is over, or for ``timeout_s``."""
        left = max(0.0, self._end_s - self._device.now())
        self._device.advance_host(min(left, max(0.0, timeout_s)))
        return left <= timeout_s and self._really_over()

    def wait(self, timeout_s: float | None = None):
        """Return the statuses, ``TIMEOUT`` for what is not over."""
        if self._called_back_on == get_ident():
            return self._ticket.wait(0.0)
        over = self.wait_settled(REAL_S if timeout_s is None else timeout_s)
        return self._ticket.wait(REAL_S if over else 0.0)

    def add_settled_callback(self, call) -> None:
        """Call ``call()`` when the real read is over; who asks for that only counts bytes."""

        def over() -> None:
            self._called_back_on = get_ident()
            try:
                call()
            finally:
                self._called_back_on = 0

        self._ticket.add_settled_callback(over)

    def _really_over(self) -> bool:
        if not self._ticket.wait_settled(REAL_S):
            raise RuntimeError(f"a read of the disk tier took over {REAL_S} s")
        return True


class ModelledDrive:
    """Gives the reads of a disk tier virtual times.

    Args:
        store: an open store with a disk tier, on a simulated device.
        device: that device.
        byte_scale: modelled bytes that each real byte stands for.
    """

    def __init__(self, store, device, byte_scale: float) -> None:
        self._device = device
        self._byte_scale = byte_scale
        self._free_at = 0.0
        # There is no public way to put something in front of a tier, nor need for one.
        tier = store._core.disk
        self._submit_read, self._submit_ranges = tier.submit_read, tier.submit_ranges
        tier.submit_read, tier.submit_ranges = self.submit_read, self.submit_ranges

    def submit_read(self, keys, destinations, **given):
        """Read whole pages."""
        ticket = self._submit_read(keys, destinations, **given)
        return ModelledTicket(ticket, self._device, self._book(d.nbytes for d in destinations))

    def submit_ranges(self, batches, **given):
        """Read ranges of pages, one batch after the other."""
        batches = list(batches)
        tickets = self._submit_ranges(batches, **given)
        ends = [self._book(read.destination.nbytes for read in batch) for batch in batches]
        return [
            ModelledTicket(ticket, self._device, end)
            for ticket, end in zip(tickets, ends, strict=True)
        ]

    def _book(self, sizes) -> float:
        """Return when a read of so many bytes is over."""
        model = self._device.model
        first = self._device.now() + model.nvme_alpha
        seconds = sum(sizes) * self._byte_scale / model.nvme_read_bytes_per_s
        self._free_at = max(first, self._free_at) + seconds
        return self._free_at


def read_seconds(model, sizes) -> list[float]:
    """Return what the reads of one request take that are handed over together."""
    seconds = [size / model.nvme_read_bytes_per_s for size in sizes]
    return [model.nvme_alpha + seconds[0], *seconds[1:]]


def through_two(first, second) -> list[float]:
    """Return by how much each layer's earliest arrival is later than that of the one before.

    Each layer passes through one lane and then another, as a read and a copy; each lane takes
    the layers in order, without a pause.  These are the loads of the pipeline's formula.
    """
    loads, read, arrived = [], 0.0, 0.0
    for one, two in zip(first, second, strict=True):
        read += one
        at = max(read, arrived) + two
        loads.append(at - arrived)
        arrived = at
    return loads
