"""Until when the compute stream may still touch device slots that have changed hands.

The host runs ahead of a device: a slot that a sequence gives back, or a page that it
publishes, may still be read or written by kernels that were enqueued before.  Whoever
touches such a slot on another stream goes behind the fence.  Work on the compute stream
itself is in order anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.devices.base import Device, Event, Stream


class Fences:
    """By device slot, an event after the last kernels that may touch it.

    Call with the store's lock held.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: dict[int, Event] = {}

    def put(self, slots: Iterable[int]) -> None:
        """Fence slots off until everything computed so far is done."""
        slots = list(slots)
        if not slots:
            return
        event = self._device.compute.record()
        if event.done():  # also where the calling thread is the compute stream
            for slot in slots:
                self._events.pop(slot, None)
        else:
            self._events.update(dict.fromkeys(slots, event))

    def order(self, stream: Stream, slots: Iterable[int], timeout_s: float) -> None:
        """Order what ``stream`` gets from now on after the fences of ``slots``."""
        if not self._events:
            return
        pending = {id(e): e for s in slots if (e := self._events.get(s)) is not None}
        for event in pending.values():
            stream.wait(event, timeout_s)

    def __len__(self) -> int:
        """Number of slots that are fenced off."""
        return len(self._events)
