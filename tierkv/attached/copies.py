"""Copies between host slots and an engine's blocks, few and large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.devices.base import CopyOp

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.attached.views import GroupView

BlockIds = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Pages in adjacent slots whose blocks are adjacent as well, or a part of one page.

    Attributes:
        slot: first host slot.
        pages: how many slots.
        first: position in the page of the first block moved.
        block: its id in the engine's pool.
        count: blocks of each page moved, adjacent ones.
    """

    slot: int
    pages: int
    first: int
    block: int
    count: int


def runs(slots: Sequence[int], blocks: Sequence[BlockIds]) -> list[Run]:
    """Return the runs that move pages between slots and blocks; None is not moved.

    Args:
        slots: one host slot a page.
        blocks: the ids of each page's blocks, in order.
    """
    found: list[Run] = []
    for slot, ids in zip(slots, blocks, strict=True):
        for first, block, count in _stretches(ids):
            last = found[-1] if found else None
            if (
                last is not None
                and count == last.count == len(ids)  # whole pages only
                and slot == last.slot + last.pages
                and block == last.block + last.pages * count
            ):
                found[-1] = Run(last.slot, last.pages + 1, 0, last.block, count)
            else:
                found.append(Run(slot, 1, first, block, count))
    return found


def _stretches(ids: BlockIds) -> list[tuple[int, int, int]]:
    """Return (position, id, count) of runs of adjacent ids."""
    stretches: list[tuple[int, int, int]] = []
    for at, block in enumerate(ids):
        if block is None:
            continue
        if stretches:
            first, start, count = stretches[-1]
            if first + count == at and start + count == block:
                stretches[-1] = (first, start, count + 1)
                continue
        stretches.append((at, block, 1))
    return stretches


def copies(
    view: GroupView,
    host: Tensor,
    moves: Sequence[Run],
    *,
    to_engine: bool,
    layer: int | None = None,
) -> list[CopyOp]:
    """Return the copies that carry runs out.

    Args:
        view: the group's blocks.
        host: the host slots, ``[slots, slot_bytes]``.
        moves: what to move.
        to_engine: from the host to the engine's blocks, or the other way.
        layer: position in the group of the only layer to move; None for all layers.

    Returns:
        Copies between uint8 tensors ``[pages, layers, blocks, *inside of the part]``, strided
        on both sides, the last dimension in one run wherever the engine's is.
    """
    layer_bytes, slot_bytes = view.group.layer_bytes, host.stride(0)
    ops = []
    for plane in view.planes:
        at, count = plane.first_layer, plane.layers
        if layer is not None:
            if not at <= layer < at + count:
                continue
            at, count = layer, 1
        memory = plane.memory
        to_block, to_layer, *inside = memory.stride()
        shape, packed = memory.shape[2:], plane.packed
        engine_start = memory.storage_offset() + (at - plane.first_layer) * to_layer
        host_start = host.storage_offset() + at * layer_bytes + plane.offset
        for run in moves:
            size = (run.pages, count, run.count, *shape)
            engine = memory.as_strided(
                size,
                (run.count * to_block, to_layer, to_block, *inside),
                engine_start + run.block * to_block,
            )
            page = host.as_strided(
                size,
                (slot_bytes, layer_bytes, view.block_bytes, *packed),
                host_start + run.slot * slot_bytes + run.first * view.block_bytes,
            )
            ops.append(CopyOp(engine, page) if to_engine else CopyOp(page, engine))
    return ops
