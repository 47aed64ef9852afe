"""Saves: an engine's blocks into host slots, whole or layer by layer behind computation.

Pages become visible together, whole or not at all, once all copies are confirmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.attached.copies import Run, copies
from tierkv.attached.flights import Block, Flight
from tierkv.attached.results import SaveResult
from tierkv.control_plane.journal import Note
from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError, StoreClosedError
from tierkv.identity.keys import key_array
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.keys import EnginePage
    from tierkv.attached.pool import AttachedPool
    from tierkv.data_plane.claims import Claims
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Stream


@dataclass(frozen=True, slots=True)
class BlocksFree:
    """Says when the engine may reuse the blocks of a save."""

    _flight: SaveTicket

    def is_set(self) -> bool:
        """Return whether nothing reads the blocks any more; never blocks."""
        return self._flight.copies_done()

    def wait(self, timeout_s: float) -> bool:
        """Wait for that; False when time is up, or while layers may still be saved."""
        return self._flight.closed_to_layers and self._flight.wait_for_copies(timeout_s)


class SaveTicket(Flight):
    """Pages on their way from the engine's blocks into the tiers.  Thread-safe.

    Made by :meth:`AttachedPool.save`, or by :meth:`AttachedPool.begin_save`: then call
    :meth:`layer` after each layer has been computed, and :meth:`commit` at the end.

    Attributes:
        pages: what was to be saved.
        blocks_free: tells when the engine may reuse the blocks.
    """

    def __init__(
        self,
        core: Core,
        pool: AttachedPool,
        stream: Stream,
        pages: Sequence[EnginePage],
        wanted: Sequence[int],
        claims: Claims,
        blocks: Iterable[Block],
    ) -> None:
        """Begin a save of ``wanted``, positions in ``pages``; the others are held already."""
        super().__init__(core, pool, blocks)
        self.pages = tuple(pages)
        self.blocks_free = BlocksFree(self)
        self._stream = stream
        self._claims = claims  # pages held already that must not make room for these
        self._results: list[SaveResult | None] = [SaveResult.DUPLICATE] * len(pages)
        for at in wanted:
            self._results[at] = None
        self._slots: dict[int, int] = {}  # by position in ``pages``
        self._moves: list[list[Run]] = [[] for _ in core.spec.groups]
        self._layers_begun: set[int] = set()
        self._layers_saved: set[int] = set()  # whose copies are enqueued
        self._cancelled = False

    @property
    def slots(self) -> list[int]:
        """Host slots held for it."""
        return list(self._slots.values())

    @property
    def keys(self) -> list[bytes]:
        """Keys of the pages that it may make visible."""
        pages = zip(self.pages, self._results, strict=True)
        return [page.key for page, result in pages if result is None]

    @property
    def closed_to_layers(self) -> bool:
        """Whether the save was committed or cancelled."""
        return self._complete.is_set()

    def layer(self, layer: int) -> None:
        """Copy a layer's range of all pages, behind what has been computed so far.

        Call it in the engine's step, right after the layer's blocks have been written.

        Raises:
            InvalidInputError: the spec has no such layer, or it was saved before.
            StoreClosedError: the save was committed or cancelled.
        """
        spec = self._core.spec
        if layer not in spec.layer_to_group:
            raise InvalidInputError(
                f"layer {layer}: the spec holds layers {sorted(spec.layer_to_group)}"
            )
        with self._core.lock:
            if self.closed_to_layers:
                raise StoreClosedError("the save was committed or cancelled; begin a new one")
            if layer in self._layers_begun:
                raise InvalidInputError(f"layer {layer} was saved before; each is saved once")
            self._layers_begun.add(layer)
        group = spec.layer_to_group[layer]
        self._copy(group, spec.groups[group].layers.index(layer))

    def commit(self) -> SaveTicket:
        """Say that every layer was saved; the pages become visible once the copies are over.

        Raises:
            InvalidInputError: layers are missing; the save can go on, or be cancelled.
            StoreClosedError: the save was cancelled.
        """
        spec = self._core.spec
        with self._core.lock:
            if self._cancelled:
                raise StoreClosedError("the save was cancelled; begin a new one")
            missing = [
                layer
                for group, moves in zip(spec.groups, self._moves, strict=True)
                for layer in group.layers
                if moves and layer not in self._layers_saved
            ]
            if missing and not self._broken:
                raise InvalidInputError(f"commit: layers {missing} have not been saved yet")
            self._complete.set()
        self.pool.poll()
        return self

    def cancel(self) -> None:
        """Give the save up: no page becomes visible, and everything returns; idempotent.

        Copies that run already end first; ``blocks_free`` says when.  Pages that have become
        visible before stay.
        """
        with self._core.lock:
            self._cancelled = True
            self._complete.set()
        self.pool.poll()

    def wait(self, timeout_s: float | None = None) -> tuple[SaveResult, ...]:
        """Wait until the pages are visible; return a result for each.

        Args:
            timeout_s: how long; the store's ``io_timeout_s`` when None.  Pages that are not
                over by then are LATE, and are so no longer when asked again.
        """
        if self.closed_to_layers:
            self.wait_for_copies(self._core.timeout_s if timeout_s is None else timeout_s)
        return self.results()

    def results(self) -> tuple[SaveResult, ...]:
        """Return the results so far, LATE where a page is still on its way."""
        self.pool.poll()
        with self._core.lock:
            return tuple(SaveResult.LATE if r is None else r for r in self._results)

    def done(self) -> bool:
        """Whether every page has its result; never blocks."""
        return self.copies_done()

    def place(self, at: Sequence[int], slots: Sequence[int]) -> None:
        """Take held slots for pages; those without one find no room.  Lock held."""
        if self.closed_to_layers:  # cancelled while room was made
            self._core.planner.give_back(Tier.HOST, slots)
            return
        self._slots = dict(zip(at, slots, strict=True))
        for position, result in enumerate(self._results):
            if result is None and position not in self._slots:
                self._results[position] = SaveResult.NO_ROOM

    def plan(self, moves: list[list[Run]]) -> None:
        """Take the runs that copy the pages into their slots, by layer group."""
        self._moves = moves

    def save_all(self) -> None:
        """Copy every layer, a group at a time; call without the lock."""
        for group in range(len(self.pool.blocks.views)):
            self._copy(group, None)

    def abort(self) -> None:
        """Give up after an exception."""
        self._broken = True
        self._complete.set()

    def settle(self) -> list[bytes]:
        """Make the pages visible, or give their slots back.  Lock held, copies done."""
        core = self._core
        failed = self.failed_groups()
        whole: list[int] = []
        for at, slot in self._slots.items():
            if self._cancelled or self.pages[at].group in failed:
                self._results[at] = SaveResult.FAILED
                core.planner.give_back(Tier.HOST, [slot])
            else:
                whole.append(at)
        anchor = core.spec.anchor  # parents come before their children
        whole.sort(key=lambda at: (self.pages[at].end_token, self.pages[at].group != anchor))
        fresh = self._publish(whole)
        self._slots = {}
        self._results = [r or SaveResult.FAILED for r in self._results]
        self._claims.release()
        self._count()
        return fresh

    def _publish(self, whole: Sequence[int]) -> list[bytes]:
        """Enter pages into the index with their slots; return the keys of the new ones."""
        core, pages = self._core, [self.pages[at] for at in whole]
        if not pages:
            return []
        rows = core.index.insert(
            key_array(page.key for page in pages),
            key_array(page.parent for page in pages),
            group=np.asarray([page.group for page in pages], np.int64),
            end_tokens=np.asarray([page.end_token for page in pages], np.int64),
            num_tokens=np.asarray([page.num_tokens for page in pages], np.int64),
            now=int(core.wall_clock()),
        )
        fresh: list[tuple[int, int]] = []
        held = core.index.residency(rows).tolist()
        for at, row, tiers in zip(whole, rows.tolist(), held, strict=True):
            if row < 0 or tiers:
                self._results[at] = SaveResult.NO_ROOM if row < 0 else SaveResult.DUPLICATE
                core.planner.give_back(Tier.HOST, [self._slots[at]])
            else:
                self._results[at] = SaveResult.STORED
                fresh.append((at, row))
        new = np.asarray([row for _, row in fresh], np.int32)
        if core.planner.journal is not None:
            ids = core.planner.journal.wants_token_ids
            notes = (_note(self.pages[at], token_ids=ids) for at, _ in fresh)
            core.planner.journal.note(new.tolist(), notes)
        core.planner.install(Tier.HOST, new, [self._slots[at] for at, _ in fresh])
        core.count_bytes(new, Tier.DEVICE, Tier.HOST)
        return [self.pages[at].key for at, _ in fresh]

    def _copy(self, group: int, layer: int | None) -> None:
        """Enqueue a group's copies, of all layers or one; call without the lock."""
        core, moves = self._core, self._moves[group]
        if not moves:
            return
        view = self.pool.blocks.views[group]
        ops = copies(view, core.host_memory, moves, to_engine=False, layer=layer)
        try:
            self._stream.wait(core.device.compute.record(), core.timeout_s)
            with core.lock:  # copies and their event belong together: the stream has other users
                if self.closed_to_layers:  # cancelled meanwhile: the slots are gone
                    return
                self._stream.copy(ops)
                self._events.append((group, self._stream.record()))
                layers = view.group.layers
                self._layers_saved.update(layers if layer is None else layers[layer : layer + 1])
        except DeviceError:  # the results say so
            self._broken = True

    def _count(self) -> None:
        counters, totals = self.pool.counters, self._core.counters
        sizes = [group.page_bytes for group in self._core.spec.groups]
        for page, result in zip(self.pages, self._results, strict=True):
            if result is SaveResult.STORED:
                counters.pages_saved += 1
                counters.bytes_saved += sizes[page.group]
                totals.committed_pages += 1
            elif result is SaveResult.DUPLICATE:
                counters.pages_duplicate += 1
                totals.shared_pages += 1
            elif result is SaveResult.NO_ROOM:
                counters.pages_no_room += 1
                totals.skipped_pages += 1
            else:
                counters.save_failures += 1


def _note(page: EnginePage, *, token_ids: bool) -> Note:
    """Return what only the engine knows of a page."""
    ids = page.token_ids if token_ids else None
    return Note(page.engine_hash, page.parent_hash, None if ids is None else tuple(ids.tolist()))
