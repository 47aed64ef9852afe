"""What both sides of a comparison share: memory, bytes to move, and the loop of a child.

Needs numpy and the standard library only, since a peer lives in an environment of its own.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import numpy as np


def claim_stdout() -> TextIO:
    """Return the pipe to the parent; what others print goes to standard error from now on.

    Call before importing anything that may print.
    """
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def fresh(count: int, size: int) -> np.ndarray:
    """Return ``[count, size]`` bytes on 4 KiB boundaries, in huge pages if there are, touched."""
    area = mmap.mmap(-1, count * size)
    with suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(area, np.uint8).reshape(count, size)
    pages.fill(0)
    return pages


def fill(pages: np.ndarray, seed: int = 7) -> None:
    """Write random bytes, the same in every process."""
    words = pages.reshape(-1).view(np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 2**64, len(words), dtype=np.uint64)


def scramble(page: np.ndarray) -> None:
    """Change some bytes of every 4 KiB, so that bytes left over cannot pass for a read."""
    page[::4096] ^= 0xFF


@contextmanager
def timed(result: dict[str, Any], name: str = "seconds"):
    """Put the seconds of a block into ``result[name]``."""
    started = time.perf_counter()
    yield
    result[name] = time.perf_counter() - started


def drop_from_page_cache(path: str, *, sync: bool) -> None:
    """Let the page cache forget a file; what is not written yet is only forgotten once synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sync:
            os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def serve(side: Any, pipe: TextIO) -> None:
    """Carry out one command a line, ``{"do": method, ...arguments}``, until input ends."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        method: Callable[..., Any] = getattr(side, request.pop("do"))
        pipe.write(json.dumps(method(**request)) + "\n")
        pipe.flush()
