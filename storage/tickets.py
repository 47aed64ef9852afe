"""What ``put`` and ``submit_read`` hand back: results that arrive later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tierkv.storage.counters import Counters
from tierkv.storage.types import ReadStatus, WriteStatus

logger = logging.getLogger(__name__)


class WriteTicket:
    """The fate of the pages of one ``put``.  Thread-safe."""

    def __init__(self, count: int, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._statuses: list[WriteStatus | None] = [None] * count
        self._remaining = count
        self._callbacks: list[Callable[[list[WriteStatus]], None]] = []
        if not count:
            self._event.set()

    def done(self) -> bool:
        """Whether every page has a status; until then its memory must not change."""
        return self._event.is_set()

    @property
    def statuses(self) -> list[WriteStatus | None]:
        """The statuses so far, None where a page is still on its way."""
        with self._lock:
            return list(self._statuses)

    def wait(self, timeout_s: float | None = None) -> list[WriteStatus] | None:
        """Wait for all statuses; None when time ran out (the writes go on)."""
        return self._final() if self._event.wait(timeout_s) else None

    def add_done_callback(self, call: Callable[[list[WriteStatus]], None]) -> None:
        """Call ``call(statuses)`` once all pages have one: at once if they do already.

        It runs on the writer thread after the pages are published, so it must be quick and
        must not wait for the tier.
        """
        with self._lock:
            if self._remaining:
                self._callbacks.append(call)
                return
        self._call(call)

    def resolve(self, position: int, status: WriteStatus) -> None:
        """Set the status of one page (the tier's side)."""
        with self._lock:
            assert self._statuses[position] is None, "a page was resolved twice"
            self._statuses[position] = status
            self._remaining -= 1
            if self._remaining:
                return
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            self._call(call)
        self._event.set()

    def _final(self) -> list[WriteStatus]:
        return [status for status in self._statuses if status is not None]

    def _call(self, call: Callable[[list[WriteStatus]], None]) -> None:
        try:
            call(self._final())
        except Exception:  # a caller's callback must not stop the writer thread
            self._counters.add("callback_errors")
            logger.exception("a put callback failed")


class ReadTicket:
    """The fate of the pages of one ``submit_read``.  Thread-safe.

    ``wait`` has a deadline, the device may not: after a timeout the destinations stay busy
    until the ticket is settled.
    """

    def __init__(
        self,
        count: int,
        counters: Counters,
        timeout_s: float,
        on_expired: Callable[[], object],
    ) -> None:
        self._counters = counters
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._statuses: list[ReadStatus | None] = [None] * count
        self._remaining = count
        self._expired = False
        self._callbacks: list[Callable[[], None]] = []
        if not count:
            self._event.set()

    @property
    def expired(self) -> bool:
        """Whether a waiter gave up; reads not yet begun are then skipped."""
        return self._expired

    def settled(self) -> bool:
        """Whether the tier is done with every destination."""
        return self._event.is_set()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until settled; False when time ran out, which changes nothing."""
        return self._event.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> list[ReadStatus]:
        """Return a status for each page, ``TIMEOUT`` for those that took too long.

        Args:
            timeout_s: how long to wait; the tier's ``io_timeout_s`` when None.
        """
        self._event.wait(self._timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            late = self._remaining > 0 and not self._expired
            self._expired = self._expired or late
            statuses = [ReadStatus.TIMEOUT if s is None else s for s in self._statuses]
        if late and timeout_s is None:
            self._on_expired()
        return statuses

    def add_settled_callback(self, call: Callable[[], None]) -> None:
        """Call ``call()`` once settled: at once if it is already, else on an I/O thread."""
        with self._lock:
            if self._remaining:
                self._callbacks.append(call)
                return
        self._call(call)

    def resolve(
        self, position: int, status: ReadStatus, count: Callable[[ReadStatus], None]
    ) -> None:
        """Set the status of one page (the tier's side).

        Args:
            position: which page.
            status: what became of it; a timeout, if a waiter gave up before.
            count: told the status that holds, before anybody who waits is.
        """
        with self._lock:
            assert self._statuses[position] is None, "a page was resolved twice"
            status = ReadStatus.TIMEOUT if self._expired else status
            count(status)
            self._statuses[position] = status
            self._remaining -= 1
            if self._remaining:
                return
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            self._call(call)
        self._event.set()

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a caller's callback must not fail an I/O job
            self._counters.add("callback_errors")
            logger.exception("a read callback failed")
