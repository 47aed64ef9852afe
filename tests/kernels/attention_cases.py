"""Batches of paged sequences for the tests of attention, with NaN in all that must not be read."""

from dataclasses import dataclass, field

import torch
from guard import guarded

from tierkv.kernels.attention_arguments import AttentionArguments
from tierkv.kernels.attention_reference import reference_attention
from tierkv.kernels.layout import PageLayout


@dataclass
class Case:
    """A batch: ``lengths`` tokens a row, the last ``queries`` (an int, or one a row) asking."""

    lengths: list
    queries: object = 1
    page_tokens: int = 16
    heads: int = 2
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shared: bool = False
    seed: int = 0
    options: dict = field(init=False)

    def __post_init__(self):
        made = torch.Generator().manual_seed(self.seed)
        ragged = isinstance(self.queries, list)
        counts = self.queries if ragged else [self.queries] * len(self.lengths)
        self.layout = PageLayout(page_tokens=self.page_tokens, heads=self.heads, dim=self.dim)
        needed = [
            0 if self.window is None else max(0, n - c - self.window + 1)
            for n, c in zip(self.lengths, counts, strict=True)
        ]
        first = [t // self.page_tokens for t in needed]
        pages = [-(-n // self.page_tokens) - f for n, f in zip(self.lengths, first, strict=True)]
        columns = max(1, *pages)
        # Pages in no order, one that nobody uses; unused columns lead far outside.
        total = sum(pages) + 1
        order = torch.randperm(total, generator=made) * self.layout.elements
        table = torch.full((len(pages), columns), -(1 << 40), dtype=torch.int64)
        memory = torch.full((total * self.layout.elements,), float("nan"), dtype=self.dtype)
        at = iter(order.tolist())
        for row, count in enumerate(pages):
            for column in range(count):
                if self.shared and row and column < min(count, pages[0]) - 1:
                    table[row, column] = table[0, column]
                    continue
                table[row, column] = next(at)
                begin = max(0, needed[row] - (first[row] + column) * self.page_tokens)
                end = self.lengths[row] - (first[row] + column) * self.page_tokens
                for component in (0, 1):
                    rows = self.layout.rows(memory, int(table[row, column]), component)[begin:end]
                    rows.copy_(torch.randn(rows.shape, generator=made))
        q_shape = (sum(counts), self.heads * self.group, self.dim)
        q = torch.randn(q_shape, generator=made).to(self.dtype) * 2
        self.memory, self.table = guarded(memory), guarded(table)
        self.lens = guarded(torch.tensor(self.lengths, dtype=torch.int32))
        self.starts = None
        if ragged:
            self.starts = torch.tensor([0, *counts]).cumsum(0)
        self.max_queries = max(counts)
        self.q = guarded(q)
        self.options = {
            "scale": self.dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.randn(q_shape[1], generator=made) if self.sinks else None,
            "first_page": None if self.window is None else torch.tensor(first),
        }

    def out(self):
        """Return where the result goes, with nothing to be written behind it."""
        return guarded(torch.full_like(self.q, float("nan")))

    def expected(self, memory=None, table=None, layout=None):
        """Return the reference's result in float64."""
        arguments = AttentionArguments(
            where="test",
            q=self.q,
            memory=self.memory if memory is None else memory,
            page_table=self.table if table is None else table,
            lengths=self.lens,
            layout=layout or self.layout,
            query_starts=self.starts,
            max_queries=self.max_queries,
            **self.options,
        )
        return reference_attention(arguments, compute_dtype=torch.float64)

    @property
    def pages(self):
        """Arguments that say where K and V lie."""
        return {
            "v_offset": self.layout.v_offset,
            "page_tokens": self.page_tokens,
            "kv_heads": self.heads,
        }


def assert_close(got, want, dtype):
    """Compare with the float64 reference; the interpreter cuts bfloat16 off, one unit."""
    unit = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=unit, atol=max(2e-6, unit / 64))
