"""The device page pool: one byte tensor, page-major, the only home of K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierkv.errors import CapacityError
from tierkv.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.devices.base import Device
    from tierkv.identity.spec import CacheSpec


class DevicePool:
    """Page slots in device memory.

    It owns memory, not decisions: which slot holds what is the planner's business.

    Attributes:
        memory: the slots, uint8 ``[num_slots, slot_bytes]``.
        flat: the same bytes in one dimension.

    Args:
        device: where the memory lives.
        spec: the geometry of the pages.
        capacity_bytes: the budget; the pool holds as many whole slots as fit.  None for a
            pool without slots, of a store that serves attached pools only.

    Raises:
        CapacityError: not even one page of each layer group fits.
    """

    def __init__(self, device: Device, spec: CacheSpec, capacity_bytes: int | None) -> None:
        slot_bytes = spec.slot_bytes
        self.num_slots = 0 if capacity_bytes is None else capacity_bytes // slot_bytes
        if capacity_bytes is not None and self.num_slots < len(spec.groups):
            raise CapacityError(
                f"device pool: {format_bytes(capacity_bytes)} holds {self.num_slots} pages of "
                f"{format_bytes(slot_bytes)}, but each of the {len(spec.groups)} layer groups "
                f"needs one; give at least {format_bytes(len(spec.groups) * slot_bytes)}"
            )
        self.slot_bytes = slot_bytes
        self.memory: Tensor = device.allocate(self.num_slots, slot_bytes)
        self.flat = self.memory.view(-1)
        self._typed: dict[str, Tensor] = {}

    def page(self, slot: int) -> Tensor:
        """Return the bytes of a slot, ``[slot_bytes]``."""
        return self.memory[slot]

    def typed(self, dtype: str) -> Tensor:
        """Return the whole memory as a flat tensor of a group's dtype."""
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = self.flat.view(getattr(torch, dtype))
        return found
