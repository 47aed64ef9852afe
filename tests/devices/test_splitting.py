"""Strided copies become two-dimensional ones: the plan is carried out with numpy here."""

import ctypes

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tierkv import InvalidInputError
from tierkv.devices.base import CopyOp
from tierkv.devices.splitting import Copy2D, byte_ranges, split, split_copies

ROOM = 1 << 14


def carry_out(plan):
    """Do what cudaMemcpy2D does, and hold it to its limits."""
    for copy in plan:
        assert copy.width > 0
        assert copy.height > 0
        assert copy.height == 1 or min(copy.target_pitch, copy.source_pitch) >= copy.width
        for row in range(copy.height):
            ctypes.memmove(
                copy.target + row * copy.target_pitch,
                copy.source + row * copy.source_pitch,
                copy.width,
            )


@st.composite
def layout(draw, shape, at):
    """Strides that keep elements apart: padded, permuted but for the last dimension."""
    strides, span = [0] * len(shape), shape[-1]
    strides[-1] = 1
    for dim in draw(st.permutations(range(len(shape) - 1))):
        span += draw(st.sampled_from([0, 0, 1, 5]))
        strides[dim] = span
        span *= shape[dim]
    return tuple(strides), at + draw(st.integers(0, 9)), span


@st.composite
def batches(draw):
    """Up to four copies of up to four dimensions, one behind the other in both buffers."""
    made, ends = [], [0, 0]
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
        sides = []
        for side in (0, 1):
            strides, start, span = draw(layout(shape, ends[side]))
            ends[side] = start + span
            sides.append((strides, start))
        made.append((shape, sides))
    return made


@given(batch=batches(), seed=st.integers(0, 99))
@settings(max_examples=120, deadline=None)
def test_the_plan_does_what_the_copies_say(batch, seed):
    source = torch.from_numpy(np.random.default_rng(seed).integers(1, 256, ROOM, np.uint8))
    target, right = torch.zeros(ROOM, dtype=torch.uint8), torch.zeros(ROOM, dtype=torch.uint8)
    ops = []
    for shape, ((to, start), (of, at)) in batch:
        ops.append(CopyOp(target.as_strided(shape, to, start), source.as_strided(shape, of, at)))
        right.as_strided(shape, to, start).copy_(source.as_strided(shape, of, at))
    plan = split_copies(ops)
    carry_out(plan)
    assert torch.equal(target, right)
    assert sum(copy.size for copy in plan) == sum(op.source.numel() for op in ops)
    target.zero_()
    for op in ops:  # in rows as well, as plain copies need them
        carry_out(row for copy in split(op) for row in copy.rows())
    assert torch.equal(target, right)


def plan_of(*pairs):
    """The plan for views of two 4 KiB buffers, with addresses counted from their starts."""
    source, target = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    ops = [CopyOp(target.as_strided(*to), source.as_strided(*of)) for to, of in pairs]
    return [
        copy._replace(
            target=copy.target - target.data_ptr(), source=copy.source - source.data_ptr()
        )
        for copy in split_copies(ops)
    ]


def one(size, at):
    return ((size,), (1,), at)


def test_contiguous_dimensions_are_one_run():
    whole = ((4, 4, 8), (32, 8, 1), 64)
    assert plan_of((whole, whole)) == [Copy2D(64, 128, 64, 128, 128, 1)]


def test_a_layer_of_adjacent_pages_is_one_copy():
    pages = ((3, 32), (256, 1), 32)
    assert plan_of((pages, ((3, 32), (96, 1), 0))) == [Copy2D(32, 256, 0, 96, 32, 3)]


def test_of_more_dimensions_the_largest_is_kept():
    shape = ((2, 16, 8), (1024, 24, 1), 0)
    assert plan_of((shape, ((2, 16, 8), (512, 16, 1), 0))) == [
        Copy2D(0, 24, 0, 16, 8, 16),
        Copy2D(1024, 24, 512, 16, 8, 16),
    ]


def test_copies_that_continue_each_other_are_joined():
    assert plan_of((one(8, 0), one(8, 100)), (one(24, 8), one(24, 108))) == [
        Copy2D(0, 32, 100, 32, 32, 1)
    ]
    apart = [(one(8, 40 * i), one(8, 24 * i)) for i in range(5)]
    assert plan_of(*apart) == [Copy2D(0, 40, 0, 24, 8, 5)]
    assert len(plan_of(*apart, (one(8, 201), one(8, 120)))) == 2
    assert len(plan_of((one(8, 100), one(8, 0)), (one(8, 50), one(8, 20)))) == 2  # backwards
    assert len(plan_of((one(8, 0), one(8, 0)), (one(9, 40), one(9, 40)))) == 2


def test_a_source_may_be_repeated():
    assert plan_of((((3, 4), (8, 1), 0), ((3, 4), (0, 1), 0))) == [
        Copy2D(8 * i, 4, 0, 4, 4, 1) for i in range(3)
    ]


def test_two_shapes_are_no_copy():
    with pytest.raises(InvalidInputError, match="one shape"):
        plan_of((one(8, 0), one(9, 0)))
    with pytest.raises(InvalidInputError, match="element size"):
        split_copies([CopyOp(torch.zeros(4), torch.zeros(4, dtype=torch.uint8))])


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32]),
)
@settings(max_examples=120, deadline=None)
def test_byte_ranges_are_exact(shape, data, dtype):
    """Any strides at all, overlapping ones included."""
    strides = [data.draw(st.integers(0, 12)) for _ in shape]
    memory = torch.zeros(4096, dtype=torch.uint8).view(dtype)
    view = memory.as_strided(shape, strides, data.draw(st.integers(0, 5)))
    size, right = view.element_size(), set()
    for at in np.ndindex(*shape):
        start = view.data_ptr() + size * sum(i * s for i, s in zip(at, strides, strict=True))
        right |= set(range(start, start + size))
    ranges = byte_ranges(view)
    assert {address for low, high in ranges for address in range(low, high)} == right
