"""Decode attention over pages: bytes of K and V a second, against the memory and against SDPA.

The memory's bandwidth is that of a copy inside the device, its reads and writes added up.
Each shape has several sets of pages, used in turn, so that the caches of the chip hold none.
Kernels are measured as they are called (``eager``) and out of a CUDA graph, which costs no
launches; the goal is about the latter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from gpu_check_attention import paged
from gpu_check_pages import LLAMA, Pages, Shape
from gpu_check_support import GIB, MIB, Check
from torch.nn.functional import scaled_dot_product_attention

from tierkv.kernels.paged_decode import paged_decode
from tierkv.kernels.quantised import QuantisedLayout
from tierkv.kernels.quantised_attention import quantised_decode

GOAL = 0.8  # of the memory's bandwidth, where there are bytes enough to fill the chip
CASES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (32, 8192))
SMALL_CASES = ((1, 64), (2, 40))
LEAST_BYTES = 512 * MIB  # of the sets of a case together
GOAL_BYTES = 64 * MIB  # of a call: below, what a launch costs shows


@dataclass
class Setup:
    """One case: sets of pages and the queries that ask them."""

    pages: list[Pages]
    q: torch.Tensor
    call_bytes: int


def run(check: Check) -> None:
    """Measure the memory, then every case."""
    memory = memory_rate(check)
    check.row("copy inside the device, reads and writes", memory, "GB/s")
    shape = Shape("small", heads=2, group=2, dim=64) if check.small else LLAMA
    for batch, tokens in SMALL_CASES if check.small else CASES:
        label = f"decode bf16 batch {batch}, {tokens} tokens"
        with check.guarded(label):
            setup = prepare(check, shape, batch, tokens)
            measure(check, label, setup, memory)
        if check.is_cuda:
            setup = None
            torch.cuda.empty_cache()


def memory_rate(check: Check) -> float:
    """Return GB/s of a copy inside the device."""
    size = MIB if check.small else GIB
    source = torch.ones(size, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    return 2 * size / check.seconds(lambda: target.copy_(source)) / 1e9


def prepare(check: Check, shape: Shape, batch: int, tokens: int) -> Setup:
    """Make sets of pages and queries."""
    call_bytes = batch * tokens * shape.heads * shape.dim * 2 * 2
    sets = 2 if check.small else max(2, LEAST_BYTES // call_bytes)
    pages = Pages(check, shape, [tokens] * batch, torch.bfloat16)
    made = [pages]
    for _ in range(sets - 1):  # the same pages elsewhere
        other = copy.copy(pages)
        other.memory = pages.memory.clone()
        made.append(other)
    q = check.random(batch, shape.heads * shape.group, shape.dim, dtype=torch.bfloat16, seed=2)
    return Setup(made, q, call_bytes)


def measure(check: Check, label: str, setup: Setup, memory: float) -> None:
    """Measure a case in every way."""
    goal = GOAL if setup.call_bytes >= GOAL_BYTES and check.is_cuda else None
    ours = [decode_call(setup, pages) for pages in setup.pages]
    theirs = [sdpa_call(check, setup, pages) for pages in setup.pages[:1]]
    seconds = each(check, ours)
    rate = setup.call_bytes / seconds / 1e9
    check.row(f"{label}, eager", rate, "GB/s", ratio=rate / memory)
    by_graph = None
    if check.is_cuda:
        with check.guarded(f"{label}, graph"):
            by_graph = graph_seconds(check, ours)
            rate = setup.call_bytes / by_graph / 1e9
            check.row(f"{label}, graph", rate, "GB/s", ratio=rate / memory, goal=goal)
    with check.guarded(f"{label}, SDPA"):
        # SDPA reads one set again and again: in its favour where the caches hold it.
        sdpa = graph_seconds(check, theirs) if check.is_cuda else each(check, theirs)
        best = seconds if by_graph is None else by_graph
        rate = setup.call_bytes / sdpa / 1e9
        check.row(f"{label}, SDPA on contiguous K and V", rate, "GB/s", times_ours=sdpa / best)
    with check.guarded(f"{label}, int8"):
        calls, size = int8_calls(check, setup)
        seconds = graph_seconds(check, calls) if check.is_cuda else each(check, calls)
        rate = size / seconds / 1e9
        check.row(f"{label}, int8 pages", rate, "GB/s", ratio=rate / memory)


def decode_call(setup: Setup, pages: Pages):
    """Return a call of paged decode."""
    out, where = torch.empty_like(setup.q), paged(pages.shape, pages.layout)
    scale = pages.shape.dim**-0.5

    def call() -> None:
        paged_decode(
            setup.q, pages.memory, pages.table, pages.lengths, out=out, scale=scale, **where
        )

    return call


def sdpa_call(check: Check, setup: Setup, pages: Pages):
    """Return a call of PyTorch's attention on contiguous keys and values of the same size."""
    shape, batch, tokens = pages.shape, len(pages.lengths), int(pages.lengths[0])
    k = torch.empty(batch, shape.heads, tokens, shape.dim, dtype=pages.dtype, device=check.device)
    k.copy_(check.random(1, 1, 1, shape.dim, dtype=pages.dtype))
    v, q = k.clone(), setup.q.unsqueeze(2)
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)


def int8_calls(check: Check, setup: Setup):
    """Return calls over int8 pages of any content, and the bytes that each reads."""
    pages = setup.pages[0]
    shape, places = pages.shape, pages.places.shape[0]
    layout = QuantisedLayout(
        scheme="int8", page_tokens=shape.page_tokens, heads=shape.heads, dim=shape.dim
    )
    table = torch.full_like(pages.table, -1)
    table[pages.table >= 0] = torch.arange(places, device=check.device) * layout.layer_bytes
    given = {"quantised": layout, "scale": shape.dim**-0.5}
    calls = []
    for _ in setup.pages:
        data = torch.zeros(places * layout.layer_bytes, dtype=torch.uint8, device=check.device)

        def call(data: torch.Tensor = data) -> None:
            quantised_decode(setup.q, data, table, pages.lengths, **given)

        calls.append(call)
    return calls, places * layout.layer_bytes


def each(check: Check, calls) -> float:
    """Return the seconds of one of some calls, made in turn."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return check.seconds(all_of_them) / len(calls)


def graph_seconds(check: Check, calls) -> float:
    """Return the seconds of one of some calls, out of a CUDA graph of all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled before they are captured
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return check.seconds(graph.replay) / len(calls)
