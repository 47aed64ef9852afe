"""The store: tiers of one model's pages, behind one small thread-safe interface."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.attached.attaching import Attachments
from tierkv.control_plane.hints import Hints
from tierkv.data_plane.announcing import Announcement, announce
from tierkv.data_plane.finding import find_pages, key_chains
from tierkv.data_plane.flushing import flush
from tierkv.data_plane.loading import Loader
from tierkv.data_plane.opening import Options, open_core
from tierkv.data_plane.room import check_fits, check_prompt
from tierkv.data_plane.subscribing import subscribe
from tierkv.data_plane.transfer import Transfers
from tierkv.errors import ForkError, StoreClosedError
from tierkv.identity.keys import Extras, Namespace, as_tokens
from tierkv.reporting import Reporter
from tierkv.running import Running
from tierkv.sequence import Sequence

if TYPE_CHECKING:
    from tierkv.attached.pool import AttachedPool
    from tierkv.attached.views import PoolTensors
    from tierkv.control_plane.costs import Costs
    from tierkv.data_plane.core import Core
    from tierkv.devices.base import Device
    from tierkv.events import EventQueue
    from tierkv.identity.spec import CacheSpec
    from tierkv.stats import FlushReport, StoreStats

log = logging.getLogger(__name__)


class Store:
    """Holds the attention state of one model in device, host and disk tiers.

    Thread-safe.  Open it with :meth:`open`; as a context manager it closes on leaving.
    Faults of a tier are counted misses, never exceptions.
    """

    def __init__(self, core: Core, reporter: Reporter) -> None:
        self._core = core
        self._reporter = reporter
        self._transfers = Transfers(core)
        self._loader = Loader(core, self._transfers)
        self._hints = Hints(core.planner)
        self._running = Running(core, self._loader, self._transfers, self._sequence_ended)
        self._attachments = Attachments(core, self._transfers, self._hints, self._publish)
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        device: int | str | None = "256MiB",
        host: int | str | None = "1GiB",
        disk: int | str | None = "8GiB",
        torch_device: str | Device = "cpu",
        policy: str = "lru",
        write_through: bool = False,
        codec: str = "raw",
        boundary_pages: int = 4,
        io_timeout_s: float = 30.0,
        prefault: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open or create a store.

        Args:
            path: directory of the disk tier; None for a store in memory only.
            spec: the model's layer groups.
            namespace: the identity of the pages, built from the same spec.
            device: bytes of the device pool; None for none, when engines attach pools of
                their own.
            host: bytes of the host tier; None for as little as transfers need.
            disk: bytes of the disk tier; None for none.
            torch_device: where the device pool lives: "cpu", "cuda" (or "cuda:1"), "sim", or a
                device made with options of its own.
            policy: ``"lru"`` or ``"ageing"``.
            write_through: write pages to disk when they are committed, not when they must
                leave memory.
            codec: ``"raw"`` or ``"zstd"``, of the disk tier.
            boundary_pages: a window of sliding layers is kept every so many anchor pages.
            io_timeout_s: bound of every wait; what misses it is a miss.
            prefault: take all memory at once, so that no turn waits for the system to hand it
                out; opening then takes a second for every few GiB, on some machines far more.
            clock: monotonic seconds, for deadlines and times to live.
            wall_clock: Unix seconds, for the ages that the CLI shows.

        Raises:
            InvalidInputError: a budget or option that cannot work.
            NamespaceMismatchError: the namespace was built from another spec.
            CapacityError: a tier that cannot have its size, or not hold a page.
            StoreError: the directory cannot be used (locked, another version, no store).
        """
        options = Options(
            device=device,
            host=host,
            disk=disk,
            torch_device=torch_device,
            policy=policy,
            codec=codec,
            boundary_pages=boundary_pages,
            write_through=write_through,
            io_timeout_s=io_timeout_s,
            prefault=prefault,
        )
        directory = None if path is None else Path(path)
        core = open_core(directory, spec, namespace, options, clock=clock, wall_clock=wall_clock)
        try:
            return cls(core, Reporter(core, directory if core.disk is not None else None))
        except BaseException:
            core.close()
            raise

    @property
    def spec(self) -> CacheSpec:
        """The layer groups of the pages."""
        return self._core.spec

    @property
    def namespace(self) -> Namespace:
        """The identity of the pages."""
        return self._core.namespace

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        return self._closed

    def begin(
        self,
        token_ids: Any,
        *,
        extras: Extras = (),
        max_new_tokens: int = 0,
        limit: int | None = None,
        device_pages: int | None = None,
        restartable: bool = False,
        can_split: bool = False,
    ) -> Sequence:
        """Begin a sequence: find its longest reusable prefix and bring it in.

        At least the last token is always left to compute.  Pages on disk have been read and
        verified when this returns; their copies to the device may still run behind the gate.

        Args:
            token_ids: the prompt: integers, a list, array or tensor of one sequence.
            extras: (position, digest) of what token ids do not show, such as images.
            max_new_tokens: tokens that will follow; room for them is checked and reserved.
            limit: the longest prefix wanted, in tokens; None for as much as there is.
            device_pages: most pages of the device pool that the sequence may take; None for
                as many as there are.  What does not fit is kept in host memory and passes
                through device buffers, layer by layer, at every step.
            restartable: you begin again when the gate raises DeviceError.  Pages on disk then
                count as found at once and are read behind the gate while earlier layers
                compute; one that proves bad or late raises there, and is not found again.
            can_split: where it is quicker, let a sequence begin empty, to be fed its first
                :attr:`Sequence.front` tokens while the pages behind them load, and then
                joined with :meth:`Sequence.join`.

        Raises:
            InvalidInputError: no tokens, ids that are not one sequence of integers, or a
                negative limit or number of tokens.
            SequenceTooLongError: more than device pool and host tier together can hold.
            PoolExhaustedError: running sequences and pins leave too little of the pool.
        """
        self._must_be_open()
        core = self._core
        tokens = check_prompt(core, token_ids, max_new_tokens, limit, device_pages)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        total = len(tokens) + max_new_tokens
        check_fits(core, total, device_pages)
        chains = key_chains(core, tokens, extras)
        with core.lock:
            self._hints.tick(core.clock())
        self._transfers.forget_removed()
        loaded = self._loader.load(
            chains,
            tokens,
            most,
            total=total,
            device_limit=device_pages,
            restartable=restartable,
            can_split=can_split,
        )
        sequence = self._running.begin(chains, tokens, loaded, total, device_pages)
        self._reporter.publish(self.stats)
        return sequence

    def observe_compute(self, new: int, past: int, seconds: float) -> None:
        """Tell the planner what a forward pass took.

        Args:
            new: tokens computed.
            past: tokens that they attended to besides.
            seconds: of computation, without waiting for pages.
        """
        with self._core.lock:
            if self._core.costs.compute is not None:
                self._core.costs.compute.observe(new=new, past=past, seconds=seconds)

    @property
    def costs(self) -> Costs:
        """The planner's estimates; set ``costs.compute`` to let it weigh computing."""
        return self._core.costs

    def announce(self, token_ids: Any, *, extras: Extras = ()) -> Announcement:
        """Start reading what lies on disk of a prompt that will be begun; returns at once.

        Reads into host memory, at most half of it for all announcements together, and pushes
        no page out that is in use or nowhere else.  A later :meth:`begin` joins the reads.

        Args:
            token_ids: the prompt.
            extras: as for :meth:`begin`.
        """
        self._must_be_open()
        self._transfers.forget_removed()
        tokens = as_tokens(token_ids)
        return announce(self._core, self._transfers, key_chains(self._core, tokens, extras), tokens)

    def attach_pool(self, tensors: PoolTensors, *, layout: str) -> AttachedPool:
        """Put this store's host and disk tiers behind a paged pool that an engine owns.

        Args:
            tensors: for each model layer of the spec its blocks, ``[num_blocks, ...]``: one
                tensor, or several whose bytes make a block one after the other (K and V
                apart).  Any strides; only views are taken.
            layout: what the bytes of a block mean; must be the spec's layout.

        Raises:
            NamespaceMismatchError: another layout than the spec's.
            InvalidInputError: tensors that do not fit the spec.
        """
        self._must_be_open()
        return self._attachments.attach(tensors, layout)

    def hint(
        self,
        token_ids: Any,
        *,
        extras: Extras = (),
        end_of_session: bool = False,
        ttl_s: float | None = None,
    ) -> int:
        """Say what is known of a sequence's future; return how many pages it concerns.

        Args:
            token_ids: the sequence; the longest prefix that is there is meant.
            extras: as for :meth:`begin`.
            end_of_session: it will not come back: the pages only it needs go first.
            ttl_s: it is expected back within so many seconds: its pages go last until then,
                and first afterwards, unless they are used.
        """
        self._must_be_open()
        core = self._core
        with core.lock:
            now = core.clock()
            self._hints.tick(now)
            rows = find_pages(core, token_ids, extras)
            concerned = len(rows)
            if ttl_s is not None:
                self._hints.keep_for(rows, ttl_s, now)
            if end_of_session and concerned:
                in_tree = core.index.group(rows) == core.spec.anchor
                concerned = self._hints.end_session(int(rows[in_tree][-1]), rows[~in_tree])
            return concerned

    def pin(
        self, token_ids: Any, *, owner: str, ttl_s: float | None = None, extras: Extras = ()
    ) -> int:
        """Keep a sequence's pages in the tiers that hold them now; return how many.

        Raises:
            InvalidInputError: no owner, or a time to live that is not positive.
            PinError: more than half of a memory tier would be pinned.
        """
        self._must_be_open()
        core = self._core
        with core.lock:
            now = core.clock()
            self._hints.tick(now)
            rows = find_pages(core, token_ids, extras)
            return self._hints.pin(rows, owner, ttl_s, now)

    def unpin(self, owner: str) -> int:
        """End all pins of an owner; return how many pages they held."""
        self._must_be_open()
        with self._core.lock:
            return self._hints.unpin(owner)

    def subscribe(self, *, token_ids: bool = False, limit: int = 65536) -> EventQueue:
        """Return a queue of which pages come to tiers and leave them, from now on.

        Begin with its ``snapshot``, which names what is there; nothing is lost in between.

        Args:
            token_ids: name the token ids of pages committed from now on, which costs their
                memory while the pages are in any tier.
            limit: events kept for a slow consumer; then the oldest are dropped and counted.

        Raises:
            InvalidInputError: a limit below 1.
        """
        self._must_be_open()
        return subscribe(self._core, token_ids=token_ids, limit=limit)

    def flush(self) -> FlushReport:
        """Make every committed page durable; return what is."""
        self._must_be_open()
        self._attachments.settle()
        report = flush(self._core, self._transfers)
        self._reporter.save_usage()
        self._reporter.publish(self.stats, pages=True)
        return report

    def stats(self) -> StoreStats:
        """Return a snapshot of tiers and counters."""
        with self._core.lock:
            return self._reporter.stats(len(self._running), self._hints)

    def check(self) -> None:
        """Prove that every page and slot is accounted for.

        Raises:
            AssertionError: an invariant is broken.
        """
        core = self._core
        with core.lock:
            core.planner.check()
            self._transfers.check()
            self._loader.check()
            self._running.check()
            self._attachments.check()
        core.device.check()
        core.arena.check()
        if core.disk is not None:
            core.disk.check()

    def close(self) -> None:
        """Flush, and release everything; idempotent.  Running sequences are abandoned."""
        if self._closed:
            return
        self._must_be_open()
        self._running.abandon_all()
        self._attachments.close()
        with self._core.lock:
            self._transfers.reads.give_up()
            self._hints.clear()
        try:
            report = self.flush()
            if report.failed_pages and self._core.disk is not None:
                log.warning(
                    "closing: %d committed pages could not be written to disk and are lost",
                    report.failed_pages,
                )
        finally:
            self._closed = True
            self._transfers.settle(self._core.deadline())
            self._reporter.close()
            self._core.close()

    def __enter__(self) -> Store:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def _sequence_ended(self) -> None:
        """Called when a sequence has given everything back."""
        self._transfers.write_behind()
        self._reporter.publish(self.stats)

    def _publish(self) -> None:
        self._reporter.publish(self.stats)

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed; open it again")
        if os.getpid() != self._pid:
            raise ForkError(
                f"the store belongs to process {self._pid}; open it in the child, after the "
                "parent has closed it"
            )
