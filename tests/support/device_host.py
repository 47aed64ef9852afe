"""Host memory of a device: pinned, as numpy and as torch see it."""

import numpy as np
import torch


class Host:
    def __init__(self, device, rows, row_bytes):
        self.bytes = np.zeros((rows, row_bytes), np.uint8)
        device.pin(memoryview(self.bytes).cast("B"))
        self.tensor = torch.from_numpy(self.bytes)
