"""Devices by name, and the throttle of the CPU's."""

import time

import pytest
import torch

from tierkv import InvalidInputError
from tierkv.devices import open_device
from tierkv.devices.base import CopyOp
from tierkv.devices.cpu import CpuDevice
from tierkv.devices.sim import SimDevice


@pytest.mark.parametrize(("name", "kind"), [("cpu", CpuDevice), ("sim", SimDevice)])
def test_devices_open_by_name(name, kind):
    device = open_device(name)
    assert type(device) is kind
    assert device.name == name
    assert open_device(device) is device
    device.close()


@pytest.mark.parametrize("name", ["tpu", "", "cpu:0", "CUDA"])
def test_other_names_are_refused_with_a_list(name):
    with pytest.raises(InvalidInputError, match=r"'cpu', 'cuda' .*'sim'"):
        open_device(name)


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1"])
def test_a_gpu_has_a_number(name):
    with pytest.raises(InvalidInputError, match="'cuda:1' for the second"):
        open_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_is_missing():
    with pytest.raises(InvalidInputError, match=r"device 'cuda:1' needs a GPU and a PyTorch"):
        open_device("cuda:1")


def test_a_throttled_stream_takes_its_time_and_leaves_the_core():
    device = CpuDevice(bandwidth=4e6, latency_s=0.005)
    memory = device.allocate(2, 50_000)
    stream, wall, busy = device.stream("load"), time.perf_counter(), time.process_time()
    for _ in range(8):
        stream.copy([CopyOp(memory[1], memory[0])])
    assert stream.record().wait(30)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    assert wall >= 8 * (0.005 + 50_000 / 4e6)
    assert busy < wall / 2
    traffic = stream.traffic()
    assert traffic.bytes == 400_000
    assert 0.1 < traffic.seconds <= wall
    device.close()


def test_closing_does_not_wait_for_the_throttle():
    device = CpuDevice(bandwidth=1.0)
    memory = device.allocate(2, 64)
    device.stream("load").copy([CopyOp(memory[1], memory[0])])
    event = device.stream("load").record()
    device.close(10)
    assert event.done()
