"""Devices: the protocol and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from tierkv.devices.base import Device


def open_device(device: str | Device) -> Device:
    """Return the device of a name, or the device itself where one is given.

    Args:
        device: ``"cpu"``; ``"cuda"`` or ``"cuda:1"``; ``"sim"``, an accelerator in virtual
            time that checks the order of every access; or a device made otherwise, such as
            ``SimDevice(model)``.

    Raises:
        InvalidInputError: no such device, or none on this machine.
    """
    if not isinstance(device, str):
        return device
    if device == "cpu":
        from tierkv.devices.cpu import CpuDevice

        return CpuDevice()
    if device == "sim":
        from tierkv.devices.sim import SimDevice

        return SimDevice()
    if device.partition(":")[0] == "cuda":
        from tierkv.devices.cuda import CudaDevice

        return CudaDevice(device)
    raise InvalidInputError(
        f"device {device!r} is not supported; use 'cpu', 'cuda' (or 'cuda:1' and so on), 'sim', "
        "or a Device object"
    )
