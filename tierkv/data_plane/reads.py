"""Pages on their way from disk into host memory: read once, however many need them.

A read is taken in (its pages made resident, or forgotten) by whoever needs them first, or
else before room is next looked for; no thread watches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierkv.data_plane.parts import PART_BYTES, cut_pages
from tierkv.devices.base import Traffic
from tierkv.storage.types import ReadStatus
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.storage.tickets import ReadTicket

_FORGET = (ReadStatus.MISS, ReadStatus.CORRUPT)


class ReadPart:
    """Some layers of the pages of a read.

    Attributes:
        layers: the model layers.
        rows: the pages whose status this part has; bytes of others came with earlier parts.
    """

    __slots__ = ("_ticket", "layers", "rows")

    def __init__(self, layers: Sequence[int], rows: Sequence[int], ticket: ReadTicket) -> None:
        self.layers = tuple(layers)
        self.rows = tuple(rows)
        self._ticket = ticket

    def settled(self) -> bool:
        """Return whether the disk is done with it."""
        return self._ticket.settled()

    def wait(self, timeout_s: float) -> bool:
        """Wait until settled; False when the time is up."""
        return self._ticket.wait_settled(timeout_s)

    def end(self) -> dict[int, ReadStatus]:
        """Return the statuses by row; what is not over by now is given up, as a timeout."""
        return dict(zip(self.rows, self._ticket.wait(0.0), strict=True))


class Read:
    """Pages being read.  Its fields change with the store's lock held.

    Attributes:
        rows: the pages.
        slots: the host slot that each is read into; empty until the read has started.
        parts: what is read, in order.
        deadline: when it is given up if somebody waits.
        ahead: whether it was announced, and nobody had asked for it.
        over: whether it was taken in; then ``outcome`` is complete.
        outcome: status of each page so far known.
        users: how many would miss it.
    """

    def __init__(self, rows: Sequence[int], deadline: float, *, ahead: bool) -> None:
        self.rows = tuple(rows)
        self.deadline = deadline
        self.ahead = ahead
        self.slots: Mapping[int, int] = {}
        self.parts: tuple[ReadPart, ...] = ()
        self.outcome: dict[int, ReadStatus] = {}
        self.over = False
        self.given_up = False
        self.users = 1
        self.begun = threading.Event()  # started, or will not be
        self._guards: list[Callable[[], bool]] = []

    def guard(self, over: Callable[[], bool]) -> None:
        """Keep the slots of pages that prove bad until ``over()``: somebody copies from them."""
        self._guards.append(over)

    def settled(self) -> bool:
        """Return whether the disk is done with all parts."""
        return self.begun.is_set() and all(part.settled() for part in self.parts)

    def quiet(self) -> bool:
        """Return whether nothing touches the slots any more."""
        return self.settled() and all(over() for over in self._guards)


class Reads:
    """The reads of a store that are under way.  Thread-safe; the lock's state is said at each.

    Args:
        core: the store's parts.
        when: does something, with the lock held, once a condition is met.

    Attributes:
        trusted: False after a read that failed for no reason of the page's, until one succeeds.
        part_bytes: least size of a part, where pages are read in parts.
    """

    def __init__(
        self, core: Core, when: Callable[[Callable[[], bool], Callable[[], None]], None]
    ) -> None:
        self._core = core
        self._when = when
        self._under_way: dict[int, Read] = {}
        self._ahead: set[bytes] = set()  # read ahead and not used yet
        self._meter = Meter(core.clock)
        self.trusted = True
        self.part_bytes = PART_BYTES

    # -- with the lock held --------------------------------------------------------------

    def join(self, rows: Sequence[int]) -> dict[Read, list[int]]:
        """Become a user of the reads of these pages that are under way; return them."""
        joined: dict[Read, list[int]] = {}
        for row in rows:
            read = self._under_way.get(row)
            if read is not None:
                joined.setdefault(read, []).append(row)
        for read in joined:
            read.users += 1
        return joined

    def open(self, rows: Sequence[int], deadline: float, *, ahead: bool = False) -> Read:
        """Return a read of pages that no other is reading, for one user; then ``start`` it."""
        read = Read(rows, deadline, ahead=ahead)
        assert self._under_way.keys().isdisjoint(rows), "a page is read twice"
        self._under_way.update(dict.fromkeys(rows, read))
        self._core.index.pin(np.asarray(rows, np.int32), Tier.HOST)  # the rows stay valid
        if ahead:
            self._remember(rows)
        return read

    def leave(self, reads: Sequence[Read]) -> None:
        """Stop being a user; what nobody uses any more is given up."""
        for read in reads:
            read.users -= 1
            if not read.users and not read.over:
                read.given_up = True
                self.take_in(read, late=True)

    def take_in(self, read: Read, *, late: bool = False) -> None:
        """Make the pages that arrived resident; once, when the disk is done with all of them.

        Args:
            read: the read.
            late: give up what is not over.
        """
        if read.over or not (late or read.settled()):
            return
        read.over = True
        for part in read.parts:
            self.judge(read, part)
        core, good = self._core, list[int]()
        for row in read.rows:
            if read.outcome.setdefault(row, ReadStatus.ERROR) is ReadStatus.HIT:
                good.append(row)
            elif read.ahead:
                self._ahead.discard(core.index.key(row))
        self.trusted = self.trusted or len(good) == len(read.rows)
        fresh = [row for row in good if row in read.slots and not core.is_in(row, Tier.HOST)]
        core.planner.install(Tier.HOST, fresh, [read.slots[row] for row in fresh])
        core.count_bytes(fresh, Tier.DISK, Tier.HOST)
        core.index.unpin(np.asarray(read.rows, np.int32), Tier.HOST)
        for row in read.rows:
            del self._under_way[row]
        unused = [slot for row, slot in read.slots.items() if row not in set(fresh)]
        if unused:
            self._when(read.quiet, partial(core.planner.give_back, Tier.HOST, unused))
        read.begun.set()
        core.settled.notify_all()

    def judge(self, read: Read, part: ReadPart) -> None:
        """Enter what became of a part; pages that prove bad are forgotten at once."""
        core = self._core
        for row, status in part.end().items():
            if read.outcome.get(row, ReadStatus.HIT) is not ReadStatus.HIT:
                continue  # an earlier part has failed already
            read.outcome[row] = status
            if status in _FORGET:
                if core.is_in(row, Tier.DISK):
                    core.planner.evict(Tier.DISK, [row])
                core.counters.disk_misses += status is ReadStatus.MISS
                core.counters.disk_corrupt += status is ReadStatus.CORRUPT
            elif status is not ReadStatus.HIT and not read.given_up:
                self.trusted = False
                core.counters.disk_errors += status is not ReadStatus.TIMEOUT
                core.counters.disk_timeouts += status is ReadStatus.TIMEOUT

    def note_use(self, rows: Sequence[int]) -> None:
        """Count the pages that were read ahead, or are, and are needed now."""
        if self._ahead:
            used = self._ahead.intersection(map(self._core.index.key, rows))
            self._ahead -= used
            self._core.counters.prefetched_pages += len(used)

    def slots_ahead(self) -> int:
        """Return how many host slots announced reads hold."""
        reads = {id(read): read for read in self._under_way.values() if read.ahead}
        return sum(len(read.slots) or len(read.rows) for read in reads.values())

    def give_up(self) -> None:
        """Give up every read that has started."""
        for read in set(self._under_way.values()):
            if read.parts:
                read.given_up = True
                self.take_in(read, late=True)

    def check(self) -> None:
        """Raise AssertionError when a slot or pin of a read is unaccounted for."""
        core, slots = self._core, list[int]()
        for read in set(self._under_way.values()):
            assert not read.over, "a read that is over is under way"
            assert all(self._under_way[row] is read for row in read.rows), "a page is read twice"
            assert core.index.pins(read.rows, Tier.HOST).min() > 0, "a page is read unpinned"
            slots += read.slots.values()
        assert len(set(slots)) == len(slots), "two pages are read into one slot"
        free = [slot for slot in slots if core.planner.holders(Tier.HOST, slot) != 1]
        assert not free, f"host slots {free} are read into and not held for that"

    # -- without the lock ----------------------------------------------------------------

    def start(self, read: Read, slots: Sequence[int] | None, *, in_parts: bool = False) -> None:
        """Hand a read to the disk; it is over at once where there are no slots.

        Args:
            read: opened before.
            slots: held host slots, one a page; None when there were none to be had.
            in_parts: layer by layer, the first layers of all pages first.
        """
        core = self._core
        try:
            parts = [] if slots is None else self._submit(read.rows, slots, in_parts=in_parts)
        except BaseException:
            with core.lock:
                core.planner.give_back(Tier.HOST, slots or ())
                self.take_in(read, late=True)
            raise
        with core.lock:
            if slots is None:
                self.take_in(read, late=True)
                return
            read.slots = dict(zip(read.rows, slots, strict=True))
            read.parts = tuple(parts)
            read.begun.set()
            self._when(read.settled, partial(self.take_in, read))

    def wait(self, read: Read, deadline: float) -> bool:
        """Wait for a read and take it in; False when ``deadline`` is earlier."""
        if not read.begun.wait(max(0.0, deadline - self._core.clock())):
            return False
        return all(self.wait_part(read, part, deadline) for part in read.parts)

    def wait_part(self, read: Read, part: ReadPart, deadline: float) -> bool:
        """Wait until it is known what became of a part; False when ``deadline`` is earlier."""
        core = self._core
        settled = part.wait(max(0.0, min(deadline, read.deadline) - core.clock()))
        with core.lock:
            self.take_in(read, late=not settled and core.clock() >= read.deadline)
            return settled or read.over

    def wait_for_room(self, deadline: float) -> bool:
        """Wait until the slots of a read become resident; False when none will in time."""
        core = self._core
        with core.lock:
            now = core.clock()
            running = [r for r in self._under_way.values() if r.parts and r.deadline > now]
        return bool(running) and self.wait(running[0], deadline)

    def traffic(self) -> Traffic:
        """Return what the finished reads took; time in which several ran counts once."""
        return self._meter.traffic()

    def _submit(
        self, rows: Sequence[int], slots: Sequence[int], *, in_parts: bool
    ) -> list[ReadPart]:
        core, disk = self._core, self._core.disk
        assert disk is not None, "a read without a disk"
        with core.lock:
            pages = [
                (row, core.group_of(row), core.index.key(row), core.arena.slot(slot)[:size])
                for row, slot in zip(rows, slots, strict=True)
                for size in (core.page_bytes(row),)
            ]
        keys, places = [page[2] for page in pages], [page[3] for page in pages]
        if core.device.checks_order:
            core.device.host_use("disk read", writes=[core.host_memory[slot] for slot in slots])
        if not in_parts:
            tickets = [disk.submit_read(keys, places, namespace=core.namespace.digest)]
            parts = [ReadPart(sorted(core.spec.layer_to_group), rows, tickets[0])]
            sizes = [[place.nbytes for place in places]]
        else:
            whole = [not raw for raw in disk.in_ranges(keys)]
            cuts = cut_pages(core.spec, pages, whole, self.part_bytes)
            batches = [cut.reads for cut in cuts]
            tickets = disk.submit_ranges(batches, namespace=core.namespace.digest)
            parts = [ReadPart(c.layers, c.rows, t) for c, t in zip(cuts, tickets, strict=True)]
            sizes = [[read.destination.nbytes for read in batch] for batch in batches]
        for ticket, of in zip(tickets, sizes, strict=True):
            self._meter.watch(ticket, of)
        return parts

    def _remember(self, rows: Sequence[int]) -> None:
        """Keep in mind which pages are read ahead; those that left again are forgotten."""
        core = self._core
        if len(self._ahead) > 2 * core.planner.capacity(Tier.HOST):
            held = core.find_rows(list(self._ahead))
            kept = [r for r in held if core.is_in(r, Tier.HOST) or r in self._under_way]
            self._ahead = set(map(core.index.key, kept))
        self._ahead.update(map(core.index.key, rows))


class Meter:
    """Adds up what reads took.  Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._traffic = Traffic(0, 0, 0.0)

    def watch(self, ticket: ReadTicket, sizes: Sequence[int]) -> None:
        """Count a read from now until the disk is done with it."""
        with self._lock:
            if not self._running:
                self._since = self._clock()
            self._running += 1
        ticket.add_settled_callback(lambda: self._ended(ticket.wait(0.0), sizes))

    def traffic(self) -> Traffic:
        """Return the sums so far."""
        with self._lock:
            return self._traffic

    def _ended(self, statuses: Sequence[ReadStatus], sizes: Sequence[int]) -> None:
        got = sum(n for n, s in zip(sizes, statuses, strict=True) if s is ReadStatus.HIT)
        with self._lock:
            now, old = self._clock(), self._traffic
            self._running -= 1
            self._traffic = Traffic(
                old.batches + 1, old.bytes + got, old.seconds + now - self._since
            )
            self._since = now
