"""Into which parts pages are cut when they are read from disk while the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tierkv.storage.aligned import ALIGNMENT
from tierkv.storage.types import RangeRead

if TYPE_CHECKING:
    from tierkv.identity.spec import CacheSpec, LayerGroup
    from tierkv.storage.aligned import ByteArray

# Smaller transfers cost a disk more in latency than waiting for less gains.
PART_BYTES = 128 << 10


def layer_parts(group: LayerGroup, least_bytes: int = PART_BYTES) -> list[tuple[int, ...]]:
    """Return the model layers of a group in runs whose range of a page is large enough.

    The first and the last run are a quarter of that: nothing can compute before the first has
    arrived, and the copies of the last one are hidden behind no read.  One run, where a page is
    smaller, or where layers do not begin at multiples of what a disk transfers.
    """
    size, layers = group.layer_bytes, group.layers
    step = max(1, -(-least_bytes // size))
    if size % ALIGNMENT or len(layers) < 2 * step:
        return [layers]
    end = max(1, -(-(least_bytes // 4) // size))
    inner = max(1, (len(layers) - 2 * end) // step)  # runs between the ends
    borders = [end + i * (len(layers) - 2 * end) // inner for i in range(inner + 1)]
    return [layers[a:b] for a, b in pairwise([0, *borders, len(layers)]) if b > a]


class Cut:
    """One part to read: some layers of a group, of several pages.

    Attributes:
        layers: the model layers.
        rows: the pages.
        reads: what to read of each of them.
    """

    __slots__ = ("layers", "reads", "rows")

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.rows: list[int] = []
        self.reads: list[RangeRead] = []

    def add(self, row: int, key: bytes, page: ByteArray, start: int, size: int) -> None:
        """Add a range of a page."""
        self.rows.append(row)
        self.reads.append(RangeRead(key, page.nbytes, start, page[start : start + size]))


def cut_pages(
    spec: CacheSpec,
    pages: Sequence[tuple[int, int, bytes, ByteArray]],
    whole: Sequence[bool],
    least_bytes: int = PART_BYTES,
) -> list[Cut]:
    """Return the parts of pages in the order of the model's layers.

    Args:
        spec: the layer groups.
        pages: row, group, key and destination of each page.
        whole: which pages can only be read whole; they are read with their group's first part.
        least_bytes: least size of a part.
    """
    cuts: list[Cut] = []
    for number, group in enumerate(spec.groups):
        mine = [
            (page, at_once) for page, at_once in zip(pages, whole, strict=True) if page[1] == number
        ]
        for layers in layer_parts(group, least_bytes) if mine else ():
            cut, (start, size) = Cut(layers), group.layer_range(layers[0])
            first = layers[0] == group.layers[0]
            for (row, _, key, place), at_once in mine:
                if not at_once:
                    cut.add(row, key, place, start, size * len(layers))
                elif first:
                    cut.add(row, key, place, 0, place.nbytes)
            cuts.append(cut)
    return sorted(cuts, key=lambda cut: cut.layers[0])
