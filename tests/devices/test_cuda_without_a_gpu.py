"""The logic around torch's CUDA streams and events, with stand-ins for those."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tierkv import CapacityError, InvalidInputError, StoreClosedError
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.devices.cuda import CudaDevice

LONG = 30.0


class FakeEvent:
    """Done at once, unless its stream is blocked."""

    def __init__(self, enable_timing=False):
        self.timing = enable_timing
        self.stream = None

    def record(self, stream):
        self.stream = stream

    def query(self):
        if self.stream.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return not self.stream.blocked

    def elapsed_time(self, other):
        assert self.timing
        assert other.timing
        return 2.0


class FakeStream:
    def __init__(self, handle):
        self.cuda_stream = handle
        self.waited = []
        self.blocked = self.broken = False

    def wait_event(self, event):
        self.waited.append(event)


class FakeCuda:
    """As much of ``torch.cuda`` as the device uses: two GPUs."""

    Event = FakeEvent

    def __init__(self):
        self.streams = []
        self.current = FakeStream(0)
        self.locked = []
        self.register_error = 0

    def Stream(self, device):
        self.streams.append(FakeStream(len(self.streams) + 1))
        return self.streams[-1]

    def cudart(self):
        def register(address, size, flags):
            self.locked.append(address)
            return self.register_error

        return SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=lambda a: self.locked.remove(a)
        )

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 1)
    device_count = staticmethod(lambda: 2)
    device = staticmethod(lambda _: nullcontext())
    stream = staticmethod(lambda _: nullcontext())

    def current_stream(self, device):
        return self.current


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for module in ("cuda", "cuda_event"):
        monkeypatch.setattr(f"tierkv.devices.{module}._cuda", fake)
    return fake


@pytest.fixture
def device(cuda):
    return CudaDevice(method="plain")


def memory(value=1):
    made = torch.zeros(4, 64, dtype=torch.uint8)
    made[0] = value
    return made


def test_names_mean_devices(cuda):
    assert CudaDevice("cuda").name == CudaDevice("cuda:1").torch_device == "cuda:1"
    with pytest.raises(InvalidInputError, match="2 GPUs"):
        CudaDevice("cuda:2")


def test_copies_events_and_counts(device, cuda):
    pool, stream = memory(), device.stream("load")
    assert device.stream("load") is stream
    stream.copy([CopyOp(pool[1], pool[0]), CopyOp(pool[2], pool[0])])
    event = stream.record()
    assert event.wait(LONG)
    assert event.done()
    assert (pool[:3] == 1).all()
    assert stream.record(event) is event
    traffic = stream.traffic()
    assert (traffic.batches, traffic.bytes, traffic.seconds) == (1, 128, 0.002)
    stats = device.stats()
    assert (stats.copies, stats.copied_bytes, stats.streams) == (2, 128, 1)
    device.check()
    device.close()


def test_waiting_orders_streams_on_the_device(device, cuda):
    load, save = device.stream("load"), device.stream("save")
    event = load.record()
    save.wait(event, LONG)
    device.compute.wait(event, LONG)
    assert len(cuda.streams[1].waited) == len(cuda.current.waited) == 1
    first, cuda.current = cuda.current, FakeStream(9)
    device.compute.wait(event, LONG)  # the stream that is current now
    assert (len(first.waited), len(cuda.current.waited)) == (1, 1)


def test_failures_skip_what_depends_on_them_and_are_reported_once(device):
    pool, load, save = memory(), device.stream("load"), device.stream("save")
    load.copy([CopyOp(pool[1], pool[0][:3])])
    failed, after = load.record(), load.record()
    save.wait(failed, LONG)
    save.copy([CopyOp(pool[2], pool[0])])
    for event in (failed, save.record()):
        with pytest.raises(DeviceError, match="failed"):
            event.wait(LONG)
    assert after.wait(LONG)
    assert not pool[2].any()
    with pytest.raises(DeviceError):
        device.compute.wait(failed, LONG)
    with pytest.raises(DeviceError):
        device.compute.copy([CopyOp(pool[1], pool[0][:3])])
    assert device.stats().failed_copies == 2
    save.copy([CopyOp(pool[2], pool[0])])
    assert save.record().wait(LONG)
    assert pool[2].all()


def test_a_wait_ends_at_its_deadline_or_when_the_work_does(device, cuda):
    stream = device.stream("load")
    cuda.streams[0].blocked = True
    event = stream.record()
    assert not event.done()
    assert not event.wait(0.02)
    with pytest.raises(DeviceError, match="load"):
        device.close(0.01)
    timer = threading.Timer(0.02, setattr, (cuda.streams[0], "blocked", False))
    timer.start()
    assert event.wait(LONG)
    timer.join()


def test_a_broken_gpu_is_an_error_and_no_hang(device, cuda):
    stream = device.stream("load")
    event = stream.record()
    cuda.streams[0].broken = True
    assert event.done()
    with pytest.raises(DeviceError, match="illegal memory access"):
        event.wait(LONG)
    device.close()


def test_host_memory_is_locked_until_the_end(device, cuda):
    area = bytearray(4096)
    device.pin(memoryview(area))
    assert len(cuda.locked) == 1
    device.close()
    assert not cuda.locked
    device.close()
    with pytest.raises(StoreClosedError):
        device.pin(memoryview(area))


def test_memory_that_cannot_be_locked_is_refused(device, cuda):
    cuda.register_error = 2
    with pytest.raises(CapacityError, match="ulimit -l"):
        device.pin(memoryview(bytearray(4096)))


def test_events_of_other_devices_are_waited_for_but_not_recorded(device, cuda):
    class Other:
        def __init__(self, in_time):
            self.in_time = in_time

        def wait(self, timeout_s):
            return self.in_time

    stream, pool = device.stream("load"), memory()
    stream.wait(Other(True), LONG)
    stream.wait(Other(False), LONG)
    stream.copy([CopyOp(pool[1], pool[0])])
    with pytest.raises(DeviceError, match="did not finish"):
        stream.record().wait(LONG)
    with pytest.raises(InvalidInputError, match="another device"):
        stream.record(Other(True))
