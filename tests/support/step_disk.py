"""A disk whose reads of pages happen one by one, when a test says so."""

from __future__ import annotations

import threading

from tierkv.storage.testing import FaultyBackend

PATIENCE_S = 30


class StepDisk(FaultyBackend):
    """Passes everything on; between ``hold`` and ``free`` slabs are read step by step."""

    def __init__(self):
        super().__init__()
        self._state = threading.Condition()
        self._holding = False
        self._allowed = 0
        self._done = 0

    def hold(self):
        """Let no page be read from now on."""
        with self._state:
            self._holding, self._allowed = True, 0

    def step(self, count=1):
        """Let so many reads happen, and wait until they have."""
        with self._state:
            self._allowed += count
            goal = self._done + count
            self._state.notify_all()
            assert self._state.wait_for(lambda: self._done >= goal, PATIENCE_S), "too few reads"

    def free(self):
        """Let all reads happen."""
        with self._state:
            self._holding = False
            self._state.notify_all()

    def preadv(self, fd, buffers, offset):
        """See ``IOBackend``."""
        if "slabs" not in self._paths.get(fd, ""):
            return super().preadv(fd, buffers, offset)
        with self._state:
            allowed = self._state.wait_for(
                lambda: not self._holding or self._allowed > 0, PATIENCE_S
            )
            assert allowed, "nobody let the read happen"
            self._allowed -= self._holding
        try:
            return super().preadv(fd, buffers, offset)
        finally:
            with self._state:
                self._done += 1
                self._state.notify_all()
