"""Finding a slot for a new page: free, freed by a sync, preallocated, or taken from old slabs."""

from __future__ import annotations

import logging

from tierkv.storage.committer import Committer
from tierkv.storage.core import Core
from tierkv.storage.layout import SlabMeta
from tierkv.storage.slabs import NO_SPACE_ERRNOS, choose_slab_slots

logger = logging.getLogger(__name__)


class Allocator:
    """Hands out slots.  Belongs to the writer thread."""

    def __init__(self, core: Core, committer: Committer) -> None:
        self._core = core
        self._committer = committer
        self._slab_slots = choose_slab_slots(
            core.config.slab_bytes or core.capacity_bytes, core.slot_bytes
        )
        if core.config.slab_bytes is not None:
            self._slab_slots = core.config.slab_bytes // core.slot_bytes
        self._told_full = False

    def take(self) -> tuple[SlabMeta, int] | None:
        """Return a slot for a page of the configured size, or None when there is none."""
        catalog = self._core.catalog
        place = catalog.take()
        if place is None and self._make_room():
            place = catalog.take()
        return place

    def _make_room(self) -> bool:
        counts = self._core.catalog.counts()
        if self._create():
            return True
        waiting = counts.doomed + counts.deferred
        if waiting and self._committer.commit_and_sync() and self._core.catalog.has_room():
            return True
        return self._reclaim()

    def _create(self) -> bool:
        """Preallocate one more slab, as far as capacity and disk allow."""
        core = self._core
        left = core.capacity_bytes - core.files.total_bytes
        slots = min(self._slab_slots, left // core.slot_bytes)
        if slots <= 0:
            return False
        try:
            slab = core.files.create(core.slot_bytes, slots)
        except OSError as error:
            core.counters.add("error_allocate")
            if not self._told_full:
                self._told_full = True
                full = error.errno in NO_SPACE_ERRNOS
                logger.warning(
                    "%s: no new slab of %d bytes (%s)%s",
                    core.layout.slabs,
                    slots * core.slot_bytes,
                    error.strerror,
                    "; pages are refused until space returns" if full else "",
                )
            return False
        self._told_full = False
        core.catalog.add_slab(slab)
        return True

    def _reclaim(self) -> bool:
        """Drop a slab that new pages cannot use, to make room for one that they can."""
        core = self._core
        for slab in core.catalog.reclaimable():
            keys = core.catalog.drop_slab(slab.id)
            if keys is None:
                continue
            self._committer.forget(keys)
            try:
                core.files.drop(slab.id)
            except OSError as error:
                core.counters.add("error_allocate")
                logger.warning("slab %04d cannot be removed: %s", slab.id, error.strerror)
                continue
            if self._create():
                return True
        return False

    def retire(self, slab_id: int) -> None:
        """Write no more into a slab after an I/O error."""
        core = self._core
        slab = core.catalog.slab(slab_id)
        if slab.state != "active":
            return
        core.counters.add("retired_slabs")
        logger.warning("slab %04d is retired after an I/O error; its pages are still read", slab_id)
        try:
            retired = core.files.retire(slab_id)
        except OSError as error:
            core.counters.add("error_allocate")
            logger.warning("meta cannot be written: %s", error.strerror)
            retired = core.files.retire_in_memory(slab_id)
        core.catalog.set_meta(retired)
