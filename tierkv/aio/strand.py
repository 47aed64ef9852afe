"""Calls that must not overlap, though their callers may come and go."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Strand:
    """Runs calls one after the other, on whatever threads they are posted to.

    Each sequence has one: a call whose caller was cancelled may still run when the next is
    made, and a sequence belongs to one thread at a time.  Waiting for one's turn occupies no
    thread.  Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._waiting: deque[Callable[[], bool]] = deque()

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits."""
        return not self._busy

    def add(self, post: Callable[[], bool]) -> None:
        """Post a call in its turn.

        Args:
            post: hands the call to a thread, which says :meth:`advance` when it has ended;
                returns False when there is no thread any more.
        """
        with self._lock:
            self._waiting.append(post)
            if self._busy:
                return
            self._busy = True
        self.advance()

    def advance(self) -> None:
        """The running call has ended: post the next one."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                post = self._waiting.popleft()
            if post():
                return
