"""Page-aligned memory, which O_DIRECT needs for every buffer."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096

ByteArray = NDArray[np.uint8]


def round_up(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 4 KiB."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT


def aligned_empty(size: int) -> ByteArray:
    """Return ``size`` zeroed bytes that start on a 4 KiB boundary.

    An anonymous mapping is aligned by construction, and costs memory only once touched.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(-1, round_up(size)), np.uint8)[:size]


def address(array: ByteArray) -> int:
    """Return the address of an array's first byte."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # read-only or empty: three times slower
        return int(array.__array_interface__["data"][0])


def is_direct(array: ByteArray) -> bool:
    """Whether O_DIRECT can use the array as it is: start and length on 4 KiB."""
    return array.nbytes % ALIGNMENT == 0 and address(array) % ALIGNMENT == 0
