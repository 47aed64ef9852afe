"""The end of a tier: in order, out of time, or forgotten."""

from __future__ import annotations

import logging
import os
import warnings

from tierkv.storage.core import Core
from tierkv.storage.reader import Reader
from tierkv.storage.writer import Writer

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0


class Lifetime:
    """What must be shut down, apart from the facade, so that forgetting that is noticed."""

    def __init__(self, core: Core, reader: Reader, writer: Writer | None) -> None:
        self._core = core
        self._reader = reader
        self._writer = writer
        self._result: bool | None = None

    def close(self, timeout_s: float) -> bool:
        """Shut down once; see ``SsdTier.close``."""
        if self._result is not None:
            return self._result
        self._core.closing = True
        self._result = self._reader.stop(timeout_s)
        if self._writer is not None:
            self._result = self._writer.stop(timeout_s) and self._result
        if self._result:
            self._core.release()
        else:
            logger.error(
                "%s: I/O still hangs after %.1f s; the directory stays locked until this "
                "process ends",
                self._core.layout.root,
                timeout_s,
            )
        return self._result

    def abandon(self) -> None:
        """Shut down a tier that nobody closed: it was garbage, or the interpreter ends."""
        if self._result is not None or os.getpid() != self._core.pid:
            return
        self.close(EXIT_TIMEOUT_S)
        warnings.warn(
            f"SSD tier {self._core.layout.root} was not closed", ResourceWarning, stacklevel=2
        )
