"""Kernels against their references on the GPU: what moves bytes, and the codecs, to the bit.

The references run on copies in host memory, so that nothing of the device is shared.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from gpu_check_pages import LLAMA, Pages, Shape
from gpu_check_support import DTYPES, Check, same_bits

from tierkv.kernels.append import append, append_reference
from tierkv.kernels.checksum import checksum, checksum_reference
from tierkv.kernels.dequantise import dequantise, dequantise_reference
from tierkv.kernels.foreign import ForeignLayer
from tierkv.kernels.gather import gather, gather_reference
from tierkv.kernels.layer_copy import layer_copy
from tierkv.kernels.quantise import quantise, quantise_reference
from tierkv.kernels.quantised import SCHEMES, QuantisedLayout
from tierkv.kernels.scatter import scatter, scatter_reference

SMALL = Shape("small 2x2x64", heads=2, group=2, dim=64)


def run_copies(check: Check) -> None:
    """Append, gather, scatter, layer copies and checksums."""
    shape = SMALL if check.small else LLAMA
    for name, dtype in DTYPES.items():
        pages = Pages(check, shape, [45, 16] if check.small else [4096, 1000, 17], dtype)
        for what, one in (("append", check_append), ("gather and scatter", check_foreign)):
            label = f"{what} {name} {shape.name}"
            with check.guarded(label):
                check.row(label, ok=one(check, pages))
    for size in (4096,) if check.small else (4096, 64 << 10, (1 << 20) + 48):
        with check.guarded(f"layer_copy {size} bytes"):
            down, up = check_layer_copy(check, size, 8)
            check.row(f"layer_copy {size} bytes, host to device", ok=up)
            check.row(f"layer_copy {size} bytes, device to host", ok=down)
        with check.guarded(f"checksum {size} bytes"):
            check.row(f"checksum {size} bytes", ok=check_checksum(check, size // 8 * 8))


def check_append(check: Check, pages: Pages) -> bool:
    """Overwrite the last tokens of each row, of different number."""
    batch, layout = len(pages.lengths), pages.layout
    tokens = 7
    counts = torch.arange(batch, dtype=torch.int64) % 3 * 2 + 3
    starts = pages.lengths.cpu().long() - counts
    k, v = (
        check.random(batch, layout.heads, tokens, layout.dim, dtype=pages.dtype, seed=seed)
        for seed in (5, 6)
    )
    twin = pages.memory.cpu().clone()
    append_reference(
        twin,
        pages.table.cpu(),
        [x.cpu().transpose(1, 2) for x in (k, v)],
        layout=layout,
        starts=starts,
        counts=counts,
    )
    mine = pages.memory.clone()
    where = {"starts": starts.to(check.device), "counts": counts.to(check.device)}
    append(mine, pages.table, k, v, layout=layout, **where)
    return same_bits(mine, twin) and not same_bits(mine, pages.memory)


def check_foreign(check: Check, pages: Pages) -> bool:
    """Scatter a row into each layout of an engine's pool, and gather it into other pages."""
    layout, length = pages.layout, int(pages.lengths[0])
    table = pages.table[0].contiguous()
    blocks, size = -(-length // 16) + 2, 16
    made = torch.Generator().manual_seed(7)
    slots = torch.randperm(blocks * size, generator=made)[:length]
    slots[3] = -1
    good = True
    shapes = ((2, blocks, size), (blocks, 2, size))
    for axis, first in enumerate(shapes):
        pool = check.random(*first, layout.heads, layout.dim, dtype=pages.dtype, seed=8)
        theirs, host = pool.clone(), pool.cpu().clone()
        given = {"layout": layout, "start": 0}
        scatter(
            ForeignLayer.from_vllm(theirs, kv_axis=axis),
            slots.to(check.device),
            pages.memory,
            table,
            **given,
        )
        memory = pages.memory.cpu()
        at_home = ForeignLayer.from_vllm(host, kv_axis=axis)
        scatter_reference(at_home, slots, memory, table.cpu(), **given)
        good &= same_bits(theirs, host) and not same_bits(theirs, pool)
        mine, twin = torch.zeros_like(pages.memory), torch.zeros_like(memory)
        gather(
            ForeignLayer.from_vllm(theirs, kv_axis=axis),
            slots.to(check.device),
            mine,
            table,
            **given,
        )
        gather_reference(at_home, slots, twin, table.cpu(), **given)
        good &= same_bits(mine, twin) and bool(mine.any())
    return good


def pinned_memory(device, size: int) -> torch.Tensor:
    """Return host memory, flat, registered with a device until that is closed."""
    area = mmap.mmap(-1, size)
    device.pin(memoryview(area))
    return torch.from_numpy(np.frombuffer(area, np.uint8))


def check_layer_copy(check: Check, size: int, count: int) -> tuple[bool, bool]:
    """Copy ranges down and up again; return whether each way was right."""
    device = check.open_device()
    step = size + 4096
    there = torch.randint(0, 256, (count * step,), dtype=torch.uint8).to(check.device)
    host = pinned_memory(device, -(-count * step // 4096) * 4096)
    offsets = (torch.randperm(count) * step // 16 * 16).to(check.device)
    others = offsets.flip(0).contiguous()
    layer_copy(there, host, offsets, others, nbytes=size)
    check.sync()
    pairs = list(zip(offsets.tolist(), others.tolist(), strict=True))
    down = all(same_bits(there[a : a + size], host[b : b + size]) for a, b in pairs)
    back = torch.zeros_like(there)
    layer_copy(host, back, others, offsets, nbytes=size)
    check.sync()
    up = all(same_bits(back[a : a + size], there[a : a + size]) for a, _ in pairs)
    device.close()
    return down, up


def check_checksum(check: Check, size: int) -> bool:
    """Take checksums of ranges, and see one of them change with a bit."""
    memory = torch.randint(0, 256, (5 * (size + 16),), dtype=torch.uint8)
    offsets = torch.arange(5) * ((size + 15) // 16 * 16)
    there, where = memory.to(check.device), offsets.to(check.device)
    right = checksum_reference(memory, offsets, nbytes=size)
    good = torch.equal(checksum(there, where, nbytes=size).cpu(), right)
    there[int(offsets[2]) + size // 2] ^= 4
    changed = checksum(there, where, nbytes=size).cpu() != right
    return good and changed.tolist() == [False, False, True, False, False]


def run_codecs(check: Check) -> None:
    """Quantise and dequantise, every scheme and type: the reference's bytes."""
    shapes = [SMALL] if check.small else [LLAMA, Shape("8x96", heads=8, group=1, dim=96)]
    for name, dtype in DTYPES.items():
        for scheme in SCHEMES:
            for shape in shapes:
                label = f"{scheme} {name} {shape.name}"
                with check.guarded(label):
                    there, back = check_codec(check, scheme, shape, dtype)
                    check.row(f"quantise {label}", ok=there)
                    check.row(f"dequantise {label}", ok=back)


def quantised_layout(scheme: str, shape: Shape) -> QuantisedLayout:
    """Return how a shape's pages are quantised."""
    return QuantisedLayout(
        scheme=scheme, page_tokens=shape.page_tokens, heads=shape.heads, dim=shape.dim
    )


def check_codec(check: Check, scheme: str, shape: Shape, dtype: torch.dtype) -> tuple[bool, bool]:
    """Quantise pages, one of them filled in part, and turn them back."""
    pages = Pages(check, shape, [100 if check.small else 1000], dtype)
    quantised = quantised_layout(scheme, shape)
    places = pages.places
    count = places.shape[0]
    data_table = torch.arange(count, device=check.device).flip(0) * quantised.layer_bytes
    rows = torch.full((count,), shape.page_tokens, dtype=torch.int64)
    rows[-1] = shape.page_tokens // 3
    empty = torch.zeros(count * quantised.layer_bytes, dtype=torch.uint8)
    given = {"layout": pages.layout, "quantised": quantised}

    mine, twin = empty.to(check.device), empty.clone()
    memory, at_home = pages.memory.cpu(), places.cpu()
    quantise(pages.memory, places, mine, data_table, rows=rows.to(check.device), **given)
    quantise_reference(memory, at_home, twin, data_table.cpu(), rows=rows, **given)
    there = same_bits(mine, twin) and bool(twin.any())

    back, back_twin = torch.zeros_like(pages.memory), torch.zeros_like(memory)
    dequantise(mine, data_table, back, places, rows=rows.to(check.device), **given)
    dequantise_reference(twin, data_table.cpu(), back_twin, at_home, rows=rows, **given)
    return there, same_bits(back, back_twin) and bool(back_twin.any())
