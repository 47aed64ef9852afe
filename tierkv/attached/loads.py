"""Loads: host slots into an engine's blocks, layer by layer or whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierkv.attached.copies import Run, copies
from tierkv.attached.flights import Block, Flight
from tierkv.attached.results import LoadResult
from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.pool import AttachedPool
    from tierkv.data_plane.claims import Claims
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Event, Stream

LoadResults = tuple[tuple[LoadResult, ...], ...]


class LoadTicket(Flight):
    """Pages on their way into the engine's blocks.  Thread-safe.

    Made by :meth:`AttachedPool.load`.
    """

    def __init__(
        self,
        core: Core,
        pool: AttachedPool,
        counts: Sequence[int],
        claims: Claims | None,
        blocks: Iterable[Block] = (),
    ) -> None:
        super().__init__(core, pool, blocks)
        self._counts = tuple(counts)
        self._claims = claims
        self._by_layer: dict[int, Event] = {}
        self._bytes = [0] * len(counts)
        self._results: LoadResults | None = None
        if claims is None:
            self._results = self._all(LoadResult.MISSED)
            self._complete.set()

    @contextmanager
    def layer(self, layer: int) -> Iterator[bool]:
        """Reach a layer's blocks after its copies: ``with ticket.layer(i):`` around its use.

        Entering orders the compute stream after the copies.  The value is False when a copy
        of the layer is known to have failed, came too late or never began; the results then
        name the pages, and nothing is raised in the engine's step.

        Raises:
            InvalidInputError: the spec has no such layer.
        """
        spec = self._core.spec
        if layer not in spec.layer_to_group:
            raise InvalidInputError(
                f"layer {layer}: the spec holds layers {sorted(spec.layer_to_group)}"
            )
        yield self._enter(layer)

    def wait(self, timeout_s: float | None = None) -> LoadResults:
        """Wait for the copies; return a result for each page, by layer group.

        Args:
            timeout_s: how long; the store's ``io_timeout_s`` when None.  Pages that are not
                over by then are LATE, and are so no longer when asked again.
        """
        self.wait_for_copies(self._core.timeout_s if timeout_s is None else timeout_s)
        return self.results()

    def results(self) -> LoadResults:
        """Return the results so far, LATE where a page is still on its way."""
        if self._results is None:
            self.pool.poll()
        return self._all(LoadResult.LATE) if self._results is None else self._results

    def done(self) -> bool:
        """Whether every page has its result; never blocks."""
        return self._results is not None or self.copies_done()

    def start(self, stream: Stream, moves: Sequence[Sequence[Run]], *, layerwise: bool) -> None:
        """Enqueue the copies; call without the lock.

        Args:
            stream: the load stream.
            moves: what to move, by layer group.
            layerwise: in the model's layer order, one event a layer; else a group at a time.
        """
        core = self._core
        try:
            # The engine may still be reading what the blocks held before.
            stream.wait(core.device.compute.record(), core.timeout_s)
            if layerwise:
                for layer in sorted(core.spec.layer_to_group):
                    number = core.spec.layer_to_group[layer]
                    self._enqueue(stream, number, moves[number], (layer,))
            else:
                for number, group in enumerate(core.spec.groups):
                    self._enqueue(stream, number, moves[number], group.layers)
        except DeviceError:  # the results say so
            self._broken = True
        except BaseException:
            self._broken = True
            raise
        finally:
            self._complete.set()

    def settle(self) -> list[bytes]:
        """Take the outcome in.  Lock held, copies done."""
        assert self._claims is not None
        failed = self.failed_groups()
        self._results = tuple(
            (LoadResult.FAILED if group in failed else LoadResult.LOADED,) * count
            for group, count in enumerate(self._counts)
        )
        self._claims.release()
        counters, totals = self.pool.counters, self._core.counters
        for group, count in enumerate(self._counts):
            if group in failed:
                counters.load_failures += count
            else:
                counters.pages_loaded += count
                counters.bytes_loaded += self._bytes[group]
                totals.bytes_out[Tier.HOST.label] += self._bytes[group]
                totals.bytes_in[Tier.DEVICE.label] += self._bytes[group]
        return []

    def _enqueue(
        self, stream: Stream, group: int, moves: Sequence[Run], layers: Sequence[int]
    ) -> None:
        core, view = self._core, self.pool.blocks.views[group]
        if not moves:
            return
        blocks = sum(run.pages * run.count for run in moves)
        self._bytes[group] += blocks * view.block_bytes * len(layers)
        only = view.group.layers.index(layers[0]) if len(layers) < len(view.group.layers) else None
        ops = copies(view, core.host_memory, moves, to_engine=True, layer=only)
        with core.lock:  # copies and their event belong together: the stream has other users
            stream.copy(ops)
            event = stream.record()
            self._events.append((group, event))
        self._by_layer.update(dict.fromkeys(layers, event))

    def _enter(self, layer: int) -> bool:
        group = self._core.spec.layer_to_group[layer]
        if self._results is not None:
            return all(result is LoadResult.LOADED for result in self._results[group])
        event = self._by_layer.get(layer)
        if event is None:  # nothing of this layer is on its way
            return not self._broken
        try:
            self._core.device.compute.wait(event, self._core.timeout_s)
        except DeviceError:
            return False
        return True

    def _all(self, result: LoadResult) -> LoadResults:
        return tuple((result,) * count for count in self._counts)
