"""Specs of pages whose inner order is another engine's business.

Such a page is ``[layer][block][opaque bytes of the block]``: the blocks of an engine's
paged pool, never transposed.  What the bytes of a block mean follows from the engine, its
layout, attention backend and instruction set, so a string that names all of these becomes
the spec's layout and with it a part of every page's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.errors import SpecError
from tierkv.identity.spec import Component, GroupKind, LayerGroup

if TYPE_CHECKING:
    from tierkv.identity.spec import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueGroup:
    """Layers whose blocks have one geometry, as the engine that owns the pool sees them.

    Attributes:
        name: unique within the spec.
        kind: how the state depends on the prefix.
        layers: indices of the model's layers, ascending.
        block_bytes: bytes of one layer's block, padding between blocks left out.
        block_tokens: tokens of a block; of a snapshot group, tokens between snapshots.
        blocks_per_page: consecutive blocks that make a page; 1 for a snapshot group.
        window: tokens a sliding layer attends to, the current one included.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    block_bytes: int
    block_tokens: int
    blocks_per_page: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        where = f"opaque layer group {self.name!r}"
        for field in ("block_bytes", "block_tokens", "blocks_per_page"):
            if getattr(self, field) < 1:
                raise SpecError(f"{where}: {field} must be positive, got {getattr(self, field)}")
        if self.kind is GroupKind.SNAPSHOT:
            if self.blocks_per_page != 1:
                raise SpecError(
                    f"{where}: a snapshot is one block, got blocks_per_page={self.blocks_per_page}"
                )
        elif self.block_bytes % self.block_tokens:
            raise SpecError(
                f"{where}: block_bytes={self.block_bytes} is no multiple of "
                f"block_tokens={self.block_tokens}; give the bytes of one layer's block without "
                "the padding that may follow it"
            )

    def layer_group(self) -> LayerGroup:
        """Return the group as a spec holds it: one component of bytes."""
        snapshot = self.kind is GroupKind.SNAPSHOT
        dim = self.block_bytes if snapshot else self.block_bytes // self.block_tokens
        return LayerGroup(
            name=self.name,
            kind=self.kind,
            layers=self.layers,
            components=(Component(name="opaque", heads=1, dim=dim),),
            dtype="uint8",
            page_tokens=self.block_tokens * self.blocks_per_page,
            window=self.window,
            block_tokens=self.block_tokens,
        )


def opaque_spec(layout: str, groups: Sequence[OpaqueGroup], *, rope: str = "") -> CacheSpec:
    """Return the spec behind :meth:`tierkv.CacheSpec.opaque`."""
    from tierkv.identity.spec import CacheSpec

    if not layout.strip():
        raise SpecError(
            "opaque spec: layout must name what gives the bytes their meaning, such as "
            "'engine 1.2/LBHNC/flash-attention/float16'; it is part of every page's identity"
        )
    return CacheSpec(
        groups=tuple(group.layer_group() for group in groups), rope=rope, layout=layout
    )
