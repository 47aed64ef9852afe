"""A private pool of I/O threads.

The threads are daemons although ``close()`` joins them: a program that ends without closing
its tier must not hang, and an ordinary thread that waits for work (or for a hung disk) would
keep the interpreter from exiting.
"""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import Protocol

from tierkv.storage.counters import Counters

logger = logging.getLogger(__name__)


class Job(Protocol):
    """One piece of work for a pool."""

    def run(self) -> None:
        """Do the work, and report the result."""
        ...

    def fail(self, error: BaseException) -> None:
        """Report that ``run`` raised.  Must not raise."""
        ...


class Turns:
    """Bounds how many transfers are under way at once, whatever the number of threads.

    A pool has more threads than turns, so that one can hash while others transfer.
    """

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()  # quicker than a semaphore
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *error: object) -> None:
        self._free.put(None)


class WorkerPool:
    """A fixed number of threads that take jobs from one queue, in order."""

    def __init__(self, name: str, threads: int, counters: Counters) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._counters = counters
        self._threads = [
            threading.Thread(target=self._work, name=f"tierkv-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._queue.put(job)

    def stop(self) -> None:
        """Ask the threads to end once the queue is empty."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after ``stop``; False when time ran out."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job.run()
            except BaseException as error:  # the top frame: a job's failure never ends a thread
                self._counters.add("worker_errors")
                logger.exception("an I/O job failed unexpectedly")
                job.fail(error)
            job = None  # a waiting thread must not keep the last page's memory alive
