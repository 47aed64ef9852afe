"""Which address is whose on the simulated device, and who touched each byte last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

DEVICE, HOST, DISK = "device", "host", "disk"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One step of a timeline: a copy, a kernel, or something that the host did.

    Attributes:
        timeline: number of the stream, or of the host.
        number: how many steps the timeline had taken with this one; a batch of copies is one.
        what: names it in reports, its timeline included.
    """

    timeline: int
    number: int
    what: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """The accesses to some bytes that later ones must be ordered after."""

    write: Operation | None
    reads: tuple[Operation, ...]


_CLEAN = Cell(None, ())


class Memory:
    """One allocation: its name, and its bytes as cells that share a history.

    Args:
        name: for reports.
        kind: ``"device"``, ``"host"`` or ``"disk"``.
        start: address.
        size: bytes.
        slot_bytes: what reports count slots in; 0 for none.
        storage: keeps memory that nobody else vouches for from being given away.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        start: int,
        size: int,
        slot_bytes: int = 0,
        storage: UntypedStorage | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.start = start
        self.stop = start + size
        self.slot_bytes = slot_bytes
        self.storage = storage
        self._starts = [start]
        self._cells = [_CLEAN]
        self._tidy_at = 512

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Split cells at both addresses; return the positions of those in between."""
        return self._split(start), self._split(stop)

    def cells(self, first: int, last: int) -> Iterator[tuple[int, int, Cell]]:
        """Yield (start, stop, cell) of the cells at positions [first, last)."""
        starts = self._starts
        for at in range(first, last):
            stop = starts[at + 1] if at + 1 < len(starts) else self.stop
            yield starts[at], stop, self._cells[at]

    def replace(self, first: int, last: int, change: Callable[[Cell], Cell]) -> None:
        """Replace the cells at positions [first, last), joining those that become the same."""
        cells = self._cells
        old: Cell | None = None
        new = _CLEAN
        starts_kept: list[int] = []
        cells_kept: list[Cell] = []
        for at in range(first, last):
            if cells[at] is old:
                continue
            old = cells[at]
            new = change(old)
            if not cells_kept or new is not cells_kept[-1]:
                starts_kept.append(self._starts[at])
                cells_kept.append(new)
        self._starts[first:last] = starts_kept
        cells[first:last] = cells_kept

    def tidy(self, settled: Callable[[Operation], bool]) -> None:
        """Forget, now and then, the operations that everything to come is ordered after."""
        if len(self._cells) >= self._tidy_at:
            self.forget(settled)
            self._tidy_at = max(512, 2 * len(self._cells))

    def forget(self, settled: Callable[[Operation], bool]) -> bool:
        """Forget those operations; return whether none are left."""

        def left(cell: Cell) -> Cell:
            write = None if cell.write is None or settled(cell.write) else cell.write
            reads = tuple(read for read in cell.reads if not settled(read))
            if write is None and not reads:
                return _CLEAN
            return cell if write is cell.write and reads == cell.reads else Cell(write, reads)

        self.replace(0, len(self._cells), left)
        return len(self._cells) == 1 and self._cells[0] is _CLEAN

    def describe(self, start: int, stop: int) -> str:
        """Name a byte range by its slots."""
        low, high = start - self.start, stop - self.start
        size = self.slot_bytes
        if not size or self.stop - self.start <= size:
            return f"{self.name} bytes {low} to {high}"
        first, last = low // size, (high - 1) // size
        if first == last:
            return f"{self.name} slot {first} bytes {low - first * size} to {high - first * size}"
        if low % size == 0 and high % size == 0:
            return f"{self.name} slots {first} to {last}"
        return (
            f"{self.name} slot {first} byte {low - first * size} to slot {last} byte "
            f"{high - last * size}"
        )

    def _split(self, address: int) -> int:
        """Make a cell begin at an address; return its position."""
        if address >= self.stop:
            return len(self._starts)
        at = bisect_right(self._starts, address) - 1
        if self._starts[at] == address:
            return at
        self._starts.insert(at + 1, address)
        self._cells.insert(at + 1, self._cells[at])
        return at + 1


class MemoryMap:
    """All memory that operations have named.  Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._memories: list[Memory] = []
        self._slot_bytes = 0
        self._adopted = 0

    def add(self, memory: Memory) -> None:
        """Enter memory; what lay at its addresses before is gone."""
        if memory.kind == DEVICE and memory.slot_bytes:
            self._slot_bytes = memory.slot_bytes
        if memory.stop == memory.start:
            return
        low, high = memory.start, memory.stop
        kept = [m for m in self._memories if m.stop <= low or m.start >= high]
        self._memories = sorted([*kept, memory], key=lambda m: m.start)
        self._starts = [m.start for m in self._memories]

    def clear(self) -> None:
        """Forget all memory."""
        self._starts, self._memories = [], []

    def slot_bytes_for(self, size: int) -> int:
        """Return the slot size of host memory: pages have the same size in every tier."""
        slot = self._slot_bytes
        return slot if slot and size % slot == 0 else 0

    def find(self, tensor: Tensor, settled: Callable[[Operation], bool]) -> Memory:
        """Return the memory that a tensor lies in; memory of others is taken in.

        It is held on to as long as operations on it are of interest, so that its address
        cannot come to mean another tensor.
        """
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._memories[at].stop:
            return self._memories[at]
        others = [m for m in self._memories if m.storage is not None and m.forget(settled)]
        self._memories = [m for m in self._memories if m not in others]
        storage = tensor.untyped_storage()
        self._adopted += 1
        name = f"memory of the caller's #{self._adopted}"
        found = Memory(name, DEVICE, storage.data_ptr(), storage.nbytes(), 0, storage)
        self.add(found)
        return found
