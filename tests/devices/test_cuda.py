"""What only a GPU shows; the conformance tests run there as well."""

import pytest
import torch
from device_host import Host

from tierkv.devices.base import CopyOp

if not torch.cuda.is_available():
    pytest.skip("torch.cuda.is_available() is False", allow_module_level=True)

from tierkv import CapacityError, InvalidInputError
from tierkv.devices.cuda import CudaDevice
from tierkv.devices.cuda_copies import METHODS

LONG = 30.0


@pytest.fixture(params=METHODS)
def device(request):
    made = CudaDevice(method=request.param)
    yield made
    made.check()
    made.close()


def test_every_method_moves_strided_layers_both_ways(device):
    count, width = 24, 96 << 10
    memory, host = device.allocate(count, width), Host(device, 2 * count, width)
    host.tensor[:count].random_(1, 256)
    load, save = device.stream("load"), device.stream("save")
    for part in (slice(0, 100), slice(100, 64 << 10), slice(64 << 10, width)):
        load.copy([CopyOp(memory[::2, part], host.tensor[:count:2, part])])
        load.copy([CopyOp(memory[row, part], host.tensor[row, part]) for row in range(1, count, 2)])
    save.wait(load.record(), LONG)
    save.copy([CopyOp(host.tensor[count:], memory)])
    assert save.record().wait(LONG)
    assert torch.equal(host.tensor[count:], host.tensor[:count])


def test_computation_and_copies_are_ordered_without_the_host(device):
    """Long kernels on either side: a missing wait would show."""
    memory, host = device.allocate(2, 1 << 20), Host(device, 1, 1 << 20)
    a = torch.randn(4096, 4096, device=device.torch_device)
    stream = device.stream("save")
    for step in range(1, 20):
        for _ in range(4):
            a = a @ a / a.norm()
        memory[0] = step
        stream.wait(device.compute.record(), LONG)
        stream.copy([CopyOp(host.tensor[0], memory[0])])
        event = stream.record()
        device.compute.wait(event, LONG)
        memory[0] = 0
        assert event.wait(LONG)
        assert (host.bytes == step).all()


def test_the_compute_stream_is_the_current_one(device):
    memory, host = device.allocate(1, 1 << 20), Host(device, 1, 1 << 20)
    other = torch.cuda.Stream(device.torch_device)
    with torch.cuda.stream(other):
        memory.fill_(3)
        event = device.compute.record()
    device.stream("save").wait(event, LONG)
    device.stream("save").copy([CopyOp(host.tensor, memory)])
    assert device.stream("save").record().wait(LONG)
    assert (host.bytes == 3).all()


def test_pinned_memory_is_pinned_until_the_end():
    device = CudaDevice()
    host = Host(device, 4, 1 << 20)
    assert host.tensor.is_pinned()
    device.close()
    assert not host.tensor.is_pinned()


def test_more_memory_than_there_is_is_refused_with_the_arithmetic():
    device = CudaDevice()
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(CapacityError, match="are free; give a smaller budget"):
        device.allocate(total // (1 << 20) * 2, 1 << 20)
    device.close()


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(InvalidInputError, match="counted from 0"):
        CudaDevice(f"cuda:{torch.cuda.device_count()}")
