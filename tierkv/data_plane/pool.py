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
    """Page slots in device memory and typed views of their layers.

    It owns memory, not decisions: which slot holds what is the planner's business.

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
        self._spec = spec
        self._views = {
            layer: self._component_views(group, layer)
            for group in range(len(spec.groups))
            for layer in spec.groups[group].layers
            if self.num_slots
        }

    def page(self, slot: int) -> Tensor:
        """Return the bytes of a slot, ``[slot_bytes]``."""
        return self.memory[slot]

    def layer_range(self, slot: int, layer: int) -> Tensor:
        """Return the bytes of one model layer inside a slot."""
        group = self._spec.groups[self._spec.layer_to_group[layer]]
        offset, size = group.layer_range(layer)
        return self.memory[slot, offset : offset + size]

    def components(self, layer: int) -> tuple[Tensor, ...]:
        """Return views ``[slots, rows, heads, dim]`` of a model layer's components."""
        return self._views[layer]

    def _component_views(self, group_index: int, layer: int) -> tuple[Tensor, ...]:
        group = self._spec.groups[group_index]
        dtype: torch.dtype = getattr(torch, group.dtype)
        typed = self.memory.view(dtype)
        start = group.layer_range(layer)[0] // dtype.itemsize
        views = []
        for component, offset in zip(group.components, group.component_offsets, strict=True):
            at = start + offset // dtype.itemsize
            span = typed[:, at : at + group.rows * component.elements]
            views.append(span.view(self.num_slots, group.rows, component.heads, component.dim))
        return tuple(views)
