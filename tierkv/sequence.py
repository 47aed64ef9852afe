"""A running sequence: its pages, its gate, and what becomes of them at the end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.data_plane.committing import Committer
from tierkv.data_plane.flushing import write_pages
from tierkv.data_plane.gate import LayerGate
from tierkv.devices.base import CopyOp, DeviceError
from tierkv.errors import (
    InvalidInputError,
    PoolExhaustedError,
    SequenceEndedError,
    SequenceTooLongError,
)
from tierkv.identity.keys import as_tokens
from tierkv.identity.spec import GroupKind
from tierkv.stats import CommitReport, Found
from tierkv.tiers import Tier
from tierkv.units import format_bytes, suggest_bytes

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.loading import Loaded, Loader
    from tierkv.data_plane.transfer import Transfers
    from tierkv.identity.keys import KeyChain, TokenArray
    from tierkv.identity.spec import CacheSpec


_NO_BOUNDARY = 1 << 62  # no sequence is so long


class Sequence:
    """The state of one sequence of tokens while a model extends it.

    Made by :meth:`tierkv.Store.begin`.  One thread at a time may use a sequence; different
    sequences are independent.  As a context manager it is abandoned on leaving, unless it
    was finished before.

    Attributes:
        found: tokens whose state was found, by tier.
        gate: the only way to a layer's state.
    """

    def __init__(
        self,
        core: Core,
        loader: Loader,
        transfers: Transfers,
        chains: SequenceOf[KeyChain],
        tokens: TokenArray,
        loaded: Loaded,
        on_end: Callable[[Sequence], None],
    ) -> None:
        self.found: Found = loaded.found
        self._core = core
        self._loader = loader
        self._transfers = transfers
        self._tokens = tokens
        self._tables = loaded.tables
        self._arrivals = loaded.arrivals
        self._committer = Committer(core, chains, loaded)
        self._prepared: tuple[int, int] = (loaded.tokens, 0)
        self._boundary_tokens = core.boundary_tokens
        self._on_end = on_end
        self._ended = False
        self.gate = LayerGate(
            core.device,
            core.pool,
            loaded.tables,
            core.spec.layer_to_group,
            loaded.tokens,
            reserve=self._reserve,
            timeout_s=core.timeout_s,
        )
        for arrival in loaded.arrivals:
            for layer, event in arrival.events.items():
                self.gate.expect(layer, event)

    @property
    def length(self) -> int:
        """Tokens whose state every layer holds."""
        return min(self.gate.written.values())

    @property
    def spec(self) -> CacheSpec:
        """The layer groups of the sequence's state."""
        return self._core.spec

    @property
    def prompt(self) -> TokenArray:
        """The token ids that the sequence was begun with."""
        return self._tokens

    @property
    def ended(self) -> bool:
        """Whether the sequence was finished or abandoned."""
        return self._ended

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens; appending does so by itself.

        Raises:
            InvalidInputError: a negative count.
            SequenceTooLongError: the sequence would not fit into an empty pool.
            PoolExhaustedError: other sequences and pins hold too much of the pool.
        """
        self._must_run()
        if count < 0:
            raise InvalidInputError(f"reserve: count must not be negative, got {count}")
        self._obtain(self.length, count, ahead=True)

    def commit(self, token_ids: Any, *, turn_end: bool = False) -> CommitReport:
        """Make the state of full pages visible to later sequences.

        Args:
            token_ids: all ids fed so far; ids beyond ``length`` (such as the last sampled
                one, never fed) are ignored.
            turn_end: also save the partial last page, as a tail page of its own.

        Raises:
            InvalidInputError: fewer ids than ``length``, or ids that differ from the prompt.
        """
        self._must_run()
        tokens = self._fed(token_ids)
        if not self._arrived():
            return CommitReport()
        tails = self._copy_tails(len(tokens)) if turn_end else None
        report = self._commit(tokens, tails)
        self._drop_outdated(len(tokens))
        return report

    def finish(self, token_ids: Any = None) -> CommitReport:
        """Commit everything including tail pages, then release the sequence.

        Args:
            token_ids: as for :meth:`commit`; may be omitted when nothing was fed beyond the
                prompt.
        """
        self._must_run()
        tokens = self._fed(self._tokens if token_ids is None else token_ids)
        partial = self._partial_groups(len(tokens))
        try:
            return (
                self._commit(tokens, dict.fromkeys(partial)) if self._arrived() else CommitReport()
            )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the sequence without committing; idempotent."""
        if self._ended:
            return
        self._ended = True
        self.gate.close()
        self._drain()
        core = self._core
        with core.lock:
            for table in self._tables:
                core.index.unpin(np.fromiter(table.shared_rows(), np.int32), Tier.DEVICE)
                core.planner.give_back(Tier.DEVICE, table.private_slots())
                table.clear()
            core.settled.notify_all()
        self._on_end(self)

    def private_slots(self) -> list[int]:
        """Return the device slots that belong to this sequence alone.  For ``check``."""
        return [slot for table in self._tables for slot in table.private_slots()]

    def rows(self) -> list[int]:
        """Return the index rows of the committed pages this sequence uses."""
        return [row for table in self._tables for row in table.shared_rows()]

    def __enter__(self) -> Sequence:
        """Return the sequence."""
        return self

    def __exit__(self, *_: object) -> None:
        """Abandon the sequence unless it has ended."""
        self.abandon()

    def _commit(self, tokens: TokenArray, tails: dict[int, int | None] | None) -> CommitReport:
        core, committer = self._core, self._committer
        with core.lock:
            report = committer.commit(tokens, tails)
            fresh, committer.fresh = committer.fresh, []
        if fresh and core.write_through:
            write_pages(core, self._transfers, fresh)
        if len(tokens) > len(self._tokens):
            self._tokens = tokens
        return report

    def _arrived(self) -> bool:
        """Wait for the pages on their way: what is published must be whole.

        False when a copy failed or is late; nothing may be published then.
        """
        try:
            self.gate.enter_all()
        except DeviceError:
            with self._core.lock:
                self._core.counters.late_copies += 1
            return False
        self._settle_arrivals()
        return True

    def _settle_arrivals(self) -> None:
        self._loader.settle(self._arrivals)
        self._arrivals = []

    def _reserve(self, start: int, count: int) -> None:
        """Called by the gate before each layer's append."""
        if self._prepared == (start, count):
            return
        if self._arrivals and all(arrival.done() for arrival in self._arrivals):
            self._settle_arrivals()
        if start == self.length:  # every layer has passed: what the window left can go
            self._drop_outdated(start)
        self._obtain(start, count, ahead=False)
        self._prepared = (start, count)

    def _obtain(self, start: int, count: int, *, ahead: bool) -> None:
        """Obtain the pages that ``count`` tokens from ``start`` need.

        Ahead of time only for groups that keep every page: what a window keeps depends on
        how the tokens will be split.
        """
        for attempt in range(2):
            pages = [
                (table, page)
                for table in self._tables
                if not (ahead and table.group.kind is GroupKind.SLIDING)
                for page in table.missing(start, count, self._boundary_tokens)
            ]
            last = next((t.slots[-1] for t in self._tables if t.slots), None)
            slots = self._transfers.obtain(
                Tier.DEVICE, len(pages), deadline=self._core.deadline(), near=last
            )
            if slots is not None:
                for (table, page), slot in zip(pages, slots, strict=True):
                    table.set(page, slot)
                return
            if attempt == 0:
                self._make_do(start)
        raise self._no_room(start + count, len(pages))

    def _make_do(self, start: int) -> None:
        """Give up what a sequence can do without: sources of copies, windows of boundaries."""
        self._arrived()
        if start == self.length:
            self._boundary_tokens = _NO_BOUNDARY
            self._drop_outdated(start)

    def _no_room(self, tokens: int, pages: int) -> PoolExhaustedError | SequenceTooLongError:
        core = self._core
        check_fits(core, tokens)
        with core.lock:
            free = core.planner.free(Tier.DEVICE)
        return PoolExhaustedError(
            f"device pool: {pages} more pages of {format_bytes(core.spec.slot_bytes)} are needed "
            f"for {tokens} tokens; of {core.pool.num_slots} pages {free} are free and the rest "
            "belong to running sequences and pins; finish some, or give the pool a larger budget"
        )

    def _drop_outdated(self, tokens: int) -> None:
        core = self._core
        for table in self._tables:
            pages = table.outdated(tokens, self._committer.committed, self._boundary_tokens)
            if not pages:
                continue
            with core.lock:
                rows = [table.rows[page] for page in pages]
                slots = [table.drop(page) for page in pages]
                shared = [row for row in rows if row >= 0]
                core.index.unpin(np.asarray(shared, np.int32), Tier.DEVICE)
                core.planner.give_back(
                    Tier.DEVICE, [s for s, row in zip(slots, rows, strict=True) if row < 0]
                )

    def _partial_groups(self, length: int) -> list[int]:
        """Return the groups whose last page is partial and private at ``length`` tokens."""
        return [
            number
            for number, table in enumerate(self._tables)
            if length % table.group.page_tokens
            and table.group.kind is not GroupKind.SNAPSHOT
            and table.holds(length // table.group.page_tokens)
        ]

    def _copy_tails(self, length: int) -> dict[int, int | None]:
        """Copy the partial pages, which the sequence goes on writing; {} when no room is left."""
        core = self._core
        groups = self._partial_groups(length)
        slots = self._transfers.obtain(Tier.DEVICE, len(groups), deadline=core.deadline())
        if slots is None:
            with core.lock:
                core.counters.skipped_pages += len(groups)
            return {}
        tails: dict[int, int | None] = {}
        ops = []
        for number, slot in zip(groups, slots, strict=True):
            table = self._tables[number]
            source = table.slots[length // table.group.page_tokens]
            ops.append(CopyOp(core.pool.page(slot), core.pool.page(source)))
            tails[number] = slot
        core.device.compute.copy(ops)
        return tails

    def _fed(self, token_ids: Any) -> TokenArray:
        """Return the ids of the tokens written so far, checked against the prompt."""
        tokens, length = as_tokens(token_ids), self.length
        if len(tokens) < length:
            raise InvalidInputError(
                f"commit: {len(tokens)} token ids given, but {length} tokens were written; "
                "pass every id fed so far, the prompt included"
            )
        known = min(length, len(self._tokens))
        differing = np.flatnonzero(tokens[:known] != self._tokens[:known])
        if differing.size:
            at = int(differing[0])
            raise InvalidInputError(
                f"commit: token {at} is {tokens[at]}, but the sequence was begun with "
                f"{self._tokens[at]}; pages are keyed by the ids that were fed"
            )
        return tokens[:length]

    def _drain(self) -> None:
        """Wait until nothing touches the slots any more."""
        try:
            self.gate.drain()
        except DeviceError:
            with self._core.lock:
                self._core.counters.late_copies += 1
        self._settle_arrivals()

    def _must_run(self) -> None:
        if self._ended:
            raise SequenceEndedError("the sequence has ended; begin a new one")


def check_fits(core: Core, tokens: int) -> None:
    """Refuse a sequence that an empty device pool could not hold.

    Raises:
        SequenceTooLongError: with the arithmetic.
    """
    spec, slots = core.spec, core.pool.num_slots
    needed = spec.pages_for(tokens)
    if needed > slots:
        parts = " + ".join(
            f"{len(g.needed_pages(tokens))} of {g.name!r} ({g.page_tokens} tokens each)"
            for g in spec.groups
        )
        raise SequenceTooLongError(
            f"sequence of {tokens} tokens: needs {needed} pages ({parts}) of "
            f"{format_bytes(spec.slot_bytes)} = {format_bytes(needed * spec.slot_bytes)}, but the "
            f"device pool has {slots} ({format_bytes(slots * spec.slot_bytes)}); give "
            f"device='{suggest_bytes(needed * spec.slot_bytes)}' or more, or shorten the sequence"
        )
