"""Overlap in virtual time: the real store on a simulated H100 with PCIe 5 and an NVMe drive.

Modelled are: each batch of copies (``alpha + n / rate`` of the host-device link), the reads of
the drive (see ``overlap_disk.py``), and the computation of each layer, 256 new tokens over the
prefix: FLOPs of Llama-3.1-8B at half of the dense bf16 peak.  What the host itself does takes
no time, but for a microsecond where it asks whether something is done.  Not modelled: the
interference of copies and kernels in the device's memory, and the cost of hashing a prompt.

What is real: every decision and every copy of the data plane.  The bytes that a layer finds
are compared with what they must be, and the device checks the order of every access.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
from overlap_disk import ModelledDrive, read_seconds, through_two
from overlap_rows import (
    BYTE_SCALE,
    LAYERS,
    NAMESPACE,
    NEW_TOKENS,
    PAGE_TOKENS,
    SPEC,
    TOKEN_BYTES,
    make_row,
    pages_of,
    prompt_of,
    push_out,
    same_bits,
    states,
    token_ids,
    write_prefix,
)

from tierkv import Store
from tierkv.devices.sim import SimDevice
from tierkv.devices.sim_model import H100_PCIE5

LAYER_PARAMETERS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
QUERY_WIDTH = 4096  # heads times dim
LONG = 1e6  # virtual seconds
SOURCES = ("device", "host", "disk", "disk_gated", "ring")


def layer_seconds(tokens: int, model=H100_PCIE5) -> float:
    """Return what a layer's forward of the new tokens over a prefix takes.

    Two operations a parameter and token; attention of each new token to the prefix and to
    half of the new ones on average, two matrix products.
    """
    history = tokens + (NEW_TOKENS + 1) / 2
    operations = 2 * LAYER_PARAMETERS * NEW_TOKENS + 4 * QUERY_WIDTH * NEW_TOKENS * history
    return model.compute_seconds(operations)


def layer_loads(source: str, tokens: int, model=H100_PCIE5) -> tuple[list[float], float]:
    """Return the loads of the pipeline's formula, by layer, and what they take without overlap."""
    if source == "device":
        return [0.0] * LAYERS, 0.0
    pages = -(-tokens // PAGE_TOKENS)
    size = pages * PAGE_TOKENS * TOKEN_BYTES / LAYERS
    copies = [model.seconds("h2d", size)] * LAYERS
    if not source.startswith("disk"):
        return copies, sum(copies)
    reads = read_seconds(model, [size] * LAYERS)
    apart = sum(reads) + sum(copies)
    if source == "disk":  # by rule it is all in host memory before the forward begins
        return [sum(reads) + copies[0], *copies[1:]], apart
    return through_two(reads, copies), apart


def run(lengths, folder: Path, sources=SOURCES, check: bool = True):
    """Yield a row for each source and length."""
    for source in sources:
        for tokens in lengths:
            yield measure(source, tokens, folder / f"{source}-{tokens}", check=check)


def measure(source: str, tokens: int, path: Path, *, check: bool = True) -> dict:
    """Return the row of one source and length."""
    prefix = token_ids(tokens)
    on_disk = source.startswith("disk")
    if on_disk:
        with opened(SimDevice(), tokens, path) as store:
            write_prefix(store, prefix)
            assert store.flush().ok
    device = SimDevice(H100_PCIE5, byte_scale=BYTE_SCALE)
    with opened(device, tokens, path if on_disk else None) as store:
        given = {}
        if on_disk:
            ModelledDrive(store, device, BYTE_SCALE)
            given = {"restartable": True} if source == "disk_gated" else {}
        else:
            write_prefix(store, prefix)
            if source != "device":
                push_out(store)
        if source == "ring":
            given = {"device_pages": pages_of(tokens) // 2}
        settle(device)
        ttft = first_token(store, device, prefix, source, check=check, **given)
        store.check()
    loads, apart = layer_loads(source, tokens)
    computes = [layer_seconds(tokens)] * LAYERS
    return make_row("sim", source, tokens, ttft, loads, computes, apart_s=apart)


@contextmanager
def opened(device: SimDevice, tokens: int, path: Path | None):
    """Open a store in whose tiers the prefix fits, on the virtual clock."""
    slots = pages_of(tokens) + 2
    with Store.open(
        path,
        SPEC,
        NAMESPACE,
        device=slots * SPEC.slot_bytes,
        host=max(8, 2 * slots) * SPEC.slot_bytes,
        disk=None if path is None else 2 * slots * (SPEC.slot_bytes + 4096),
        torch_device=device,
        clock=device.now,
    ) as store:
        yield store


def first_token(
    store, device: SimDevice, prefix: np.ndarray, source: str, *, check: bool, **given
) -> float:
    """Return the virtual time from the begin of a turn to the end of its last layer."""
    tokens, seconds = len(prefix), layer_seconds(len(prefix))
    started = device.now()
    with store.begin(prompt_of(prefix), **given) as sequence:
        tier = {"disk_gated": "disk", "ring": "host"}.get(source, source)
        assert getattr(sequence.found, tier) == tokens, sequence.found
        assert bool(sequence.spilled_pages) == (source == "ring")
        for layer in range(LAYERS):
            with sequence.gate.layer(layer) as view:
                if check:
                    assert same_bits(view.read(), states(layer, tokens)), f"layer {layer}"
                view.append(*states(LAYERS + layer, NEW_TOKENS))
                reads = [part for extent in view.extents() for part in view.views(extent)]
                device.compute.run(f"layer {layer}", seconds, reads=reads)
        assert device.compute.record().wait(LONG)
        ended = device.now()
    return ended - started


def settle(device: SimDevice) -> None:
    """Let everything come to rest that was started before."""
    for stream in (device.compute, device.stream("load"), device.stream("save")):
        assert stream.record().wait(LONG)
