"""What a model's attention state looks like: layer groups and every size in bytes.

Inside a page the order is ``[layer][component][token][head][dim]``: the page is one
contiguous block, and each layer is one contiguous range of it.  Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tierkv.errors import SpecError

if TYPE_CHECKING:
    from tierkv.identity.opaque import OpaqueGroup

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
}


class GroupKind(StrEnum):
    """How the state of a layer group depends on the tokens before it."""

    FULL = "full"
    LATENT = "latent"
    SLIDING = "sliding"
    SNAPSHOT = "snapshot"

    @property
    def needs_every_page(self) -> bool:
        """Whether resuming at n needs every page up to n (and accepts any shorter n)."""
        return self in (GroupKind.FULL, GroupKind.LATENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One tensor of a layer's state: ``heads * dim`` elements a token (or a snapshot)."""

    name: str
    heads: int
    dim: int

    def __post_init__(self) -> None:
        if self.heads <= 0 or self.dim <= 0:
            raise SpecError(
                f"component {self.name!r}: heads and dim must be positive, "
                f"got heads={self.heads}, dim={self.dim}"
            )

    @property
    def elements(self) -> int:
        """Elements a token."""
        return self.heads * self.dim


def kv_components(heads: int, head_dim: int, value_dim: int | None = None) -> tuple[Component, ...]:
    """Return the K and V components of an attention layer."""
    return (
        Component(name="k", heads=heads, dim=head_dim),
        Component(name="v", heads=heads, dim=value_dim or head_dim),
    )


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one kind and geometry, whose state shares pages.

    Attributes:
        name: unique within the spec.
        kind: how the state depends on the prefix.
        layers: indices of the model's layers, ascending.
        components: the tensors of one layer, in page order.
        dtype: element type, a key of ``DTYPE_BYTES``.
        page_tokens: tokens a page covers; for a snapshot group, tokens between snapshots.
        window: tokens a sliding layer attends to, the current one included.
        block_tokens: tokens of a block, where a page is made of another engine's blocks.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    components: tuple[Component, ...]
    dtype: str
    page_tokens: int
    window: int | None = None
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        where = f"layer group {self.name!r}"
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise SpecError(
                f"{where}: layers must be ascending, unique and non-negative, got {self.layers}"
            )
        if not self.components:
            raise SpecError(f"{where}: needs at least one component")
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"{where}: dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if self.page_tokens <= 0:
            raise SpecError(f"{where}: page_tokens must be positive, got {self.page_tokens}")
        if (self.kind is GroupKind.SLIDING) != (self.window is not None):
            raise SpecError(
                f"{where}: a window belongs to sliding groups and only to them, "
                f"got kind={self.kind}, window={self.window}"
            )
        if self.window is not None and self.window < 2:
            raise SpecError(f"{where}: window must be at least 2 tokens, got {self.window}")
        if self.block_tokens is not None and self.page_tokens % self.block_tokens:
            raise SpecError(
                f"{where}: a page of {self.page_tokens} tokens is no whole number of blocks of "
                f"{self.block_tokens}"
            )

    @property
    def blocks_per_page(self) -> int:
        """Blocks of another engine's pool that make a page; 1 where a page is one block."""
        return 1 if self.block_tokens is None else self.page_tokens // self.block_tokens

    @property
    def rows(self) -> int:
        """Rows (tokens, or one state) that a page holds of each component."""
        return 1 if self.kind is GroupKind.SNAPSHOT else self.page_tokens

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one layer's components for one row."""
        return sum(c.elements for c in self.components) * DTYPE_BYTES[self.dtype]

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer's range inside a page."""
        return self.rows * self.row_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return len(self.layers) * self.layer_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes a token, all layers of the group."""
        return self.page_bytes / self.page_tokens

    @cached_property
    def component_offsets(self) -> tuple[int, ...]:
        """Byte offset of each component inside a layer's range."""
        size, offsets, at = DTYPE_BYTES[self.dtype], [], 0
        for component in self.components:
            offsets.append(at)
            at += component.elements * self.rows * size
        return tuple(offsets)

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Return (offset, bytes) of a model layer inside the page."""
        position = self.layers.index(layer)
        return position * self.layer_bytes, self.layer_bytes

    def pages_for(self, tokens: int) -> int:
        """Return how many pages cover ``tokens`` tokens, the partial last one included."""
        return -(-tokens // self.page_tokens)

    def first_needed(self, tokens: int) -> int:
        """Return the first token whose state resuming at ``tokens`` needs."""
        if self.kind is GroupKind.SLIDING:
            assert self.window is not None
            return max(0, tokens - (self.window - 1))
        if self.kind is GroupKind.SNAPSHOT:
            return max(0, tokens - 1)
        return 0

    def needed_pages(self, tokens: int) -> range:
        """Return the page indices that resuming at ``tokens`` needs."""
        return range(self.first_needed(tokens) // self.page_tokens, self.pages_for(tokens))

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the meaning of a page's bytes."""
        described: dict[str, Any] = {
            "name": self.name,
            "kind": str(self.kind),
            "layers": list(self.layers),
            "components": [[c.name, c.heads, c.dim] for c in self.components],
            "dtype": self.dtype,
            "page_tokens": self.page_tokens,
            "window": self.window,
        }
        if self.block_tokens is not None:
            described["block_tokens"] = self.block_tokens
        return described


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The layer groups of a model, and what else decides its state's meaning.

    Attributes:
        groups: the layer groups; each model layer belongs to at most one.
        rope: canonical description of the position encoding (part of the identity).
        layout: name of the order of bytes inside a page.
    """

    groups: tuple[LayerGroup, ...]
    rope: str = ""
    layout: str = "layer-component-token-head-dim"

    def __post_init__(self) -> None:
        if not self.groups:
            raise SpecError("a spec needs at least one layer group")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise SpecError(f"layer group names must be unique, got {names}")
        layers = [layer for g in self.groups for layer in g.layers]
        if len(set(layers)) != len(layers):
            raise SpecError("a model layer belongs to more than one layer group")

    @classmethod
    def from_config(
        cls, config: Any, *, dtype: str, page_tokens: int | dict[str, int] | None = None
    ) -> CacheSpec:
        """Return the spec of a Transformers model from its config.

        Args:
            config: a ``PretrainedConfig`` (text or multimodal; the text part is used).
            dtype: element type of the cache, such as ``"bfloat16"``.
            page_tokens: tokens a page of the first group, or a map from group name;
                chosen automatically when None.

        Raises:
            SpecError: an architecture or position encoding that is not supported.
        """
        from tierkv.identity.model_config import spec_from_config

        return spec_from_config(config, dtype=dtype, page_tokens=page_tokens)

    @classmethod
    def opaque(cls, layout: str, groups: Sequence[OpaqueGroup], *, rope: str = "") -> CacheSpec:
        """Return the spec of pages made of another engine's blocks, bytes left as they are.

        Args:
            layout: engine, layout, attention backend and instruction set: whatever decides
                what the bytes of a block mean.
            groups: the layer groups, as the engine's pool has them.
            rope: canonical description of the position encoding.

        Raises:
            SpecError: sizes that do not divide, or no layout.
        """
        from tierkv.identity.opaque import opaque_spec

        return opaque_spec(layout, groups, rope=rope)

    @cached_property
    def layer_to_group(self) -> dict[int, int]:
        """Map from model layer to the index of its group."""
        return {layer: i for i, g in enumerate(self.groups) for layer in g.layers}

    @cached_property
    def anchor(self) -> int:
        """Index of the group that anchors prefixes: the first that needs every page, else 0."""
        return next((i for i, g in enumerate(self.groups) if g.kind.needs_every_page), 0)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a pool slot: the largest page, rounded up to 4 KiB."""
        largest = max(g.page_bytes for g in self.groups)
        return -(-largest // ALIGNMENT) * ALIGNMENT

    def pages_for(self, tokens: int) -> int:
        """Return the slots that a sequence of ``tokens`` tokens occupies while it runs."""
        return sum(len(g.needed_pages(tokens)) for g in self.groups)

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the meaning of the pages' bytes."""
        return {
            "layout": self.layout,
            "rope": self.rope,
            "groups": [g.identity() for g in self.groups],
        }


ALIGNMENT = 4096


def group_names(groups: Sequence[LayerGroup]) -> list[str]:
    """Return the names of layer groups, in order."""
    return [g.name for g in groups]
