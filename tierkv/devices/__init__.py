"""Devices: the protocol and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from tierkv.devices.base import Device


def open_device(name: str) -> Device:
    """Return the device behind a torch device name.

    Raises:
        InvalidInputError: a device that tierkv has no implementation for.
    """
    if name == "cpu":
        from tierkv.devices.cpu import CpuDevice

        return CpuDevice()
    raise InvalidInputError(f"device {name!r} is not supported; use 'cpu'")
