"""An NVIDIA GPU as a device: torch's streams and events, copies by CUDA's copy engines."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierkv.devices.base import CopyOp, DeviceError, DeviceStats, Event, Stream, Traffic
from tierkv.devices.cuda_copies import CopyIssuer
from tierkv.devices.cuda_driver import find_driver
from tierkv.devices.cuda_event import CudaEvent
from tierkv.errors import CapacityError, InvalidInputError, StoreClosedError
from tierkv.units import format_bytes

_cuda: Any = torch.cuda  # parts of it are untyped


class CudaStream:
    """A copy stream, or (without one of its own) whatever stream the caller computes on."""

    def __init__(self, name: str, device: CudaDevice, own: Any) -> None:
        self.name = name
        self.copies = 0
        self.copied_bytes = 0
        self.failed = 0
        self._device = device
        self._own = own
        self._lock = threading.RLock()
        # Of the batches since the last event:
        self._error: DeviceError | None = None
        self._skipping = False
        self._timing: deque[tuple[Any, Any, int]] = deque()
        self._spare: list[tuple[Any, Any]] = []
        self._traffic = Traffic(0, 0, 0.0)

    def copy(self, ops: Sequence[CopyOp]) -> None:
        """Enqueue a batch of copies."""
        self._device.must_be_open()
        with self._lock, _cuda.device(self._device.torch_device):
            if self._skipping:
                return
            stream = self._stream()
            self._harvest()
            start, end = self._spare.pop() if self._spare else self._device.timers()
            try:
                with _cuda.stream(stream):
                    start.record(stream)
                    size = self._device.issuer.issue(ops, stream.cuda_stream)
                    end.record(stream)
            except (RuntimeError, ValueError) as caught:  # what torch and the driver raise
                self.failed += 1
                error = DeviceError(f"copies on {self._device.name} failed: {caught}")
                if self._own is None:
                    raise error from caught
                self._error = self._error or error
                return
            self._timing.append((start, end, size))
            self.copies += len(ops)
            self.copied_bytes += size

    def record(self, event: Event | None = None) -> CudaEvent:
        """Return an event for the end of everything enqueued so far."""
        event = CudaEvent.again(event)
        with self._lock:
            event.record(self._stream(), self._error)
            self._error, self._skipping = None, False
        return event

    def wait(self, event: Event, timeout_s: float) -> None:
        """Order everything enqueued from now on after ``event``; does not block."""
        try:
            if isinstance(event, CudaEvent):
                event.order(self._stream())
            elif not event.wait(timeout_s):
                raise DeviceError(f"a copy did not finish within {timeout_s} s")
        except DeviceError as error:
            if self._own is None:
                raise
            with self._lock:
                self._error, self._skipping = self._error or error, True

    def use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: the order is not checked here."""

    def traffic(self) -> Traffic:
        """Return what the finished copies took."""
        with self._lock:
            self._harvest()
            return self._traffic

    def _stream(self) -> Any:
        return self._own or _cuda.current_stream(self._device.torch_device)

    def _harvest(self) -> None:
        """Add up the batches that are over, the oldest first."""
        while self._timing and self._timing[0][1].query():
            start, end, size = self._timing.popleft()
            old, seconds = self._traffic, start.elapsed_time(end) / 1e3
            self._traffic = Traffic(old.batches + 1, old.bytes + size, old.seconds + seconds)
            self._spare.append((start, end))


class CudaDevice:
    """Implements :class:`tierkv.devices.base.Device` on a GPU.  Thread-safe.

    Args:
        name: ``"cuda"`` or ``"cuda:1"``.
        method: how copies are issued; see :class:`tierkv.devices.cuda_copies.CopyIssuer`.

    Raises:
        InvalidInputError: torch has no CUDA, or there is no such GPU.
    """

    checks_order = False

    def __init__(self, name: str = "cuda", *, method: str = "auto") -> None:
        index = _index(name)
        if not _cuda.is_available():
            raise InvalidInputError(
                f"device {name!r} needs a GPU and a PyTorch built for CUDA, but "
                f"torch.cuda.is_available() is False (PyTorch {torch.__version__}); use 'cpu'"
            )
        if index is None:
            index = _cuda.current_device()
        if index >= _cuda.device_count():
            raise InvalidInputError(
                f"device {name!r}: this machine has {_cuda.device_count()} GPUs, counted from 0"
            )
        self.name = self.torch_device = f"cuda:{index}"
        self.issuer = CopyIssuer(find_driver(), method)
        self._caller = CudaStream("compute", self, None)
        self.compute: Stream = self._caller
        self._streams: dict[str, CudaStream] = {}
        self._memory: list[Tensor] = []
        self._pinned: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, rows: int, row_bytes: int) -> Tensor:
        """Return uint8 memory of shape ``[rows, row_bytes]``; its content is undefined."""
        self.must_be_open()
        try:
            memory = torch.empty((rows, row_bytes), dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = _cuda.mem_get_info(self.torch_device)
            raise CapacityError(
                f"device pool: {rows} pages of {format_bytes(row_bytes)} "
                f"({format_bytes(rows * row_bytes)}) cannot be allocated on {self.name}, where "
                f"{format_bytes(free)} of {format_bytes(total)} are free; give a smaller budget"
            ) from error
        with self._lock:
            self._memory.append(memory)
        return memory

    def pin(self, memory: memoryview) -> None:
        """Page-lock host memory, so that copies run behind the caller at full speed."""
        self.must_be_open()
        view = np.frombuffer(memory, np.uint8)
        with _cuda.device(self.torch_device):
            error = int(_cuda.cudart().cudaHostRegister(view.ctypes.data, view.nbytes, 0))
        if error:
            raise CapacityError(
                f"host memory: {format_bytes(view.nbytes)} cannot be page-locked for {self.name} "
                f"(CUDA error {error}); raise the limit (ulimit -l) or give the host tier less"
            )
        with self._lock:
            self._pinned.append(view)

    def stream(self, name: str) -> CudaStream:
        """Return the copy stream of that name."""
        self.must_be_open()
        with self._lock:
            if name not in self._streams:
                own = _cuda.Stream(self.torch_device)
                self._streams[name] = CudaStream(name, self, own)
            return self._streams[name]

    def host_use(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Do nothing: the order is not checked here."""

    def stats(self) -> DeviceStats:
        """Return counters."""
        with self._lock:
            streams = [*self._streams.values()]
            allocated = sum(memory.numel() for memory in self._memory)
        everywhere = [self._caller, *streams]
        return DeviceStats(
            name=self.name,
            allocated_bytes=allocated,
            copies=sum(s.copies for s in everywhere),
            copied_bytes=sum(s.copied_bytes for s in everywhere),
            failed_copies=sum(s.failed for s in everywhere),
            streams=len(streams),
        )

    def check(self) -> None:
        """Raise AssertionError when a copy is unaccounted for."""
        with self._lock:
            for stream in self._streams.values():
                assert stream.traffic().bytes <= stream.copied_bytes, stream.name

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for the copy streams, unlock the host memory, release the rest."""
        with self._lock:
            self._closed = True
            streams = [*self._streams.values()]
        deadline = time.monotonic() + timeout_s
        late = []
        for stream in streams:
            try:
                if not stream.record().wait(max(0.0, deadline - time.monotonic())):
                    late.append(stream.name)
            except DeviceError:  # a copy that failed is over; whoever asked for it was told
                continue
        if late:  # the copies may still run: their memory stays theirs
            raise DeviceError(f"streams {late} did not finish within {timeout_s} s")
        with self._lock:
            for view in self._pinned:
                with _cuda.device(self.torch_device):
                    _cuda.cudart().cudaHostUnregister(view.ctypes.data)
            self._pinned.clear()
            self._memory.clear()

    def timers(self) -> tuple[Any, Any]:
        """Return two events that measure time."""
        return _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)

    def must_be_open(self) -> None:
        """Raise StoreClosedError after ``close``."""
        if self._closed:
            raise StoreClosedError("the device is closed")


def _index(name: str) -> int | None:
    """Return the number in a name such as ``cuda:1``, None where there is none."""
    kind, _, number = name.partition(":")
    if kind != "cuda" or (":" in name and not number.isdecimal()):
        raise InvalidInputError(f"device {name!r}: use 'cuda', or 'cuda:1' for the second GPU")
    return int(number) if number else None
