"""The parts of an open store, shared by the modules that move, load and commit pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierkv.control_plane.costs import Costs
from tierkv.data_plane.fences import Fences
from tierkv.identity.keys import key_array
from tierkv.storage.format import PageInfo
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.control_plane.index import PrefixIndex
    from tierkv.control_plane.planner import Planner, Rows
    from tierkv.data_plane.pool import DevicePool
    from tierkv.devices.base import Device
    from tierkv.identity.keys import Namespace
    from tierkv.identity.spec import CacheSpec
    from tierkv.stats import Counters
    from tierkv.storage.arena import HostArena
    from tierkv.storage.ssd import SsdTier


@dataclass(frozen=True, kw_only=True)
class Core:
    """What one open store is made of.

    ``lock`` guards the planner, the index and the counters; it is never held across I/O,
    a copy or a wait (waiting on ``settled`` releases it).
    """

    spec: CacheSpec
    namespace: Namespace
    planner: Planner
    device: Device
    pool: DevicePool
    arena: HostArena
    disk: SsdTier | None
    counters: Counters
    timeout_s: float
    write_through: bool
    boundary_tokens: int
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    costs: Costs = field(default_factory=Costs)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @cached_property
    def fences(self) -> Fences:
        """What the compute stream may still touch of device slots that changed hands."""
        return Fences(self.device)

    @cached_property
    def settled(self) -> threading.Condition:
        """Notified whenever pages in flight come to rest."""
        return threading.Condition(self.lock)

    @property
    def staging_slots(self) -> range:
        """Slots of the arena behind the host tier's, through which pages pass to disk."""
        return range(self.planner.capacity(Tier.HOST), self.arena.num_slots)

    @property
    def index(self) -> PrefixIndex:
        """The prefix index."""
        return self.planner.index

    @cached_property
    def host_memory(self) -> Tensor:
        """The host tier's slots as a tensor ``[slots, slot_bytes]``."""
        return torch.from_numpy(self.arena.slots)

    def memory(self, tier: Tier) -> Tensor:
        """Return the slots of a memory tier as bytes, ``[slots, slot_bytes]``."""
        return self.pool.memory if tier is Tier.DEVICE else self.host_memory

    @cached_property
    def _layer_places(self) -> dict[int, tuple[int, int, int]]:
        places = {}
        for number, group in enumerate(self.spec.groups):
            for layer in group.layers:
                places[layer] = (number, *group.layer_range(layer))
        return places

    def layer_place(self, layer: int) -> tuple[int, int, int]:
        """Return (group, offset, bytes) of a model layer's range inside its page."""
        return self._layer_places[layer]

    def deadline(self) -> float:
        """Return the time at which a wait that starts now ends."""
        return self.clock() + self.timeout_s

    def page_info(self, row: int) -> PageInfo:
        """Return what a page's header says of it."""
        index = self.index
        return PageInfo(
            key=index.key(row),
            namespace=self.namespace.digest,
            parent=index.parent_key(row),
            group=self.group_of(row),
            end_token=int(index.end_token([row])[0]),
            num_tokens=int(index.num_tokens([row])[0]),
            flags=int(index.flags([row])[0]),
            created_s=int(self.wall_clock()),
        )

    def group_of(self, row: int) -> int:
        """Return the layer group of a page."""
        return int(self.index.group([row])[0])

    def is_in(self, row: int, tier: Tier) -> bool:
        """Return whether a tier holds a page."""
        return bool(int(self.index.residency([row])[0]) >> tier & 1)

    def find_rows(self, keys: Sequence[bytes]) -> list[int]:
        """Return the rows of those keys whose pages some tier holds."""
        if not keys:
            return []
        return [row for row in self.index.find(key_array(keys)).tolist() if row >= 0]

    def page_bytes(self, row: int) -> int:
        """Return the bytes of a page without its slot's padding."""
        return self.spec.groups[self.group_of(row)].page_bytes

    def delete_from_disk(self, keys: list[bytes]) -> None:
        """Delete pages that the index has just let go of.  Call with the lock held.

        Deleting only queues; under the lock, it is queued before any later write of the
        same page.
        """
        if keys and self.disk is not None:
            self.disk.delete(keys)

    def count_bytes(self, rows: Sequence[int] | Rows, source: Tier, target: Tier) -> None:
        """Count the bytes of pages that moved between tiers."""
        groups = np.bincount(self.index.group(rows), minlength=len(self.spec.groups))
        sizes = [group.page_bytes for group in self.spec.groups]
        moved = int(np.dot(groups[: len(sizes)], sizes))
        self.counters.bytes_out[source.label] += moved
        self.counters.bytes_in[target.label] += moved

    def slot(self, row: int, tier: Tier) -> int:
        """Return the slot of a page in a memory tier that holds it."""
        return int(self.index.slot([row], tier)[0])

    def close(self) -> None:
        """Release the device, the host memory and the disk tier, whatever fails."""
        with ExitStack() as stack:
            if self.disk is not None:
                stack.callback(self.disk.close)
            stack.callback(self.arena.close)
            stack.callback(self.device.close)
