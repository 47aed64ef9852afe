"""Chooses how a batch of copies goes to a GPU, and issues it.

Large runs of bytes go together in one ``cudaMemcpyBatchAsync``, which costs one launch and no
multiprocessor; strided copies of small rows in one ``cudaMemcpy2DAsync`` each; and without
cuda-bindings every run of bytes in a plain copy of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.devices.splitting import Copy2D, split, split_copies

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.devices.base import CopyOp
    from tierkv.devices.cuda_driver import CudaDriver

# Rows at least so wide go into a batch one by one; narrower ones are better kept together in
# one two-dimensional copy.
BATCH_ROW_BYTES = 16 << 10
METHODS = ("auto", "batch", "2d", "plain")


class CopyIssuer:
    """Issues batches of copies on one device.

    Args:
        driver: the calls of the CUDA runtime, None when there is only torch.
        method: ``"auto"``; or always ``"batch"``, ``"2d"`` or ``"plain"``, to compare them.
    """

    def __init__(self, driver: CudaDriver | None, method: str = "auto") -> None:
        assert method in METHODS
        self._driver = None if method == "plain" else driver
        self._batches = driver is not None and driver.has_batches and method != "2d"
        self._row_bytes = 1 if method == "batch" else BATCH_ROW_BYTES
        self.calls = dict.fromkeys(METHODS[1:], 0)

    def issue(self, ops: Sequence[CopyOp], stream: int) -> int:
        """Enqueue copies on a stream, given by its handle; return their bytes.

        The stream must be torch's current one: the plain method copies on that.

        Raises:
            DeviceError: the driver refused a copy.
        """
        if self._driver is None:
            return self._issue_plain(ops)
        plan = split_copies(ops)
        together, apart = self._divide(plan, stream)
        if together and not self._driver.copy_batch(together, stream):
            self._batches = False  # a driver too old, or memory that batches do not take
            together, apart = [], plan
        self.calls["batch"] += bool(together)
        for copy in apart:
            self._driver.copy_2d(copy, stream)
        self.calls["2d"] += len(apart)
        return sum(copy.size for copy in plan)

    def _divide(self, plan: Sequence[Copy2D], stream: int) -> tuple[list[Copy2D], list[Copy2D]]:
        """Return what goes into one batch, and what goes by itself."""
        # The default stream, handle 0, takes no batches.
        if not self._batches or not stream or (len(plan) == 1 and plan[0].height == 1):
            return [], list(plan)
        together: list[Copy2D] = []
        apart: list[Copy2D] = []
        for copy in plan:
            if copy.height == 1:
                together.append(copy)
            elif copy.width >= self._row_bytes:
                together += copy.rows()
            else:
                apart.append(copy)
        return together, apart

    def _issue_plain(self, ops: Sequence[CopyOp]) -> int:
        size = 0
        for op in ops:
            for copy in split(op):
                for row in copy.rows():
                    # One run of bytes each: torch copies anything else by way of a temporary
                    # tensor, which it reads or writes outside of the stream's order.
                    target = _run(op.destination, row.target, row.width)
                    target.copy_(_run(op.source, row.source, row.width), non_blocking=True)
                    self.calls["plain"] += 1
                size += copy.size
        return size


def _run(tensor: Tensor, address: int, width: int) -> Tensor:
    """Return ``width`` bytes at an address inside a uint8 tensor's memory."""
    offset = tensor.storage_offset() + address - tensor.data_ptr()
    return tensor.as_strided((width,), (1,), offset)
