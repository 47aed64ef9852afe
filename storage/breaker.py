"""A circuit breaker: a tier that keeps failing is taken out of service, and probed again.

It counts requests, not time: the same sequence of requests and results gives the same
decisions everywhere, and nothing sleeps.
"""

from __future__ import annotations

import threading


class Breaker:
    """Opens after consecutive failures; while open, lets every n-th request through as a probe.

    The distance between probes doubles with each failed one, up to a bound.  Thread-safe.
    """

    def __init__(self, *, threshold: int = 8, first_gap: int = 16, max_gap: int = 1024) -> None:
        self._threshold = threshold
        self._first_gap = first_gap
        self._max_gap = max_gap
        self._lock = threading.Lock()
        self._failures = 0
        self._gap = 0  # 0: closed
        self._skipped = 0

    @property
    def is_open(self) -> bool:
        """Whether the tier is out of service."""
        return self._gap > 0

    def admit(self) -> bool:
        """Whether the next request may go through."""
        if not self._gap:
            return True
        with self._lock:
            self._skipped += 1
            if self._gap and self._skipped < self._gap:
                return False
            self._skipped = 0
            return True

    def success(self) -> None:
        """Note a request that went well: the tier is in service."""
        if self._failures or self._gap:
            with self._lock:
                self._failures = self._gap = self._skipped = 0

    def failure(self) -> bool:
        """Note a request that failed, and return whether that took the tier out of service."""
        with self._lock:
            self._failures += 1
            if self._gap:
                self._gap = min(self._gap * 2, self._max_gap)
                return False
            if self._failures >= self._threshold:
                self._gap, self._skipped = self._first_gap, 0
                return True
            return False
