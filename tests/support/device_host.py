"""Host memory of a device: pinned, as numpy and as torch see it."""

import mmap

import numpy as np
import torch


class Host:
    """In pages of its own: two registrations with a GPU may not share one."""

    def __init__(self, device, rows, row_bytes):
        area = mmap.mmap(-1, rows * row_bytes)
        device.pin(memoryview(area))
        self.bytes = np.frombuffer(area, np.uint8).reshape(rows, row_bytes)
        self.tensor = torch.from_numpy(self.bytes)
