import pytest
import torch

from tierkv.devices.cpu import CpuDevice
from tierkv.devices.faults import Faults
from tierkv.devices.sim import SimDevice

MAKE = {"cpu": CpuDevice, "sim": SimDevice}
NO_CUDA = "torch.cuda.is_available() is False"


@pytest.fixture
def faults():
    made = Faults()
    yield made
    made.clear()


@pytest.fixture(params=["cpu", "sim"])
def faulty(request, faults):
    """A device on which faults can be asked for; they are cleared before it is closed."""
    made = MAKE[request.param](faults=faults)
    yield made
    faults.clear()
    if made.checks_order:
        made.advance_host(1e6)
    made.close()


@pytest.fixture(params=["cpu", "sim", "cuda"])
def device(request):
    if request.param != "cuda":
        made = MAKE[request.param]()
    elif torch.cuda.is_available():
        from tierkv.devices.cuda import CudaDevice

        made = CudaDevice()
    else:
        pytest.skip(NO_CUDA)
    yield made
    made.check()
    made.close()


@pytest.fixture
def sim():
    """A simulated device that the test closes itself, or leaves as it is."""
    return SimDevice()
