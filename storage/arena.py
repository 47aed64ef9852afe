"""The host tier's memory: one page-aligned arena of equal slots."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tierkv.errors import CapacityError, InvalidInputError, StoreClosedError
from tierkv.storage.aligned import ALIGNMENT, ByteArray
from tierkv.units import format_bytes

# Left to everybody else when the size asked for is compared with what the machine has.
_HEADROOM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Size and traffic of an arena."""

    num_slots: int
    slot_bytes: int
    capacity_bytes: int
    pinned: bool
    saved_pages: int
    saved_bytes: int
    loaded_pages: int
    loaded_bytes: int


class HostArena:
    """A fixed number of page slots in one anonymous mapping.

    It holds bytes and nothing else: which slot is whose is decided elsewhere.  Slots may be
    used from several threads at once, as long as no two touch the same slot.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, pin: Callable[[memoryview], None] | None = None
    ) -> None:
        """Reserve the arena; memory is taken as slots are first written.

        Args:
            num_slots: how many slots.
            slot_bytes: size of a slot, a multiple of 4 KiB.
            pin: called once with the whole arena, to register it with a device; it may raise.

        Raises:
            InvalidInputError: no slots, or a size that is not a multiple of 4 KiB.
            CapacityError: the machine cannot give that much.
        """
        if num_slots <= 0 or slot_bytes <= 0 or slot_bytes % ALIGNMENT:
            raise InvalidInputError(
                f"host arena: needs at least one slot of a multiple of {ALIGNMENT} bytes, "
                f"got {num_slots} slots of {slot_bytes}"
            )
        size = num_slots * slot_bytes
        _check_feasible(size)
        try:
            self._map = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"host arena: the system refuses {format_bytes(size)} ({error}); ask for less"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise_huge(self._map)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._slots: ByteArray | None = np.frombuffer(self._map, np.uint8).reshape(
            num_slots, slot_bytes
        )
        self._pinned = pin is not None
        if pin is not None:
            pin(memoryview(self._map))
        self._saved = self._saved_bytes = self._loaded = self._loaded_bytes = 0

    @property
    def slots(self) -> ByteArray:
        """All slots, as a writable array ``[num_slots, slot_bytes]``."""
        if self._slots is None:
            raise StoreClosedError("host arena: closed")
        return self._slots

    def touch(self) -> None:
        """Take all of the memory now, so that no later write pays for page faults."""
        self.slots.fill(0)

    def slot(self, index: int) -> ByteArray:
        """Return slot ``index`` as a writable array ``[slot_bytes]``, 4 KiB-aligned."""
        if not 0 <= index < self.num_slots:
            raise InvalidInputError(f"host arena: no slot {index}; there are {self.num_slots}")
        view: ByteArray = self.slots[index]
        return view

    def save(self, slots: Sequence[int], pages: Sequence[ByteArray]) -> None:
        """Copy each page into its slot; a page may be shorter than a slot.

        Args:
            slots: slot indices, one a page.
            pages: one-dimensional uint8 arrays.

        Raises:
            InvalidInputError: counts differ, or a page or slot does not fit; pages before it
                have been copied.
        """
        self._check_counts(slots, pages)
        size = 0
        for index, page in zip(slots, pages, strict=True):
            np.copyto(self._part(index, page), page)
            size += page.nbytes
        self._saved += len(pages)
        self._saved_bytes += size

    def load(self, slots: Sequence[int], destinations: Sequence[ByteArray]) -> None:
        """Copy the first bytes of each slot into its destination; see ``save``."""
        self._check_counts(slots, destinations)
        size = 0
        for index, destination in zip(slots, destinations, strict=True):
            np.copyto(destination, self._part(index, destination))
            size += destination.nbytes
        self._loaded += len(destinations)
        self._loaded_bytes += size

    def stats(self) -> ArenaStats:
        """Return size and traffic."""
        return ArenaStats(
            num_slots=self.num_slots,
            slot_bytes=self.slot_bytes,
            capacity_bytes=self.num_slots * self.slot_bytes,
            pinned=self._pinned,
            saved_pages=self._saved,
            saved_bytes=self._saved_bytes,
            loaded_pages=self._loaded,
            loaded_bytes=self._loaded_bytes,
        )

    def check(self) -> None:
        """Prove that the slots cover the mapping exactly; raises AssertionError otherwise."""
        slots = self.slots
        assert slots.nbytes == len(self._map), "the slots do not cover the arena"
        assert slots.__array_interface__["data"][0] % ALIGNMENT == 0, "the arena is not aligned"

    def close(self) -> None:
        """Give the memory back once no view of a slot is left.  Safe to call twice."""
        self._slots = None
        with suppress(BufferError):  # A view is still in use: the mapping ends with it.
            self._map.close()

    def _part(self, index: int, page: ByteArray) -> ByteArray:
        slot = self.slot(index)
        if page.nbytes > self.slot_bytes or page.ndim != 1 or page.dtype != np.uint8:
            raise InvalidInputError(
                f"host arena: a page must be one-dimensional uint8 of at most {self.slot_bytes} "
                f"bytes, got {page.dtype} of shape {page.shape}"
            )
        return slot[: page.nbytes]

    @staticmethod
    def _check_counts(slots: Sequence[int], pages: Sequence[ByteArray]) -> None:
        if len(slots) != len(pages):
            raise InvalidInputError(f"host arena: {len(slots)} slots for {len(pages)} pages")


def _advise_huge(area: mmap.mmap) -> None:
    with suppress(OSError):  # Huge pages only make it quicker.
        area.madvise(mmap.MADV_HUGEPAGE)


def _check_feasible(size: int) -> None:
    available, source = available_memory()
    if size > max(0, available - _HEADROOM_BYTES):
        raise CapacityError(
            f"host arena: {format_bytes(size)} asked for, but {source} leaves "
            f"{format_bytes(available)}, of which {format_bytes(_HEADROOM_BYTES)} stay free for "
            "others; give the host tier less"
        )


def available_memory() -> tuple[int, str]:
    """Return how many bytes this process can still get, and what limits it."""
    limits = [(_meminfo_available(), "the machine's free memory")]
    limits += [(left, "the control group's limit") for left in _cgroup_left()]
    return min(limits)


def _meminfo_available() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_left() -> list[int]:
    """Return what each control group above this process leaves (version 2 and 1)."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        return []
    left = []
    for _, controllers, path in lines:
        if controllers == "":
            base, limit, used = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = path
        while True:
            bound, taken = (_read_int(f"{base}{folder}/{name}") for name in (limit, used))
            if bound is not None and taken is not None:
                left.append(max(0, bound - taken))
            if folder in ("", "/"):
                break
            folder = os.path.dirname(folder)
    return left


def _read_int(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
