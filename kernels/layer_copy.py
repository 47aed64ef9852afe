"""Copy one layer's part of many pages between pinned host memory and the device.

A few programs read the pinned memory over the bus themselves (or write it, on the way down)
and loop over all pages: one launch for a whole layer, however many pages it has, and most of
the multiprocessors stay with the model.  Threads move 16 bytes at a time.  Copy engines do the
same with less disturbance when there are few and large ranges; which is quicker where is for
measurement to say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.launch import (
    CONFIGS,
    VECTOR_BYTES,
    check_int64,
    check_same_device,
    jit,
    launch,
    tl,
    use_triton,
)

_WORD = 4  # bytes of what the kernel calls an element; four of them are a vector


@jit
def copy_pages(
    source: tl.tensor,
    target: tl.tensor,
    source_offsets: tl.tensor,
    target_offsets: tl.tensor,
    pages: tl.tensor,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program p copies tiles p, p + PROGRAMS, ... of all pages' tiles."""
    tiles: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for unit in range(tl.program_id(0), pages * tiles, PROGRAMS):
        page = unit // tiles
        at = (unit % tiles) * BLOCK + tl.arange(0, BLOCK)
        begin = tl.multiple_of(tl.load(source_offsets + page) // 4, 4)
        end = tl.multiple_of(tl.load(target_offsets + page) // 4, 4)
        x = tl.load(source + begin + at, mask=at < WORDS, eviction_policy="evict_first")
        tl.store(target + end + at, x, mask=at < WORDS)


def layer_copy_reference(
    source: Tensor,
    target: Tensor,
    source_offsets: Tensor,
    target_offsets: Tensor,
    *,
    nbytes: int,
) -> None:
    """Do what ``layer_copy`` does, page by page."""
    for begin, end in zip(source_offsets.tolist(), target_offsets.tolist(), strict=True):
        target[end : end + nbytes].copy_(source[begin : begin + nbytes], non_blocking=True)


def layer_copy(
    source: Tensor,
    target: Tensor,
    source_offsets: Tensor,
    target_offsets: Tensor,
    *,
    nbytes: int,
    programs: int | None = None,
) -> None:
    """Copy ``nbytes`` at each of some offsets of ``source`` to offsets of ``target``.

    Args:
        source: flat uint8; on the device, or pinned host memory.
        target: flat uint8; likewise.
        source_offsets: int64 ``[pages]`` in bytes, multiples of 16, on the device.
        target_offsets: int64 ``[pages]``, likewise; the ranges must not overlap.
        nbytes: bytes of one range, a multiple of 16.
        programs: how many programs share the work; None: what ``CONFIGS`` says.

    Raises:
        InvalidInputError: memory that is not flat, aligned, and (beside a GPU) pinned; offsets
            of another shape or type, or, on the host, out of bounds.
    """
    triton = use_triton(source, target)
    for name, memory, offsets in (
        ("source", source, source_offsets),
        ("target", target, target_offsets),
    ):
        _check_side(name, memory, offsets, nbytes, pinned=source.is_cuda or target.is_cuda)
    check_int64("layer_copy", "target_offsets", target_offsets, source_offsets.shape)
    gpu = next((m for m in (source, target) if m.is_cuda), source)
    check_same_device(
        "layer_copy", source_offsets=source_offsets, target_offsets=target_offsets, memory=gpu
    )
    pages = source_offsets.shape[0]
    if not nbytes or not pages:
        return
    if not triton:
        layer_copy_reference(source, target, source_offsets, target_offsets, nbytes=nbytes)
        return
    config = CONFIGS["layer_copy"]
    block = config.block // _WORD
    tiles = pages * -(-nbytes // config.block)
    count = min(programs or config.programs, tiles)
    launch(
        copy_pages,
        (count,),
        *(_words(source), _words(target), source_offsets, target_offsets, pages),
        config=config,
        WORDS=nbytes // _WORD,
        PROGRAMS=count,
        BLOCK=block,
    )


def _words(memory: Tensor) -> Tensor:
    return memory[: memory.numel() // VECTOR_BYTES * VECTOR_BYTES].view(torch.int32)


def _check_side(name: str, memory: Tensor, offsets: Tensor, nbytes: int, *, pinned: bool) -> None:
    where = "layer_copy"
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise InvalidInputError(
            f"{where}: {name} must be a flat contiguous uint8 tensor, got {memory.dtype} "
            f"{list(memory.shape)}"
        )
    if memory.data_ptr() % VECTOR_BYTES or nbytes < 0 or nbytes % VECTOR_BYTES:
        raise InvalidInputError(
            f"{where}: {name} must begin at a multiple of {VECTOR_BYTES} bytes (it begins at "
            f"{memory.data_ptr():#x}), and so must its ranges of {nbytes} bytes be long"
        )
    if pinned and not memory.is_cuda and not memory.is_pinned():
        raise InvalidInputError(
            f"{where}: {name} is host memory that is not pinned; a GPU cannot read it"
        )
    check_int64(where, f"{name}_offsets", offsets, (None,))
    if offsets.device.type != "cpu" or not offsets.numel():
        return
    low, high = int(offsets.min()), int(offsets.max())
    if low < 0 or high + nbytes > memory.numel() or bool((offsets % VECTOR_BYTES).any()):
        raise InvalidInputError(
            f"{where}: {name}_offsets from {low} to {high} must be multiples of {VECTOR_BYTES} "
            f"and leave room for {nbytes} of {memory.numel()} bytes"
        )
