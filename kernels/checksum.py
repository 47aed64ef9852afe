"""Checksums of ranges of bytes where they lie, on the device.

For telling whether bytes that moved between device memories, or lie in them, are still the
same.  It is not the checksum of the disk (xxh3, which runs through its bytes in order): this
one may be taken in any order and in pieces, which is what a GPU wants.

With the range's little-endian 64-bit words ``w[0] .. w[n-1]``, and all arithmetic modulo 2**64:

    checksum = n * GOLDEN + sum of mix(w[i] xor (i + 1) * GOLDEN)
    mix(x):    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
               x ^= x >> 27;  x *= 0x94D049BB133111EB
               x ^= x >> 31

``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford), a
bijection: a change within one word is always seen.  Other changes, words in the wrong places
among them, pass with a probability of about 2**-64.  It is no protection against intent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError
from tierkv.kernels.launch import (
    CONFIGS,
    check_int64,
    check_same_device,
    jit,
    launch,
    tl,
    use_triton,
)

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = 8


@jit
def sum_words(
    memory: tl.tensor,
    offsets: tl.tensor,
    sums: tl.tensor,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (range, part): adds the mixed words of its tiles to the range's sum."""
    page = tl.program_id(0).to(tl.int64)
    begin = tl.multiple_of(tl.load(offsets + page) // 8, 2)
    total = tl.zeros([BLOCK], tl.uint64)
    for tile in range(tl.program_id(1), (WORDS + BLOCK - 1) // BLOCK, PROGRAMS):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(memory + begin + at, mask=at < WORDS, other=0).to(tl.uint64, bitcast=True)
        x = x ^ ((at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        total += tl.where(at < WORDS, x, 0)
    tl.atomic_add(sums + page, tl.sum(total, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


def _signed(x: int) -> int:
    """Return the int64 that has the bits of ``x`` modulo 2**64."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift int64 to the right, zeros coming in."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def checksum_reference(memory: Tensor, offsets: Tensor, *, nbytes: int) -> Tensor:
    """Return what ``checksum`` returns, range by range."""
    words = nbytes // _WORD
    keys = torch.arange(1, words + 1, device=memory.device) * _signed(_GOLDEN)
    sums = torch.full_like(offsets, _signed(words * _GOLDEN))
    for i, begin in enumerate(offsets.tolist()):
        x = memory[begin : begin + nbytes].view(torch.int64) ^ keys
        x = (x ^ _shift(x, 30)) * _signed(_FIRST)
        x = (x ^ _shift(x, 27)) * _signed(_SECOND)
        sums[i] += (x ^ _shift(x, 31)).sum()
    return sums


def checksum(memory: Tensor, offsets: Tensor, *, nbytes: int) -> Tensor:
    """Return the checksums of ranges of ``nbytes`` bytes, such as the layer ranges of pages.

    Args:
        memory: flat uint8.
        offsets: int64 ``[ranges]`` in bytes, multiples of 16.
        nbytes: bytes of a range, a multiple of 8.

    Returns:
        int64 ``[ranges]`` on the memory's device: the bits of the unsigned checksums.

    Raises:
        InvalidInputError: memory that is not flat; a length or, on the host, offsets that are
            no such multiples or lead out of the memory.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise InvalidInputError(
            f"checksum: memory must be a flat contiguous uint8 tensor, got {memory.dtype} "
            f"{list(memory.shape)}"
        )
    if nbytes < 0 or nbytes % _WORD or memory.data_ptr() % _WORD:
        raise InvalidInputError(
            f"checksum: ranges of {nbytes} bytes in memory at {memory.data_ptr():#x}: both must "
            f"be multiples of {_WORD}"
        )
    check_int64("checksum", "offsets", offsets, (None,))
    check_same_device("checksum", memory=memory, offsets=offsets)
    if offsets.device.type == "cpu" and offsets.numel():
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + nbytes > memory.numel() or bool((offsets % 16).any()):
            raise InvalidInputError(
                f"checksum: offsets from {low} to {high} must be multiples of 16 and leave room "
                f"for {nbytes} of {memory.numel()} bytes"
            )
    if not use_triton(memory):
        return checksum_reference(memory, offsets, nbytes=nbytes)
    words = nbytes // _WORD
    sums = torch.full_like(offsets, _signed(words * _GOLDEN))
    if not words:
        return sums
    config = CONFIGS["checksum"]
    programs = min(config.programs, -(-words // config.block))
    launch(
        sum_words,
        (offsets.shape[0], programs),
        *(memory[: memory.numel() // _WORD * _WORD].view(torch.int64), offsets, sums),
        config=config,
        WORDS=words,
        PROGRAMS=programs,
        BLOCK=config.block,
    )
    return sums
