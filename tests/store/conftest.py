import pytest
from layered import reopen, stepped_disk  # noqa: F401
from toy_model import FULL, namespace

from tierkv import Store


@pytest.fixture(params=["cpu", "sim"])
def device_name(request):
    """Every test runs on the CPU, and on the device that checks the order of every access."""
    return request.param


@pytest.fixture
def open_store(tmp_path, device_name):
    """Open stores of the toy model; budgets in pages; checks and closes them at the end."""
    opened = []

    def make(spec=FULL, *, device=64, host=16, disk=64, path=tmp_path / "store", **options):
        weights = options.pop("weights", "toy")
        slot = spec.slot_bytes
        store = Store.open(
            path,
            spec,
            namespace(spec, weights),
            device=device * slot,
            host=None if host is None else host * slot,
            disk=None if disk is None else disk * (slot + 4096),
            torch_device=options.pop("torch_device", device_name),
            **options,
        )
        opened.append(store)
        return store

    yield make
    for store in opened:
        if not store.closed:
            store.check()
        store.close()
