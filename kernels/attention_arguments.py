"""The arguments of paged attention, checked once and in one form for decode and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.kernels.launch import (
    check_dtype,
    check_head_dim,
    check_same_device,
    next_power_of_2,
)
from tierkv.kernels.layout import PageLayout
from tierkv.kernels.quantised import QuantisedLayout, decode_reference

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int32, torch.int64)
MAX_ATTENTION_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionArguments:
    """A call of paged attention.

    Attributes:
        where: the public function, for messages.
        q: ``[total_queries, q_heads, dim]``, contiguous; the queries of the batch's rows one
            row after the other.
        memory: flat, holds all pages; uint8 where they are quantised.
        page_table: int64 ``[batch, max_pages]``, offsets into memory, in its elements.
        lengths: int32 or int64 ``[batch]``: tokens a row holds, its queries' own included.
        layout: where keys and values lie in a page.
        query_starts: ``[batch + 1]``: index in ``q`` of each row's first query, and the end;
            None when each row has ``max_queries``.
        max_queries: queries of the row that has most (or more).
        scale: factor of q.k.
        window: tokens that a query attends to, its own included; None: all.
        softcap: bound of the logits, or None.
        sinks: one logit a head, ``[q_heads]``, or None.
        first_page: ``[batch]``: which page of its row the table's first column is; None: 0.
    """

    where: str
    q: Tensor
    memory: Tensor
    page_table: Tensor
    lengths: Tensor
    layout: PageLayout | QuantisedLayout
    query_starts: Tensor | None
    max_queries: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    first_page: Tensor | None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_tensors()
        if self.page_table.device.type == "cpu":
            self._check_contents()

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.page_table.shape[0]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[1] // self.layout.heads

    def starts(self) -> list[int]:
        """Return the index of each row's first query, and the end (waits for the device)."""
        if self.query_starts is not None:
            return [int(start) for start in self.query_starts.tolist()]
        return [row * self.max_queries for row in range(self.batch + 1)]

    def read_page(self, at: int, component: int) -> Tensor:
        """Return ``[page_tokens, kv_heads, dim]``, K (0) or V (1) of the page at ``at``."""
        if isinstance(self.layout, QuantisedLayout):
            values, scales = self.layout.sections(self.memory, at, component)
            return decode_reference(values, scales, self.layout)
        return self.layout.rows(self.memory, at, component)

    def _check_numbers(self) -> None:
        if not isfinite(self.scale):
            raise InvalidInputError(f"{self.where}: scale must be finite, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise InvalidInputError(f"{self.where}: window must be positive, got {self.window}")
        if self.softcap is not None and not (isfinite(self.softcap) and self.softcap > 0):
            raise InvalidInputError(
                f"{self.where}: softcap must be positive and finite, got {self.softcap}; "
                f"None means no cap"
            )
        if self.first_page is not None and self.window is None:
            raise InvalidInputError(
                f"{self.where}: a table that does not begin with page 0 (first_page) needs a window"
            )

    def _check_tensors(self) -> None:
        where, q, layout = self.where, self.q, self.layout
        if q.dim() != 3:
            raise InvalidInputError(f"{where}: q has the wrong shape {list(q.shape)}")
        check_dtype(where, q, QUERY_DTYPES)
        check_head_dim(where, q.shape[2], multiple=8)
        if q.shape[2] > MAX_ATTENTION_DIM:
            raise UnsupportedError(
                f"{where}: heads of {q.shape[2]} elements are not supported; up to "
                f"{MAX_ATTENTION_DIM} are"
            )
        dims = layout.dims if isinstance(layout, QuantisedLayout) else (layout.dim, layout.v_dim)
        if dims != (q.shape[2], q.shape[2]):
            raise InvalidInputError(
                f"{where}: q has heads of {q.shape[2]} elements, K and V in the pages of {dims}; "
                f"they must be equal"
            )
        if q.shape[1] == 0 or q.shape[1] % layout.heads:
            raise InvalidInputError(
                f"{where}: {q.shape[1]} query heads do not share {layout.heads} KV heads evenly"
            )
        if torch.is_grad_enabled() and (q.requires_grad or self.memory.requires_grad):
            raise UnsupportedError(
                f"{where}: there is no backward pass; call it under torch.no_grad()"
            )
        self._check_pages()
        self._check_vector("lengths", self.lengths, self.batch, INTEGER_DTYPES)
        self._check_vector("first_page", self.first_page, self.batch, INTEGER_DTYPES)
        self._check_vector("query_starts", self.query_starts, self.batch + 1, INTEGER_DTYPES)
        self._check_vector("sinks", self.sinks, q.shape[1], QUERY_DTYPES)
        if self.query_starts is None and q.shape[0] != self.batch * self.max_queries:
            raise InvalidInputError(
                f"{where}: q holds {q.shape[0]} queries, the page table {self.batch} rows"
            )
        check_same_device(
            where,
            q=q,
            memory=self.memory,
            page_table=self.page_table,
            lengths=self.lengths,
            first_page=self.first_page,
            query_starts=self.query_starts,
            sinks=self.sinks,
        )

    def _check_pages(self) -> None:
        where, layout = self.where, self.layout
        if isinstance(layout, QuantisedLayout):
            layout.check_table(where, self.memory, self.page_table, (self.batch, None))
            group = layout.group_of(layout.dim)
            if group != layout.dim and next_power_of_2(group) != group:
                raise UnsupportedError(
                    f"{where}: a scale for each {group} elements is not supported; quantise with "
                    f"a group that is a power of two, or for 8 bits the whole head"
                )
            return
        if self.memory.dtype != self.q.dtype:
            raise InvalidInputError(
                f"{where}: q is {self.q.dtype} but memory {self.memory.dtype}; they must be equal"
            )
        layout.check_table(where, self.memory, self.page_table, self.batch)

    def _check_vector(
        self, name: str, tensor: Tensor | None, size: int, dtypes: Sequence[torch.dtype]
    ) -> None:
        if tensor is None:
            return
        if tensor.shape != (size,) or not tensor.is_contiguous():
            raise InvalidInputError(
                f"{self.where}: {name} must be contiguous of shape [{size}], got "
                f"{list(tensor.shape)}"
            )
        check_dtype(f"{self.where}: {name}", tensor, dtypes)

    def _check_contents(self) -> None:
        """Check lengths and the table's entries, which is possible on the host only."""
        starts = self.starts()
        if starts[0] != 0 or starts[-1] != self.q.shape[0] or starts != sorted(starts):
            raise InvalidInputError(
                f"{self.where}: query_starts must ascend from 0 to {self.q.shape[0]}, got {starts}"
            )
        for row in range(self.batch):
            queries, length = starts[row + 1] - starts[row], int(self.lengths[row])
            first = 0 if self.first_page is None else int(self.first_page[row])
            if queries > self.max_queries:
                raise InvalidInputError(
                    f"{self.where}: row {row} has {queries} queries, more than max_queries="
                    f"{self.max_queries}"
                )
            if length < 0 or 0 < length < queries:
                raise InvalidInputError(
                    f"{self.where}: row {row} has {queries} queries but a length of {length} "
                    f"tokens; lengths count the queries' own tokens"
                )
            needed = 0 if self.window is None else max(0, length - queries - self.window + 1)
            pages = range(needed // self.layout.page_tokens, -(-length // self.layout.page_tokens))
            held = range(first, first + self.page_table.shape[1])
            if pages and (pages[0] < held.start or pages[-1] >= held.stop):
                raise InvalidInputError(
                    f"{self.where}: row {row} needs its pages {pages[0]} to {pages[-1]}, but the "
                    f"table holds {held.start} to {held.stop - 1}"
                )
            entries = self.page_table[row, pages.start - first : pages.stop - first]
            if pages and int(entries.min()) < 0:
                raise InvalidInputError(
                    f"{self.where}: row {row} needs a page that its table marks as absent"
                )


def flat_queries(
    where: str,
    q: Tensor,
    page_table: Tensor,
    dims: int,
    query_starts: Tensor | None = None,
    max_queries: int | None = None,
) -> tuple[Tensor, int]:
    """Return queries as ``[total_queries, q_heads, dim]``, and how many a row has (at most).

    Args:
        where: the public function, for messages.
        q: ``[batch, q_heads, dim]`` (decode) or ``[batch, queries, q_heads, dim]``; with
            ``query_starts`` ``[total_queries, q_heads, dim]``.
        page_table: ``[batch, max_pages]``.
        dims: dimensions of q without ``query_starts``.
        query_starts: as in ``AttentionArguments``.
        max_queries: goes with ``query_starts``.

    Raises:
        InvalidInputError: shapes that do not fit each other.
    """
    if (query_starts is None) != (max_queries is None):
        raise InvalidInputError(f"{where}: query_starts and max_queries go together")
    if page_table.dim() != 2:
        raise InvalidInputError(
            f"{where}: page_table must be [batch, max_pages], got {list(page_table.shape)}"
        )
    if query_starts is not None and max_queries is not None:
        if q.dim() != 3 or max_queries < 0:
            raise InvalidInputError(
                f"{where}: with query_starts q must be [total_queries, q_heads, dim] and "
                f"max_queries not negative, got {list(q.shape)} and {max_queries}"
            )
        return q.contiguous(), max_queries
    if q.dim() != dims or q.shape[0] != page_table.shape[0]:
        wanted = "[batch, q_heads, dim]" if dims == 3 else "[batch, queries, q_heads, dim]"
        raise InvalidInputError(
            f"{where}: q must be {wanted} with a batch of {page_table.shape[0]}, the rows of the "
            f"page table, got {list(q.shape)}"
        )
    return q.contiguous().flatten(0, dims - 3), q.shape[1] if dims == 4 else 1
