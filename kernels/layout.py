"""How a layer's keys and values lie in pages: what kernels are told about pages.

Kernels know no store.  They get ``memory``, a flat tensor of the elements' type, and a page
table, int64 ``[batch, pages]`` (or ``[pages]`` for one sequence) of *element* offsets: for
each page where its first component (K) begins.  There the rows ``[token][head][dim]`` follow
each other, and V begins ``value_offset`` elements after K.

A row of a table says "no page here" with a negative entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.launch import (
    VECTOR_BYTES,
    check_head_dim,
    check_int64,
    jit,
    next_power_of_2,
    tl,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """One layer's part of a page.

    Attributes:
        page_tokens: rows of a page.
        heads: KV heads of a row.
        dim: elements of a head in the first component (K, or a latent).
        value_dim: elements of a head in V; ``dim`` when None; 0 where there is no V.
        value_offset: elements from the first component to V; None: V follows at once.
        multiple: every entry of a page table is a multiple of this many elements, which lets a
            GPU move 16 bytes at a time.  None: the power of two in ``heads * dim``, which pools
            whose slots are whole pages keep.  The kernels take it on trust on a GPU, where a
            table that breaks it is an illegal address.
    """

    page_tokens: int
    heads: int
    dim: int
    value_dim: int | None = None
    value_offset: int | None = None
    multiple: int | None = None

    def __post_init__(self) -> None:
        check_head_dim("page layout", self.dim)
        if self.value_dim:
            check_head_dim("page layout", self.value_dim)
        for name in ("page_tokens", "heads"):
            if getattr(self, name) <= 0:
                raise InvalidInputError(
                    f"page layout: {name} must be positive, got {getattr(self, name)}"
                )
        if self.multiple is not None and self.multiple <= 0:
            raise InvalidInputError(f"page layout: multiple must be positive, got {self.multiple}")

    @property
    def v_dim(self) -> int:
        """Elements of a head in V."""
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def v_offset(self) -> int:
        """Elements from the first component to V."""
        if self.value_offset is not None:
            return self.value_offset
        return self.page_tokens * self.heads * self.dim

    @property
    def elements(self) -> int:
        """Elements from a table's entry to the end of the last component."""
        first = self.page_tokens * self.heads * self.dim
        return max(first, self.v_offset + self.page_tokens * self.heads * self.v_dim)

    def tile_rows(self, elements: int) -> int:
        """Return the heads of tokens that make a tile of ``elements`` of the narrower component.

        A power of two.  Each thread then has a whole 16-byte vector of both components.
        """
        width = min(next_power_of_2(dim) for dim in (self.dim, self.v_dim) if dim)
        return max(1, elements // width)

    def hint(self, itemsize: int) -> int:
        """Return what a kernel may assume to divide each entry, at most a 16-byte vector."""
        multiple = self.multiple or gcd(self.heads * self.dim, 1 << 20)
        return gcd(multiple, VECTOR_BYTES // itemsize)

    def rows(self, memory: Tensor, at: int, component: int) -> Tensor:
        """Return a view ``[token, head, dim]`` of a component of the page at element ``at``."""
        dim = (self.dim, self.v_dim)[component]
        begin = at + (0, self.v_offset)[component]
        size = self.page_tokens * self.heads * dim
        return memory[begin : begin + size].view(self.page_tokens, self.heads, dim)

    def parts(self, start: int, count: int) -> list[tuple[int, int, int, int]]:
        """Cut ``count`` tokens from ``start`` on at the pages' borders.

        Returns (page of the table, first row, end row, tokens before it) for each page.
        """
        parts, done = list[tuple[int, int, int, int]](), 0
        while done < count:
            page, row = divmod(start + done, self.page_tokens)
            rows = min(self.page_tokens - row, count - done)
            parts.append((page, row, row + rows, done))
            done += rows
        return parts

    def check_rows(self, where: str, table: Tensor, start: int, count: int) -> None:
        """Check that a table ``[pages]`` on the host has pages for ``count`` tokens.

        Raises:
            InvalidInputError: the tokens begin before the first page, or one has no page.
        """
        if not count:
            return
        first, last = start // self.page_tokens, (start + count - 1) // self.page_tokens
        if start < 0 or last >= table.shape[0] or bool((table[first : last + 1] < 0).any()):
            raise InvalidInputError(
                f"{where}: tokens {start} to {start + count} need pages {first} to {last}, but "
                f"the page table {table.tolist()[:64]} has not all of them"
            )

    def check_table(self, where: str, memory: Tensor, table: Tensor, batch: int) -> None:
        """Check memory and a page table ``[batch, pages]`` against this layout.

        The entries themselves are checked where the table lies on the host.  Negative entries
        mark pages that are not there; no kernel may be asked for their rows.

        Raises:
            InvalidInputError: memory that is not flat; a table of another shape or type; an
                entry that leads out of the memory or is no multiple of what was promised.
        """
        if memory.dim() != 1 or not memory.is_contiguous():
            raise InvalidInputError(
                f"{where}: memory must be a flat contiguous tensor, got {list(memory.shape)} "
                f"with strides {list(memory.stride())}"
            )
        check_int64(where, "page_table", table, (batch, None))
        if table.device.type != "cpu" or not table.numel():
            return
        worst = int(table.max())
        if worst + self.elements > memory.numel():
            raise InvalidInputError(
                f"{where}: the page at element {worst} ends at {worst + self.elements}, but the "
                f"memory has {memory.numel()} elements"
            )
        hint = self.hint(memory.element_size())
        if bool(((table % hint != 0) & (table >= 0)).any()):
            raise InvalidInputError(
                f"{where}: the page table has entries that are no multiple of {hint} elements; "
                f"give the layout the multiple that they keep"
            )


@jit
def page_rows(
    table: tl.tensor,
    pages: tl.tensor,
    position: tl.tensor,
    valid: tl.tensor,
    PAGE_TOKENS: tl.constexpr,
    HINT: tl.constexpr,
) -> tl.tensor:
    """In a kernel: where the tokens at ``position`` lie, through a table of ``pages`` entries.

    Returns (element offsets of their pages, int64; rows inside the pages; which tokens do have
    a page, out of those that were ``valid``).  Nothing outside of the table is read.
    """
    page = position // PAGE_TOKENS
    valid = valid & (position >= 0) & (page < pages)
    base = tl.load(table + page, mask=valid, other=0)
    valid = valid & (base >= 0)
    return tl.multiple_of(base, HINT), position % PAGE_TOKENS, valid
