"""Paged sequences of realistic shapes for the GPU check of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu_check_support import Check

from tierkv.kernels.layout import PageLayout


@dataclass(frozen=True)
class Shape:
    """A model's attention: pages of ``page_tokens``, ``group`` query heads a KV head."""

    name: str
    heads: int
    group: int
    dim: int
    page_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def layout(self) -> PageLayout:
        """Where K and V lie in a page."""
        return PageLayout(page_tokens=self.page_tokens, heads=self.heads, dim=self.dim)


LLAMA = Shape("llama 8x4x128", heads=8, group=4, dim=128)
SHAPES = {
    "bf16": [
        LLAMA,
        Shape("gemma3 1x4x256 window", heads=1, group=4, dim=256, page_tokens=128, window=512),
        Shape("gpt-oss 8x8x64 window, sinks", heads=8, group=8, dim=64, window=128, sinks=True),
        Shape("gemma2 8x2x256 soft cap", heads=8, group=2, dim=256, softcap=50.0),
    ],
    "fp16": [LLAMA, Shape("phi 8x1x96", heads=8, group=1, dim=96)],
    "fp32": [LLAMA],
}


class Pages:
    """A batch of sequences in pages of no particular order.

    Attributes:
        memory: flat.
        table: int64 ``[batch, pages]``; entries of pages that are not there are negative.
        lengths: int32 ``[batch]``.
    """

    def __init__(self, check: Check, shape: Shape, lengths: list[int], dtype: torch.dtype) -> None:
        layout, counts = shape.layout, [-(-n // shape.page_tokens) for n in lengths]
        made = torch.Generator().manual_seed(1)
        order = (torch.randperm(sum(counts) + 1, generator=made) * layout.elements).tolist()
        table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int64)
        for row, count in enumerate(counts):
            for page in range(count):
                table[row, page] = order.pop()
        size = (sum(counts) + 1) * layout.elements
        self.shape, self.layout, self.dtype = shape, layout, dtype
        self.memory = check.random(size, dtype=dtype)
        self.table = table.to(check.device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=check.device)

    @property
    def places(self) -> torch.Tensor:
        """All entries of pages that are there, ``[pages]``."""
        return self.table[self.table >= 0].contiguous()

    def options(self, check: Check) -> dict:
        """Return the arguments of attention that the model's shape asks for."""
        shape, heads = self.shape, self.shape.heads * self.shape.group
        sinks = check.random(heads, dtype=torch.float32, seed=3) if shape.sinks else None
        return {
            "scale": shape.dim**-0.5,
            "window": shape.window,
            "softcap": shape.softcap,
            "sinks": sinks,
        }
