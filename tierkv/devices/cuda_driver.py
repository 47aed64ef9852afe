"""The calls of the CUDA runtime that copies need and torch does not offer.

They come from the package cuda-bindings, which is optional.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from tierkv.devices.base import DeviceError
from tierkv.devices.splitting import Copy2D

# cudaMemcpyBatchAsync came with CUDA 12.8; drivers before it refuse the call.
_FIRST_WITH_BATCHES = 12080
_STREAM_ORDER = "cudaMemcpySrcAccessOrderStream"


class CudaDriver(Protocol):
    """Enqueues copies on a stream, given by its handle, of the current device."""

    has_batches: bool

    def copy_batch(self, copies: Sequence[Copy2D], stream: int) -> bool:
        """Enqueue copies of height 1 in one call; False when the driver refuses such calls."""
        ...

    def copy_2d(self, copy: Copy2D, stream: int) -> None:
        """Enqueue one copy.

        Raises:
            DeviceError: the driver refused it.
        """
        ...


class BindingsDriver:
    """Implements :class:`CudaDriver` by ``cuda.bindings.runtime``.

    Args:
        runtime: that module.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        error, version = runtime.cudaDriverGetVersion()
        self.has_batches = (
            not int(error)
            and version >= _FIRST_WITH_BATCHES
            and hasattr(runtime, "cudaMemcpyBatchAsync")
        )
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        if self.has_batches:
            self._attributes = runtime.cudaMemcpyAttributes()
            # A source may have been written by earlier work of the stream.
            self._attributes.srcAccessOrder = getattr(
                runtime.cudaMemcpySrcAccessOrder, _STREAM_ORDER
            )

    def copy_batch(self, copies: Sequence[Copy2D], stream: int) -> bool:
        """Enqueue copies of height 1 in one call; False when the driver refuses such calls."""
        # The first of the results is the error; which others follow depends on the release.
        error, *_ = self._runtime.cudaMemcpyBatchAsync(
            [copy.target for copy in copies],
            [copy.source for copy in copies],
            [copy.width for copy in copies],
            len(copies),
            [self._attributes],
            [0],
            1,
            stream,
        )
        return not int(error)

    def copy_2d(self, copy: Copy2D, stream: int) -> None:
        """Enqueue one copy."""
        if copy.height == 1:
            (error,) = self._runtime.cudaMemcpyAsync(
                copy.target, copy.source, copy.width, self._kind, stream
            )
        else:
            (error,) = self._runtime.cudaMemcpy2DAsync(
                copy.target,
                copy.target_pitch,
                copy.source,
                copy.source_pitch,
                copy.width,
                copy.height,
                self._kind,
                stream,
            )
        if int(error):
            raise DeviceError(f"CUDA refused a copy of {copy.size} bytes: {error!r}")


def find_driver() -> CudaDriver | None:
    """Return the driver behind cuda-bindings, None where the package is not installed."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return BindingsDriver(runtime)
