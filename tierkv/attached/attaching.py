"""What a store keeps for all pools attached to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tierkv.attached.flights import Flights
from tierkv.attached.pool import AttachedPool
from tierkv.attached.saves import SaveTicket
from tierkv.attached.staging import Stager

if TYPE_CHECKING:
    from tierkv.attached.views import PoolTensors
    from tierkv.control_plane.hints import Hints
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.transfer import Transfers

_PUBLISH_EVERY_S = 0.2


class Attachments:
    """The attached pools of one store.  Thread-safe.

    Attributes:
        core: the parts of the open store.
        transfers: moves pages between its tiers.
        hints: its pins.
        flights: what runs in all the pools.
        stager: reads pages for all the pools.
    """

    def __init__(
        self, core: Core, transfers: Transfers, hints: Hints, publish: Callable[[], None]
    ) -> None:
        self.core = core
        self.transfers = transfers
        self.hints = hints
        self.flights = Flights(core, transfers, hints, self.publish)
        self._publish = publish
        self._published_at = float("-inf")
        self.stager = Stager(core, transfers)
        self._pools: list[AttachedPool] = []

    def attach(self, tensors: PoolTensors, layout: str) -> AttachedPool:
        """Attach a pool; see :meth:`tierkv.Store.attach_pool`."""
        pool = AttachedPool(self, tensors, layout)
        with self.core.lock:
            self._pools.append(pool)
        return pool

    def publish(self) -> None:
        """Tell the outside what the store did, now and then: engines ask far more often."""
        now = self.core.clock()
        if now - self._published_at >= _PUBLISH_EVERY_S:
            self._published_at = now
            self._publish()

    def settle(self) -> None:
        """Wait for saves that were committed, at most the store's deadline."""
        core = self.core
        running = [
            flight
            for flight in self.flights.all()
            if isinstance(flight, SaveTicket) and flight.closed_to_layers
        ]
        if running:
            self.flights.drain(running, core.deadline())

    def closed(self, pool: AttachedPool) -> None:
        """Called by a pool that has given everything back."""
        with self.core.lock:
            self._pools.remove(pool)

    def close(self) -> None:
        """Close all pools."""
        with self.core.lock:
            pools = list(self._pools)
        for pool in pools:
            pool.close()
        self.flights.close()

    def check(self) -> None:
        """Raise AssertionError when something is unaccounted for."""
        self.flights.check()
