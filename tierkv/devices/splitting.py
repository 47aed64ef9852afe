"""Splits copies between strided tensors into the two-dimensional copies that hardware knows.

A pure function of addresses, shapes and strides; nothing is copied here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.devices.base import CopyOp

MAX_PITCH = 2**31 - 1  # of cudaMemcpy2D (cudaDevAttrMaxPitch)


class Copy2D(NamedTuple):
    """``height`` rows of ``width`` bytes; row i starts i pitches behind the first.

    Attributes:
        target, source: addresses.
        target_pitch, source_pitch: bytes from row to row; ``width`` where height is 1.
    """

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int

    @property
    def size(self) -> int:
        """Bytes copied."""
        return self.width * self.height

    def rows(self) -> Iterator[Copy2D]:
        """Yield the rows, each a copy of one run of bytes."""
        width = self.width
        for row in range(self.height):
            target = self.target + row * self.target_pitch
            yield Copy2D(target, width, self.source + row * self.source_pitch, width, width, 1)


class _Dim(NamedTuple):
    size: int
    target: int  # stride in bytes
    source: int


def split_copies(ops: Sequence[CopyOp]) -> list[Copy2D]:
    """Return copies of two dimensions that together do what ``ops`` do.

    Dimensions that are contiguous on both sides are merged, and so are copies that continue
    each other, at one run of bytes or at equal distances.

    Raises:
        InvalidInputError: an operation's tensors differ in shape or element size.
    """
    plan: list[Copy2D] = []
    for op in ops:
        for copy in split(op):
            joined = _join(plan[-1], copy) if plan else None
            if joined is None:
                plan.append(copy)
            else:
                plan[-1] = joined
    return plan


def split(op: CopyOp) -> Iterator[Copy2D]:
    """Yield the copies of two dimensions of one operation."""
    target, source = op.destination, op.source
    if target.shape != source.shape or target.element_size() != source.element_size():
        raise InvalidInputError(
            f"a copy needs two tensors of one shape and element size, got {tuple(source.shape)} "
            f"of {source.element_size()} bytes to {tuple(target.shape)} of "
            f"{target.element_size()}"
        )
    if target.numel() == 0:
        return
    width, dims = _merge(target, source)
    yield from _emit(target.data_ptr(), source.data_ptr(), width, dims)


def _merge(target: Tensor, source: Tensor) -> tuple[int, list[_Dim]]:
    """Return the bytes of the innermost run, and the other dimensions, outermost first."""
    width = target.element_size()
    dims = [
        _Dim(size, to * width, of * width)
        for size, to, of in zip(target.shape, target.stride(), source.stride(), strict=True)
        if size > 1
    ]
    dims.sort(key=lambda dim: -dim.target)  # bytes may be copied in any order
    merged: list[_Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if last and last.target == dim.size * dim.target and last.source == dim.size * dim.source:
            merged[-1] = _Dim(last.size * dim.size, dim.target, dim.source)
        else:
            merged.append(dim)
    while merged and merged[-1].target == width == merged[-1].source:
        width *= merged.pop().size
    return width, merged


def _emit(target: int, source: int, width: int, dims: list[_Dim]) -> Iterator[Copy2D]:
    """Yield copies of the two largest dimensions that one copy can take."""
    rows = max(
        (dim for dim in dims if _pitches_fit(width, dim.target, dim.source)),
        key=lambda dim: dim.size,
        default=_Dim(1, width, width),
    )
    others = [dim for dim in dims if dim is not rows]
    for at in product(*(range(dim.size) for dim in others)):
        yield Copy2D(
            target + sum(i * dim.target for i, dim in zip(at, others, strict=True)),
            rows.target,
            source + sum(i * dim.source for i, dim in zip(at, others, strict=True)),
            rows.source,
            width,
            rows.size,
        )


def _pitches_fit(width: int, *pitches: int) -> bool:
    return all(width <= pitch <= MAX_PITCH for pitch in pitches)


def _join(last: Copy2D, new: Copy2D) -> Copy2D | None:
    """Return one copy for two that continue each other, None where they do not."""
    ends = last.target + last.width, last.source + last.width
    if last.height == new.height == 1 and (new.target, new.source) == ends:
        width = last.width + new.width
        return Copy2D(last.target, width, last.source, width, width, 1)
    if last.width != new.width:
        return None
    if last.height == 1:
        pitches = new.target - last.target, new.source - last.source
        if not _pitches_fit(last.width, *pitches):
            return None
    else:
        pitches = last.target_pitch, last.source_pitch
    if new.height > 1 and (new.target_pitch, new.source_pitch) != pitches:
        return None
    follows = (
        new.target == last.target + last.height * pitches[0]
        and new.source == last.source + last.height * pitches[1]
    )
    if not follows:
        return None
    return Copy2D(
        last.target, pitches[0], last.source, pitches[1], last.width, last.height + new.height
    )


def byte_ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the address ranges ``[start, stop)`` that a tensor's elements lie in."""
    if tensor.numel() == 0:
        return []
    start, width = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return [(start, start + tensor.numel() * width)]
    dims = sorted(
        (
            (stride * width, size)
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if size > 1 and stride
        )
    )
    while dims and dims[0][0] <= width:
        stride, size = dims.pop(0)
        width += stride * (size - 1)
    if not dims:
        return [(start, start + width)]
    offsets = [0]
    for stride, size in reversed(dims):
        offsets = [at + i * stride for at in offsets for i in range(size)]
    assert len(offsets) == math.prod(size for _, size in dims)
    return [(start + at, start + at + width) for at in offsets]
