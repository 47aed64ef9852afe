"""What all attached pools of a store have running: copies, leases, keys being saved.

There is no thread that watches copies: every call into an attached pool begins with
``tick``, which takes finished copies in and ends leases whose time is up.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from tierkv.data_plane.flushing import write_pages
from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.lease import Lease
    from tierkv.attached.pool import AttachedPool
    from tierkv.control_plane.hints import Hints
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers
    from tierkv.devices.base import Event
    from tierkv.storage.tickets import WriteTicket

Block = tuple[int, int]  # memory domain of the pool, block id


class Flight(ABC):
    """One load or save: its copies, the blocks they touch, the host slots they hold.

    The subclasses say what becomes of it once the copies are over.
    """

    def __init__(self, core: Core, pool: AttachedPool, blocks: Iterable[Block]) -> None:
        self.pool = pool
        self.blocks = frozenset(blocks)
        self._core = core
        self._events: list[tuple[int, Event]] = []  # with the layer group each is about
        self._complete = threading.Event()  # set when no further copies will be enqueued
        self._broken = False  # copies could not even be enqueued

    @property
    def slots(self) -> list[int]:
        """Host slots held for it."""
        return []

    @property
    def keys(self) -> list[bytes]:
        """Keys of the pages that it may make visible."""
        return []

    def copies_done(self) -> bool:
        """Return whether no copy touches blocks or slots any more, nor will."""
        return self._complete.is_set() and all(event.done() for _, event in self._events)

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until the copies are over; False when time is up."""
        deadline = self._core.clock() + timeout_s
        if not self._complete.wait(timeout_s):
            return False
        for _, event in list(self._events):
            with suppress(DeviceError):  # what failed is found out when it is settled
                if not event.wait(max(0.0, deadline - self._core.clock())):
                    return False
        return True

    @abstractmethod
    def settle(self) -> list[bytes]:
        """Take the outcome in; return the keys of new pages.  Lock held, copies done."""

    def failed_groups(self) -> set[int]:
        """Return the layer groups of which a copy failed.  Call when the copies are done."""
        failed = set(range(len(self._core.spec.groups))) if self._broken else set()
        for group, event in self._events:
            try:
                event.wait(0.0)
            except DeviceError:
                failed.add(group)
        return failed


class Flights:
    """Running loads, saves and leases of a store's attached pools.  Thread-safe."""

    def __init__(
        self, core: Core, transfers: Transfers, hints: Hints, publish: Callable[[], None]
    ) -> None:
        self._core = core
        self._transfers = transfers
        self._hints = hints
        self._publish = publish
        self._flights: list[Flight] = []
        self._leases: list[Lease] = []
        self._unwritten: deque[bytes] = deque()
        self._writing: WriteTicket | None = None

    def tick(self) -> None:
        """Take in what is over, end leases whose time is up, go on writing through."""
        core = self._core
        fresh: list[bytes] = []
        with core.lock:
            self._hints.tick(core.clock())
            for lease in [lease for lease in self._leases if not lease.held]:
                lease.pool.counters.leases_expired += 1
                lease.release()
            over = [flight for flight in self._flights if flight.copies_done()]
            for flight in over:
                self._flights.remove(flight)
                fresh += flight.settle()
            if over:
                core.settled.notify_all()
        if core.write_through:
            self._write_through(fresh)
        elif fresh:
            self._transfers.write_behind()
        if fresh:
            self._publish()

    def begin(self, flight: Flight) -> None:
        """Enter a load or save.  Call with the lock held.

        Raises:
            InvalidInputError: it touches blocks that another one is still using.
        """
        busy = flight.blocks & self.busy(flight.pool)
        if busy:
            raise InvalidInputError(
                f"blocks {sorted({block for _, block in busy})} are still used by a running load "
                "or save of this pool; wait for its ticket first"
            )
        self._flights.append(flight)

    def busy(self, pool: AttachedPool) -> set[Block]:
        """Return the blocks of a pool that running copies use.  Call with the lock held."""
        return {b for flight in self._flights if flight.pool is pool for b in flight.blocks}

    def saving(self) -> set[bytes]:
        """Return the keys of pages that are being saved.  Call with the lock held."""
        return {key for flight in self._flights for key in flight.keys}

    def add_lease(self, lease: Lease) -> None:
        """Enter a lease.  Call with the lock held."""
        self._leases.append(lease)

    def lease_ended(self, lease: Lease) -> None:
        """Called by a lease that has given its pins back."""
        with suppress(ValueError):  # an empty lease was never entered
            self._leases.remove(lease)

    def leases(self, pool: AttachedPool) -> list[Lease]:
        """Return the leases of a pool that have not ended.  Call with the lock held."""
        return [lease for lease in self._leases if lease.pool is pool]

    def of(self, pool: AttachedPool) -> list[Flight]:
        """Return the running loads and saves of a pool.  Call with the lock held."""
        return [flight for flight in self._flights if flight.pool is pool]

    def drain(self, flights: Iterable[Flight], deadline: float) -> bool:
        """Wait for the copies of these loads and saves, and take them in; False when late."""
        clock = self._core.clock
        late = [f for f in flights if not f.wait_for_copies(max(0.0, deadline - clock()))]
        self.tick()
        return not late

    def all(self) -> list[Flight]:
        """Return every running load and save."""
        with self._core.lock:
            return list(self._flights)

    def close(self) -> None:
        """Leave what was not written through to the store's last flush."""
        with self._core.lock:
            self._unwritten.clear()

    def check(self) -> None:
        """Raise AssertionError when a slot, block or pin is unaccounted for."""
        core = self._core
        with core.lock:
            slots = [slot for flight in self._flights for slot in flight.slots]
            assert len(set(slots)) == len(slots), "two saves hold one host slot"
            free = [slot for slot in slots if not core.planner.holders(Tier.HOST, slot)]
            assert not free, f"saves hold host slots {free}, which are not held"
            for pool in {flight.pool for flight in self._flights}:
                blocks = [b for flight in self.of(pool) for b in flight.blocks]
                assert len(set(blocks)) == len(blocks), "two copies use one block"
            for lease in self._leases:
                lease.check()

    def _write_through(self, fresh: list[bytes]) -> None:
        """Write new pages down, a batch at a time, without waiting for any."""
        core = self._core
        with core.lock:
            self._unwritten += fresh
            if not self._unwritten or not (self._writing is None or self._writing.done()):
                return
            count = max(1, core.planner.capacity(Tier.HOST) // 4)
            keys = [self._unwritten.popleft() for _ in range(min(count, len(self._unwritten)))]
        ticket = write_pages(core, self._transfers, keys)
        with core.lock:
            self._writing = ticket
