"""Byte views of another engine's paged tensors: where block b of a layer lies.

Nothing is laid out anew.  A layer's block may be one tensor or several parts (K and V
apart), whose bytes follow each other inside the page; blocks may be padded, and the inside
of a block may be strided.  Where the layers of a group lie at equal distances, one strided
view covers all of them, so that a run of blocks moves in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from tierkv.identity.spec import CacheSpec, LayerGroup

PoolTensors = Mapping[int, Tensor | Sequence[Tensor]]
_MAX_WORK: Any = 1_000_000  # of an exact comparison of two views' addresses


@dataclass(frozen=True, slots=True)
class Plane:
    """One part of some layers' blocks.

    Attributes:
        first_layer: position in the group of the first layer.
        layers: how many layers.
        offset: where the part begins inside a block of the page.
        bytes: how long it is.
        memory: uint8 ``[blocks, layers, *inside of the part]``, sharing the engine's memory.
    """

    first_layer: int
    layers: int
    offset: int
    bytes: int
    memory: Tensor

    @property
    def packed(self) -> tuple[int, ...]:
        """Strides of the part's inside where it lies in a page: without gaps."""
        strides, reach = list[int](), 1
        for length in self.memory.shape[:1:-1]:
            strides.append(reach)
            reach *= length
        return tuple(strides[::-1])


class GroupView:
    """The blocks of one layer group in the engine's tensors."""

    def __init__(self, group: LayerGroup, tensors: PoolTensors) -> None:
        """Check the tensors of a group's layers and make views of them.

        Raises:
            InvalidInputError: a shape or size that does not fit the group.
        """
        parts = [_parts(group, layer, tensors[layer]) for layer in group.layers]
        counts = {part.shape[0] for layer in parts for part in layer}
        if len(counts) != 1:
            raise InvalidInputError(
                f"attach: layer group {group.name!r}: all tensors must have the same number of "
                f"blocks (their first dimension), got {sorted(counts)}"
            )
        self.group = group
        self.num_blocks: int = counts.pop()
        self.blocks_per_page = group.blocks_per_page
        self.block_bytes = group.layer_bytes // self.blocks_per_page
        self.addresses = [_addresses(part) for layer in parts for part in layer]
        self.planes = _planes(parts)

    def check_apart(self) -> None:
        """Refuse layers or blocks that share bytes: each must have a state of its own."""
        for part in self.addresses:
            if _folds(part):
                raise InvalidInputError(
                    f"attach: layer group {self.group.name!r}: blocks overlap each other "
                    f"(shape {part.shape}, strides {part.strides} bytes)"
                )
        if any(_share(a, b) for a, b in _near(self.addresses, self.addresses)):
            raise InvalidInputError(
                f"attach: layer group {self.group.name!r}: two of its layers share bytes; name a "
                "tensor that several layers share once, under the first layer that uses it"
            )

    def overlays(self, other: GroupView) -> bool:
        """Return whether a block id names the same bytes in both groups.

        Raises:
            InvalidInputError: they share bytes in a way that block ids do not show.
        """
        shared = [(a, b) for a, b in _near(self.addresses, other.addresses) if _share(a, b)]
        for a, b in shared:
            even = len(a) == len(b) and a.strides[0] == b.strides[0]
            if not even or _share(a[:1], b[1:]) or _share(a[1:], b[:1]):
                raise InvalidInputError(
                    f"attach: layer groups {self.group.name!r} and {other.group.name!r} share "
                    "memory, but not block by block: a block id must mean the same bytes in both"
                )
        return bool(shared)


def group_views(spec: CacheSpec, tensors: PoolTensors, torch_device: str) -> list[GroupView]:
    """Return the views of all groups, checked against the spec.

    Raises:
        InvalidInputError: layers that are missing, unknown, elsewhere or of another size.
    """
    expected = set(spec.layer_to_group)
    if set(tensors) != expected:
        raise InvalidInputError(
            f"attach: tensors are given for layers {sorted(tensors)}, but the spec has "
            f"{sorted(expected)}"
        )
    for layer, given in tensors.items():
        for part in [given] if isinstance(given, Tensor) else given:
            if not isinstance(part, Tensor) or not part.dim() or not part.numel():
                raise InvalidInputError(
                    f"attach: layer {layer}: expected tensors [num_blocks, ...], got "
                    f"{tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__}"
                )
            if part.device.type != torch.device(torch_device).type:
                raise InvalidInputError(
                    f"attach: layer {layer} lies on {part.device}, but the store was opened with "
                    f"torch_device={torch_device!r}"
                )
    views = [GroupView(group, tensors) for group in spec.groups]
    for view in views:
        view.check_apart()
    return views


def domains(views: Sequence[GroupView]) -> list[int]:
    """Return, for each group, a number that groups with common memory share."""
    numbers = list(range(len(views)))
    for i, view in enumerate(views):
        for j in range(i):
            if numbers[i] != numbers[j] and view.overlays(views[j]):
                numbers = [numbers[j] if n == numbers[i] else n for n in numbers]
    return numbers


def _parts(group: LayerGroup, layer: int, given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return a layer's parts as uint8 views ``[blocks, inside...]``."""
    parts = [_as_bytes(p) for p in ([given] if isinstance(given, Tensor) else given)]
    sizes = [part[0].numel() for part in parts]
    expected = group.layer_bytes // group.blocks_per_page
    if sum(sizes) != expected:
        raise InvalidInputError(
            f"attach: layer {layer} of group {group.name!r}: a block has "
            f"{' + '.join(map(str, sizes)) or 0} bytes, but the spec says {expected}"
        )
    return parts


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a tensor, the inside of a block as few dimensions as possible."""
    size = tensor.element_size()
    dims: list[tuple[int, int]] = [(size, 1)]  # (length, stride) in bytes, innermost first
    for length, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        inner_length, inner_stride = dims[-1]
        if length == 1:
            continue
        if stride * size == inner_length * inner_stride:
            dims[-1] = (length * inner_length, inner_stride)
        else:
            dims.append((length, stride * size))
    dims = [(tensor.shape[0], tensor.stride(0) * size), *dims[::-1]]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        tuple(length for length, _ in dims),
        tuple(stride for _, stride in dims),
    )


def _planes(parts: Sequence[Sequence[Tensor]]) -> list[Plane]:
    """Join the layers whose parts lie at equal distances into one plane a part."""
    if len({tuple(part.shape for part in layer) for layer in parts}) > 1:
        return [plane for at, layer in enumerate(parts) for plane in _one_layer(at, layer)]
    planes: list[Plane] = []
    offset = 0
    for column in zip(*parts, strict=True):
        size = column[0][0].numel()
        step = _equal_steps(column)
        if step is None:
            planes += [Plane(at, 1, offset, size, p.unsqueeze(1)) for at, p in enumerate(column)]
        else:
            first = column[0]
            shape = (first.shape[0], len(column), *first.shape[1:])
            stride = (first.stride(0), step, *first.stride()[1:])
            planes.append(Plane(0, len(column), offset, size, first.as_strided(shape, stride)))
        offset += size
    return planes


def _one_layer(at: int, layer: Sequence[Tensor]) -> Iterable[Plane]:
    offset = 0
    for part in layer:
        yield Plane(at, 1, offset, part[0].numel(), part.unsqueeze(1))
        offset += part[0].numel()


def _equal_steps(column: Sequence[Tensor]) -> int | None:
    """Return the distance in bytes from layer to layer, None when it differs or is negative."""
    first = column[0]
    if len(column) == 1:
        return None
    step = int(column[1].storage_offset()) - int(first.storage_offset())
    for at, part in enumerate(column):
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.stride() != first.stride()
            or part.storage_offset() != first.storage_offset() + at * step
        ):
            return None
    return step if step > 0 else None


# -- addresses ---------------------------------------------------------------------------


class _Addresses:
    """Says to numpy where a tensor's bytes lie; nothing is ever read through it."""

    def __init__(self, part: Tensor) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (part.data_ptr(), True),
            "shape": tuple(part.shape),
            "strides": tuple(part.stride()),
        }


Addresses = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def _addresses(part: Tensor) -> Addresses:
    return np.asarray(_Addresses(part))


def _near(a: Sequence[Addresses], b: Sequence[Addresses]) -> list[tuple[Addresses, Addresses]]:
    """Return the pairs whose spans overlap, each pair once."""
    same = a is b
    return [
        (x, y)
        for i, x in enumerate(a)
        for y in (b[i + 1 :] if same else b)
        if np.may_share_memory(x, y)
    ]


def _share(a: Addresses, b: Addresses) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=_MAX_WORK))
    except np.exceptions.TooHardError as error:
        raise InvalidInputError(
            f"attach: cannot tell whether tensors of strides {a.strides} and {b.strides} bytes "
            "share memory; give each layer tensors of a simpler layout"
        ) from error


def _folds(part: Addresses) -> bool:
    """Return whether two elements of one view may share an address."""
    reach = 1
    for stride, length in sorted(zip(part.strides, part.shape, strict=True)):
        if length > 1 and stride < reach:
            return True
        reach = max(reach, stride * (length - 1) + reach)
    return False
