"""How a batch goes to a GPU, against a driver that carries the calls out in ordinary memory."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tierkv.devices.base import CopyOp, DeviceError
from tierkv.devices.cuda_copies import BATCH_ROW_BYTES, CopyIssuer
from tierkv.devices.cuda_driver import BindingsDriver, find_driver

STREAM = 77


class Runtime:
    """The part of cuda.bindings.runtime that is used, with what a GPU would do."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)

    class cudaMemcpyAttributes:
        srcAccessOrder = None

    def __init__(self, version=12090, error=0, results=()):
        self.version, self.error, self.results = version, error, results
        self.calls = []

    def cudaDriverGetVersion(self):
        return 0, self.version

    def cudaMemcpyBatchAsync(
        self, targets, sources, sizes, count, attributes, indices, number, stream
    ):
        assert len(targets) == len(sources) == len(sizes) == count
        assert (indices, number, stream) == ([0], 1, STREAM)
        assert attributes[0].srcAccessOrder == 1
        self.calls.append(("batch", count))
        if not self.error:
            for to, of, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(to, of, size)
        return self.error, *self.results

    def cudaMemcpyAsync(self, to, of, size, kind, stream):
        assert kind == 4
        self.calls.append(("1d", size))
        ctypes.memmove(to, of, size)
        return (0,)

    def cudaMemcpy2DAsync(self, to, pitch, of, source_pitch, width, height, kind, stream):
        assert kind == 4
        assert width <= min(pitch, source_pitch)
        self.calls.append(("2d", width, height))
        for row in range(height):
            ctypes.memmove(to + row * pitch, of + row * source_pitch, width)
        return (0,)


def pages(count, width):
    """A layer of every other page: rows of ``width`` bytes that do not lie side by side."""
    memory = torch.zeros(2, count, 2 * width, dtype=torch.uint8)
    memory[0] = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (count, 2 * width)))
    return memory, CopyOp(memory[1, :, :width], memory[0, :, :width])


def scattered(memory, width, rows):
    return [CopyOp(memory[1, to, :width], memory[0, of, :width]) for to, of in rows]


def issue(ops, *, method="auto", runtime=None, stream=STREAM):
    runtime = runtime or Runtime()
    issuer = CopyIssuer(BindingsDriver(runtime), method)
    size = issuer.issue(ops, stream)
    assert size == sum(op.source.numel() for op in ops)
    for op in ops:
        assert torch.equal(op.destination, op.source)
    return runtime.calls, issuer


def test_one_run_of_bytes_is_one_call():
    memory, _ = pages(4, 64)
    calls, _ = issue([CopyOp(memory[1, :2], memory[0, :2])])
    assert calls == [("1d", 256)]


def test_wide_rows_go_in_one_batch():
    _, op = pages(5, BATCH_ROW_BYTES)
    calls, issuer = issue([op])
    assert calls == [("batch", 5)]
    assert issuer.calls == {"batch": 1, "2d": 0, "plain": 0}


def test_narrow_rows_stay_together():
    _, op = pages(5, 64)
    assert issue([op])[0] == [("2d", 64, 5)]


def test_scattered_pages_go_in_one_batch_beside_narrow_rows():
    _, op = pages(8, 64)
    far, _ = pages(8, 100)
    ops = [op, *scattered(far, 100, [(0, 5), (5, 1), (2, 7)])]
    assert sorted(issue(ops)[0]) == [("2d", 64, 8), ("batch", 3)]


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"method": "2d"}, ["1d", "1d"]),
        ({"method": "batch"}, ["batch"]),
        ({"runtime": Runtime(version=12060)}, ["1d", "1d"]),  # a driver from before batches
        ({"stream": 0}, ["1d", "1d"]),  # the default stream takes none
    ],
)
def test_what_the_batch_needs(options, calls):
    memory, _ = pages(8, 100)
    ops = scattered(memory, 100, [(0, 5), (5, 1)])
    assert [call[0] for call in issue(ops, **options)[0]] == calls


@pytest.mark.parametrize("results", [(), (None,), (0,)], ids=str)
def test_the_results_of_every_release_are_understood(results):
    memory, _ = pages(8, 100)
    ops = scattered(memory, 100, [(0, 5), (5, 1)])
    assert issue(ops, runtime=Runtime(results=results))[0] == [("batch", 2)]


def test_a_refused_batch_is_done_otherwise_and_not_tried_again():
    memory, _ = pages(8, 100)
    ops = scattered(memory, 100, [(0, 5), (5, 1)])
    calls, issuer = issue(ops, runtime=Runtime(error=801))
    assert [call[0] for call in calls] == ["batch", "1d", "1d"]
    issuer.issue(ops, STREAM)
    assert [call[0] for call in calls].count("batch") == 1


def test_a_refused_copy_is_an_error():
    memory, _ = pages(4, 64)
    runtime = Runtime()
    runtime.cudaMemcpyAsync = lambda *_: (1,)
    with pytest.raises(DeviceError, match="refused a copy of 128 bytes"):
        issue([CopyOp(memory[1, 0], memory[0, 0])], runtime=runtime)


def test_without_bindings_every_run_is_a_plain_copy():
    _, op = pages(5, 64)
    issuer = CopyIssuer(None)
    assert issuer.issue([op], 0) == 320
    assert torch.equal(op.destination, op.source)
    assert issuer.calls == {"batch": 0, "2d": 0, "plain": 5}
    assert CopyIssuer(BindingsDriver(Runtime()), "plain").issue([op], 0) == 320


def test_the_bindings_are_optional_and_fit_when_they_are_there():
    driver = find_driver()
    if driver is None:
        pytest.skip("cuda-bindings is not installed")
    assert isinstance(driver.has_batches, bool)
