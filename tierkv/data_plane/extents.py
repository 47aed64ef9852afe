"""Where pages of one layer lie in device memory, as runs at equal distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.identity.spec import LayerGroup


class Extent(NamedTuple):
    """Pages of one layer at equal distances, for consecutive tokens.

    Attributes:
        offset: byte offset of the first page's layer range in the pool's memory.
        stride: bytes from one page's range to the next one's.
        pages: how many.
        start: first token of the first page.
    """

    offset: int
    stride: int
    pages: int
    start: int


def component_views(memory: Tensor, group: LayerGroup, extent: Extent) -> tuple[Tensor, ...]:
    """Return views ``[pages, rows, heads, dim]`` of an extent's components.

    Args:
        memory: the pool's memory as a flat tensor of the group's dtype.
        group: the layer group that the extent's pages belong to.
        extent: which pages.
    """
    size = memory.element_size()
    return tuple(
        memory.as_strided(
            (extent.pages, group.rows, component.heads, component.dim),
            (extent.stride // size, component.elements, component.dim, 1),
            (extent.offset + offset) // size,
        )
        for component, offset in zip(group.components, group.component_offsets, strict=True)
    )


def row_views(
    memory: Tensor, group: LayerGroup, extent: Extent, row: int, count: int
) -> tuple[Tensor, ...]:
    """Return views ``[count, heads, dim]`` of rows of an extent's first page, by component."""
    size = memory.element_size()
    return tuple(
        memory.as_strided(
            (count, component.heads, component.dim),
            (component.elements, component.dim, 1),
            (extent.offset + offset) // size + row * component.elements,
        )
        for component, offset in zip(group.components, group.component_offsets, strict=True)
    )


def gather(
    memory: Tensor,
    group: LayerGroup,
    extents: Sequence[Extent],
    start: int,
    stop: int,
    out: Sequence[Tensor],
) -> None:
    """Copy tokens ``[start, stop)`` out of pages into tensors ``[heads, tokens, dim]``."""
    size = group.page_tokens
    for extent in extents:
        views = component_views(memory, group, extent)
        low, high = max(start, extent.start), min(stop, extent.start + extent.pages * size)
        # Whole pages of an extent go in one strided copy, ragged ends apart.
        head = min(high, -(-low // size) * size)
        tail = max(head, high // size * size)
        for a, b in ((low, head), (head, tail), (tail, high)):
            if b > a:
                for view, tensor in zip(views, out, strict=True):
                    _copy_span(view, size, a - extent.start, tensor[:, a - start : b - start])


def _copy_span(view: Tensor, size: int, at: int, out: Tensor) -> None:
    """Copy ``out``'s tokens, which begin ``at`` rows into ``view``: whole pages or part of one."""
    page, offset = divmod(at, size)
    pages, rest = divmod(out.shape[1], size)
    if rest or offset:
        out.copy_(view[page, offset : offset + out.shape[1]].transpose(0, 1))
        return
    whole = view[page : page + pages]  # [pages, rows, heads, dim]
    out.view(out.shape[0], pages, size, out.shape[2]).copy_(whole.permute(2, 0, 1, 3))
