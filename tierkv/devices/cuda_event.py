"""Points in CUDA streams, and waiting for them with a deadline, which CUDA does not offer."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from tierkv.devices.base import DeviceError, Event
from tierkv.errors import InvalidInputError

_cuda: Any = torch.cuda  # parts of it are untyped
# How often a waiting thread asks: at once for a while, then ever more rarely.
_EAGER_POLLS = 50
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class CudaEvent:
    """Completion of everything a stream was given before it."""

    __slots__ = ("_error", "_event")

    def __init__(self) -> None:
        self._event: Any = _cuda.Event()
        self._error: DeviceError | None = None

    @classmethod
    def again(cls, event: Event | None) -> CudaEvent:
        """Return a new event, or the given one, to be recorded."""
        if event is None:
            return cls()
        if not isinstance(event, cls):
            raise InvalidInputError(f"an event of another device cannot be recorded here: {event}")
        return event

    def record(self, stream: Any, error: DeviceError | None) -> None:
        """Stand for the end of what ``stream`` was given, and for what could not be."""
        self._error = error
        self._event.record(stream)

    def order(self, stream: Any) -> None:
        """Make ``stream`` wait; raises DeviceError where the work is known to have failed."""
        if self._error is not None:
            raise self._error
        stream.wait_event(self._event)

    def done(self) -> bool:
        """Return whether the point was reached."""
        try:
            return bool(self._event.query())
        except RuntimeError:  # the device is broken: nothing runs any more; wait() says so
            return True

    def wait(self, timeout_s: float) -> bool:
        """Block until the point is reached; see :class:`tierkv.devices.base.Event`."""
        deadline = time.monotonic() + timeout_s
        polls, pause = 0, _FIRST_PAUSE_S
        try:
            while not self._event.query():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                polls += 1
                if polls > _EAGER_POLLS:
                    _rest(min(pause, remaining))
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        except RuntimeError as error:  # torch's name for every error of the device
            raise DeviceError(f"the GPU reports: {error}") from error
        if self._error is not None:
            raise self._error
        return True


def _rest(seconds: float) -> None:
    """Leave the core to others for a while."""
    threading.Event().wait(seconds)
