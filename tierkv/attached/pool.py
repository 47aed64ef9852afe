"""A paged pool that another engine owns, with tierkv's host and disk tiers behind it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.attached.blocks import PoolBlocks
from tierkv.attached.copies import runs
from tierkv.attached.keys import EnginePage, HashKeys, PageKeys, TokenKeys
from tierkv.attached.lease import Lease, LeasedPages, check_ttl
from tierkv.attached.loads import LoadTicket
from tierkv.attached.results import PoolCounters, PoolStats
from tierkv.attached.saves import SaveTicket
from tierkv.attached.saving import Saver
from tierkv.attached.views import PoolTensors, group_views
from tierkv.control_plane.match import match_pages
from tierkv.data_plane.claims import Claims
from tierkv.errors import (
    ForkError,
    InvalidInputError,
    NamespaceMismatchError,
    StoreClosedError,
)
from tierkv.identity.keys import Extras
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.attaching import Attachments


class AttachedPool:
    """Moves pages between an engine's blocks and the tiers of a store.  Thread-safe.

    Made by :meth:`tierkv.Store.attach_pool`.  As a context manager it is closed on leaving.
    ``docs/engines.md`` has the contract of each call and the order per request and step.

    Attributes:
        blocks: the engine's blocks.
        counters: what the pool did so far.
        flights: what runs in the pools of the store.
    """

    def __init__(self, home: Attachments, tensors: PoolTensors, layout: str) -> None:
        core = home.core
        if layout != core.spec.layout:
            raise NamespaceMismatchError(
                f"attach: the pool's layout is {layout!r}, but the store's pages have "
                f"{core.spec.layout!r}: their bytes mean something else; open a store whose spec "
                "names this layout (its pages get a namespace of their own)"
            )
        self.blocks = PoolBlocks(group_views(core.spec, tensors, core.device.torch_device))
        self.counters = PoolCounters()
        self.flights = home.flights
        self._core = core
        self._home = home
        self._saver = Saver(core, home.transfers, self)
        self._load_stream = core.device.stream("engine-load")
        self._pin_owners: set[str] = set()
        self._pid = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the pool, or its store, was closed."""
        return self._closed

    # -- keys ----------------------------------------------------------------------------

    def keys_from_hashes(
        self,
        hashes: Iterable[bytes],
        *,
        hash_tokens: int,
        token_ids: Any = None,
        start_token: int = 0,
        parent_hash: bytes | None = None,
    ) -> HashKeys:
        """Return page keys made from the engine's own chained hashes.

        Args:
            hashes: one for every ``hash_tokens`` tokens; each must cover all tokens before
                it and whatever else tells sequences apart (adapter, images, salt).
            hash_tokens: tokens a hash adds; divides the page of every layer group.
            token_ids: ids of these tokens, if events shall name them.
            start_token: tokens before the first hash, a multiple of every page.
            parent_hash: the hash at ``start_token``, if known.

        Raises:
            InvalidInputError: sizes that do not fit, or hashes that are no bytes.
        """
        keys = HashKeys(
            self._core.spec,
            self._core.namespace,
            hash_tokens=hash_tokens,
            start_token=start_token,
            parent_hash=parent_hash,
        )
        keys.extend(hashes, token_ids)
        return keys

    def keys_from_tokens(self, token_ids: Any, *, extras: Extras = ()) -> TokenKeys:
        """Return page keys made from token ids, for engines without hashes of their own.

        Args:
            token_ids: ids of one sequence from its beginning.
            extras: (position, digest) of what token ids do not show, such as images.

        Raises:
            InvalidInputError: not one sequence of token ids.
        """
        keys = TokenKeys(self._core.spec, self._core.namespace, extras=extras)
        keys.extend(token_ids)
        return keys

    # -- finding -------------------------------------------------------------------------

    def match(
        self,
        keys: PageKeys,
        *,
        computed: int = 0,
        limit: int | None = None,
        owner: str = "",
        ttl_s: float = 60.0,
        wait_s: float | None = None,
    ) -> Lease:
        """Lease the longest prefix that every layer group can resume.

        Its tokens are promised: the pages lie verified in host memory when this returns, and
        stay there while the lease holds.  Pages on disk are read first; what does not arrive
        within ``wait_s`` makes the prefix shorter.  It is a multiple of every group's page.

        Args:
            keys: the prefix.
            computed: tokens whose blocks the engine holds already; pages that end within them
                are neither looked for nor leased.
            limit: longest prefix wanted; all of ``keys`` when None.
            owner: who asks, for people.
            ttl_s: seconds after which the lease ends by itself.
            wait_s: how long reading may take; the store's ``io_timeout_s`` when None.  With 0
                only memory is looked at and no I/O is done.

        Returns:
            A lease; its ``tokens`` equal ``computed`` when nothing more was found.

        Raises:
            InvalidInputError: numbers out of range, or keys that begin after ``computed``.
            NamespaceMismatchError: keys made for another store.
            StoreClosedError: the pool is closed.
        """
        self.must_be_open()
        limit = self._checked_limit(keys, limit, computed)
        check_ttl(ttl_s, "match")
        wait_s = self._core.timeout_s if wait_s is None else wait_s
        if not wait_s >= 0:
            raise InvalidInputError(f"match: wait_s must not be negative, got {wait_s}")
        self.poll()
        self._home.transfers.forget_removed()
        staged = self._home.stager.stage(keys, limit=limit, computed=computed, wait_s=wait_s)
        groups = [
            LeasedPages(range(g.first_page, g.first_page + len(g.rows)), tuple(g.rows.tolist()))
            for g in staged.match.groups
        ]
        lease = Lease(
            self._core,
            self,
            staged.claims,
            groups,
            tokens=max(staged.match.tokens, computed),
            found=staged.found,
            owner=owner,
            ttl_s=ttl_s,
            on_end=self.flights.lease_ended,
        )
        with self._core.lock:
            if self._closed:
                lease.release()
                self.must_be_open()
            if staged.match.tokens:
                self.flights.add_lease(lease)
            self._count_query(lease, max(0, limit - computed))
        self._home.publish()
        return lease

    # -- moving --------------------------------------------------------------------------

    def load(
        self, lease: Lease, blocks: Sequence[Sequence[int | None]], *, layerwise: bool = False
    ) -> LoadTicket:
        """Copy leased pages into the engine's blocks; returns at once.

        Args:
            lease: from this pool's :meth:`match`.  Has it ended, every page is MISSED.
            blocks: for each layer group, the ids of the blocks of the pages in
                ``lease.groups``, one after the other; None for a block that shall be left
                alone because the engine has it.
            layerwise: copy in the model's layer order, so that ``with ticket.layer(i)`` waits
                for no more than layer i; else whole pages, in fewer copies.

        Raises:
            InvalidInputError: ids out of range, named twice, still used by a running load or
                save, or not as many as the pages have; nothing has been moved then.
            StoreClosedError: the pool is closed.
        """
        self.must_be_open()
        self.poll()
        if not isinstance(lease, Lease) or lease.pool is not self:
            raise InvalidInputError("load: expected a lease given by this pool's match")
        ids = self.blocks.split(lease.groups, blocks)
        named = self.blocks.named("load", [(g, page) for g, of in enumerate(ids) for page in of])
        leased = lease.pages()
        counts = [len(pages.rows) for pages in leased]
        core = self._core
        with core.lock:
            self.must_be_open()
            if not lease.held:
                self.counters.pages_missed += sum(counts)
                return LoadTicket(core, self, counts, None)
            claims = Claims(core)
            ticket = LoadTicket(core, self, counts, claims, named)
            self.flights.begin(ticket)
            claims.add({row: Tier.HOST for pages in leased for row in pages.rows})
            slots = [core.index.slot(pages.rows, Tier.HOST).tolist() for pages in leased]
        moves = [runs(s, i) for s, i in zip(slots, ids, strict=True)]
        ticket.start(self._load_stream, moves, layerwise=layerwise)
        return ticket

    def save(
        self,
        pages: Sequence[EnginePage],
        blocks: Sequence[Sequence[int]],
        *,
        wait_s: float | None = None,
    ) -> SaveTicket:
        """Copy whole pages out of the engine's blocks, behind what has been computed so far.

        Args:
            pages: from :meth:`PageKeys.pages`, of any groups and prefixes.
            blocks: the ids of each page's blocks, in order.
            wait_s: how long making room may take; the store's ``io_timeout_s`` when None.

        Returns:
            A ticket.  Pages become visible once their copies are confirmed, which any later
            call of any attached pool finds out, or the ticket's ``wait``.

        Raises:
            InvalidInputError: ids out of range, named twice, still used by a running load or
                save, or not as many as the pages have; nothing has been moved then.
            StoreClosedError: the pool is closed.
        """
        ticket = self.begin_save(pages, blocks, wait_s=wait_s)
        try:
            ticket.save_all()
        except BaseException:
            ticket.abort()
            raise
        return ticket.commit()

    def begin_save(
        self,
        pages: Sequence[EnginePage],
        blocks: Sequence[Sequence[int]],
        *,
        wait_s: float | None = None,
    ) -> SaveTicket:
        """Begin a save layer by layer: see :meth:`SaveTicket.layer`; arguments as for ``save``."""
        self.must_be_open()
        self.poll()
        return self._saver.begin(pages, blocks, self._core.timeout_s if wait_s is None else wait_s)

    def poll(self) -> None:
        """Take in copies that are over and leases whose time is up; never blocks.

        Every other call does so first: call it where nothing else is called for long.
        """
        self.flights.tick()

    # -- keeping -------------------------------------------------------------------------

    def pin(self, keys: PageKeys, *, owner: str, ttl_s: float | None = None) -> int:
        """Keep a prefix's pages in the tiers that hold them now; return how many.

        Raises:
            InvalidInputError: no owner, or a time to live that is not positive.
            PinError: more than half of host memory would be pinned.
            NamespaceMismatchError: keys made for another store.
            StoreClosedError: the pool is closed.
        """
        self.must_be_open()
        limit = self._checked_limit(keys, None, 0)
        self.poll()
        core, spec = self._core, self._core.spec
        with core.lock:
            arrays = [keys.array(g, group.pages_for(limit)) for g, group in enumerate(spec.groups)]
            found = match_pages(core.index, spec, arrays, limit=limit)
            rows = np.concatenate([group.rows for group in found.groups])
            count = self._home.hints.pin(rows, owner, ttl_s, core.clock())
            self._pin_owners.add(owner)
            return count

    def unpin(self, owner: str) -> int:
        """End all pins of an owner; return how many pages they held."""
        self.must_be_open()
        with self._core.lock:
            self._pin_owners.discard(owner)
            return self._home.hints.unpin(owner)

    # -- the pool itself -----------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Return a snapshot of counters."""
        with self._core.lock:
            return PoolStats.of(
                self.counters,
                leases=sum(lease.held for lease in self.flights.leases(self)),
                running=len(self.flights.of(self)),
            )

    def check(self) -> None:
        """Prove that every slot, block and pin of running loads and saves is accounted for.

        Raises:
            AssertionError: an invariant is broken.
        """
        self.flights.check()

    def close(self) -> None:
        """Give everything back: leases, pins, saves begun; idempotent.

        Waits for running copies, at most the store's ``io_timeout_s``; the engine must keep
        its tensors until then.  Pages that were saved stay in the store.
        """
        with self._core.lock:
            if self._closed:
                return
            self._closed = True
            running = self.flights.of(self)
            leases = self.flights.leases(self)
        for flight in running:
            if isinstance(flight, SaveTicket) and not flight.closed_to_layers:
                flight.cancel()
        self.flights.drain(running, self._core.deadline())
        for lease in leases:
            lease.release()
        with self._core.lock:
            for owner in self._pin_owners:
                self._home.hints.unpin(owner)
        self._home.closed(self)

    def __enter__(self) -> AttachedPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def _checked_limit(self, keys: PageKeys, limit: int | None, computed: int) -> int:
        if keys.namespace != self._core.namespace.digest:
            raise NamespaceMismatchError(
                "the keys were made for another store; make them with this pool's "
                "keys_from_hashes or keys_from_tokens"
            )
        limit = keys.tokens if limit is None else limit
        if limit < 0 or computed < keys.start_token:
            raise InvalidInputError(
                f"match: limit={limit} and computed={computed} must not be negative, and keys "
                f"begin at token {keys.start_token}: computed must be at least that"
            )
        return min(limit, keys.tokens)

    def _count_query(self, lease: Lease, asked: int) -> None:
        counters, totals = self.counters, self._core.counters
        counters.queries += 1
        counters.query_tokens += asked
        counters.count_found(lease.found)
        totals.prompt_tokens += asked
        for tier in Tier:
            totals.found_tokens[tier.label] += getattr(lease.found, tier.label)

    def must_be_open(self) -> None:
        """Raise StoreClosedError when the pool is closed, ForkError in another process."""
        if self._closed:
            raise StoreClosedError("the attached pool is closed; attach it again")
        if os.getpid() != self._pid:
            raise ForkError(
                f"the attached pool belongs to process {self._pid}; open a store and attach the "
                "pool in the child"
            )
