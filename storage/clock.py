"""Time as a seam: the tier reads no clock but this one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one for intervals, one for what people read."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences mean something."""
        ...

    def time(self) -> float:
        """Return Unix seconds; may jump, so nothing is decided by it."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def time(self) -> float:
        """Return ``time.time()``."""
        return time.time()
