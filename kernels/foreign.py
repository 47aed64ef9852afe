"""One layer of another engine's paged pool, as gather and scatter see it.

The pools are layer-first: each layer has tensors of its own.  A *slot* is the place of one
token: ``block * block_tokens + row`` in vLLM (its slot mapping), the index into the token pool
in SGLang.  Both are one case here: blocks of 1 token for SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.launch import check_int64, check_same_device, jit, tl
from tierkv.kernels.layout import PageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLayer:
    """Views of a layer's keys and values, sharing the engine's memory.

    Attributes:
        k: ``[blocks, block_tokens, heads, dim]``; strides are free, but the elements of a head
            are adjacent.
        v: the same with V's dim; None where there is none (MLA).
    """

    k: Tensor
    v: Tensor | None = None

    def __post_init__(self) -> None:
        for x in self.parts:
            if x.dim() != 4 or (x.shape[3] > 1 and x.stride(3) != 1):
                raise InvalidInputError(
                    f"foreign layer: expected [blocks, block_tokens, heads, dim] with adjacent "
                    f"elements, got {list(x.shape)} with strides {list(x.stride())}"
                )
        if self.k.shape[:3] != self.parts[-1].shape[:3] or self.k.dtype != self.parts[-1].dtype:
            raise InvalidInputError(
                f"foreign layer: k {list(self.k.shape)} and v {list(self.parts[-1].shape)} "
                f"differ in more than the last dimension, or in type"
            )

    @classmethod
    def from_vllm(cls, pool: Tensor, *, kv_axis: int) -> ForeignLayer:
        """Make views of a vLLM layer.

        Args:
            pool: ``[2, blocks, block_tokens, heads, dim]`` (kv_axis 0, as FlashAttention has
                it), or ``[blocks, 2, block_tokens, heads, dim]`` (kv_axis 1, as FlashInfer).
            kv_axis: which axis tells K from V.

        Raises:
            InvalidInputError: another shape.
        """
        if pool.dim() != 5 or kv_axis not in (0, 1) or pool.shape[kv_axis] != 2:
            raise InvalidInputError(
                f"foreign layer: expected five dimensions, 2 long at axis {kv_axis} (0 or 1), "
                f"got {list(pool.shape)}"
            )
        return cls(k=pool.select(kv_axis, 0), v=pool.select(kv_axis, 1))

    @classmethod
    def from_fused(cls, pool: Tensor, *, dim: int) -> ForeignLayer:
        """Make views of vLLM's newer layout ``[blocks, heads, block_tokens, dim + value_dim]``.

        Only for backends that put K and V of a token side by side; the CPU's do not.
        """
        if pool.dim() != 4 or not 0 < dim < pool.shape[3]:
            raise InvalidInputError(
                f"foreign layer: expected [blocks, heads, block_tokens, more than {dim}], got "
                f"{list(pool.shape)}"
            )
        tokens_outside = pool.transpose(1, 2)
        return cls(k=tokens_outside[..., :dim], v=tokens_outside[..., dim:])

    @classmethod
    def from_sglang(cls, k: Tensor, v: Tensor | None = None) -> ForeignLayer:
        """Make views of an SGLang layer: ``[slots, heads, dim]`` each."""
        return cls(k=k.unsqueeze(1), v=None if v is None else v.unsqueeze(1))

    @property
    def parts(self) -> list[Tensor]:
        """K, and V where there is one."""
        return [self.k] if self.v is None else [self.k, self.v]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.k.shape[1]

    def slots(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return the slots of the first ``tokens`` tokens of a block table.

        Args:
            blocks: int64 ``[n]``, block ids in the sequence's order.
            tokens: at most ``n * block_tokens``.
        """
        inside = torch.arange(self.block_tokens, device=blocks.device)
        return (blocks[:, None] * self.block_tokens + inside).flatten()[:tokens].contiguous()

    def check(
        self,
        where: str,
        memory: Tensor,
        page_table: Tensor,
        slots: Tensor,
        layout: PageLayout,
        start: int,
    ) -> None:
        """Check the arguments of gather and scatter.

        Raises:
            InvalidInputError: shapes, types or devices that do not fit; on the host, tokens
                that have no page, or slots beyond the pool.
        """
        want = [(layout.heads, layout.dim)]
        if layout.v_dim:
            want.append((layout.heads, layout.v_dim))
        have = [tuple(x.shape[2:]) for x in self.parts]
        if have != want or self.k.dtype != memory.dtype:
            raise InvalidInputError(
                f"{where}: the engine's layer has (heads, dim) {have} of {self.k.dtype}, our "
                f"pages {want} of {memory.dtype}"
            )
        check_int64(where, "page_table", page_table, (None,))
        check_int64(where, "slots", slots, (None,))
        check_same_device(
            where, memory=memory, page_table=page_table, slots=slots, k=self.k, v=self.v
        )
        layout.check_table(where, memory, page_table.unsqueeze(0), 1)
        if slots.device.type != "cpu" or not slots.numel():
            return
        layout.check_rows(where, page_table, start, slots.shape[0])
        limit = self.k.shape[0] * self.block_tokens
        if int(slots.max()) >= limit:
            raise InvalidInputError(
                f"{where}: slot {int(slots.max())} is beyond the {limit} slots of the pool"
            )


@jit
def slot_offset(
    slot: tl.tensor,
    head: tl.tensor,
    block: tl.tensor,
    token: tl.tensor,
    head_stride: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
) -> tl.tensor:
    """In a kernel: elements from the start of a foreign part to a head of a slot (int64)."""
    return (slot // BLOCK_TOKENS) * block + (slot % BLOCK_TOKENS) * token + head * head_stride
