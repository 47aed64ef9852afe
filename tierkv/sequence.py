"""A running sequence: its pages, its gate, and what becomes of them at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tierkv.data_plane.arrivals import LoadTime, await_events
from tierkv.data_plane.committing import check_fed
from tierkv.data_plane.flushing import write_pages
from tierkv.data_plane.gate import drain
from tierkv.data_plane.room import no_room
from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError, SequenceEndedError
from tierkv.identity.keys import as_tokens
from tierkv.stats import CommitReport, Found

if TYPE_CHECKING:
    from tierkv.control_plane.load_plan import LoadPlan
    from tierkv.data_plane.arrivals import Arrival, LoadMeter
    from tierkv.data_plane.committing import Committer
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.gate import LayerGate
    from tierkv.data_plane.holding import Holding
    from tierkv.data_plane.loading import Loaded, Loader
    from tierkv.identity.keys import TokenArray
    from tierkv.identity.spec import CacheSpec
    from tierkv.running import Running
    from tierkv.tiers import Tier


class Sequence:
    """The state of one sequence of tokens while a model extends it.

    Made by :meth:`tierkv.Store.begin`.  One thread at a time may use a sequence; different
    sequences, forks of one included, are independent.  As a context manager it is abandoned
    on leaving, unless it was finished before.

    Attributes:
        found: tokens whose state was found, by tier.
        gate: the only way to a layer's state.
        plan: what was weighed when the sequence began, and why; None for a fork.
    """

    plan: LoadPlan | None = None

    def __init__(
        self,
        core: Core,
        loader: Loader,
        running: Running,
        tokens: TokenArray,
        found: Found,
        holding: Holding,
        committer: Committer,
        gate: Callable[..., LayerGate],
    ) -> None:
        """Take over pages and tables; use :meth:`tierkv.Store.begin` or :meth:`fork`."""
        self.found = found
        self._core = core
        self._loader = loader
        self._running = running
        self._tokens = tokens
        self._holding = holding
        self._committer = committer
        self._arrivals: list[Arrival] = []
        self._prepared: tuple[int, int] | None = None
        self._back: Loaded | None = None
        self._meter: LoadMeter | None = None
        self._ended = False
        self.gate = gate(reserve=self._reserve)

    def start_from(self, loaded: Loaded) -> None:
        """Take over what was loaded for it; once, before anything is fed."""
        self.plan = loaded.plan
        self._arrivals = loaded.arrivals
        self._meter = loaded.meter
        if loaded.front:
            self._back = loaded
        else:
            self._expect(loaded.arrivals)

    def fork(self) -> Sequence:
        """Return another sequence with the same state.

        Pages are shared, and copied only when one of the two writes into a shared one.

        Raises:
            InvalidInputError: a forward ended in the middle.
            PoolExhaustedError: of a sequence that has spilled, no room to run another.
            DeviceError: pages on their way did not arrive.
        """
        self._must_run()
        length = self.gate.settled_length()
        self._await_arrivals()
        self._prepared = None  # a page that was this sequence's alone is no longer
        core = self._core
        with core.lock:
            holding = self._holding.fork(length)
            other = Sequence(
                core,
                self._loader,
                self._running,
                self._tokens[:length],
                self.found,
                holding,
                self._committer.fork(holding.tables, length),
                partial(self.gate.fork, holding.tables, rings=holding.spill.rings),
            )
            self._running.add(other)
        if not holding.spill.grow_rings():
            other.abandon()
            raise no_room(core, length, 1)
        return other

    @property
    def front(self) -> int:
        """Tokens to compute before :meth:`join`; 0 when nothing loads behind them."""
        return 0 if self._back is None else self._back.front

    def join(self) -> int:
        """Go on behind the pages that were loaded while the front was computed.

        Returns:
            The length now: of the whole prefix, or only of the front when the pages behind
            it did not arrive.

        Raises:
            InvalidInputError: other tokens than the front's were fed.
            DeviceError: they are late, and may still arrive; abandon the sequence.
        """
        self._must_run()
        if self._back is None:
            return self.length
        back, held = self._back, self.gate.settled_length()
        if held != back.front:
            raise InvalidInputError(
                f"join: {held} tokens were fed, but the plan was to compute {back.front} first"
            )
        self._back = None
        self._expect(back.arrivals)
        if self._arrived():
            self.gate.jump(back.tokens)
            self._committer.resume(back.tokens, back.resumed)
        else:
            events = [event for a in back.arrivals for event in a.events.values()]
            await_events(events, self._core.deadline(), self._core.clock)
            if not all(event.done() for event in events):
                raise DeviceError("the pages behind the front are late; abandon the sequence")
            self._settle_arrivals()
            self.gate.forget_arrivals()
            self.found = Found()
            self._holding.crop(held)
        self._prepared = None
        return self.length

    def _expect(self, arrivals: list[Arrival]) -> None:
        """Put the entries to layers behind what is on its way to them."""
        for arrival in arrivals:
            for layer, event in arrival.events.items():
                self.gate.expect(layer, event)

    def keep_from(self, length: int | None) -> None:
        """Promise that :meth:`crop` can go back to any length from ``length`` on.

        Layers with a sliding window then keep the pages of all windows from there on, which
        takes room; None ends it.  Other layers keep every page in any case.
        """
        self._must_run()
        self._holding.floor = length
        self._prepared = None  # pages obtained for a step may not be all it needs now

    def crop(self, length: int) -> None:
        """Take back the tokens from ``length`` on, as if they had never been appended.

        Pages that were committed stay visible to others.

        Raises:
            InvalidInputError: a length beyond the tokens held, a window that is not held any
                more (see :meth:`keep_from`), a front not joined yet, or a forward that ended in
                the middle.
        """
        self._must_run()
        if self._back is not None:
            raise InvalidInputError("crop: pages load behind the front; call join first")
        held = self.gate.settled_length()
        if not 0 <= length <= held:
            raise InvalidInputError(f"crop: the sequence holds {held} tokens, not {length}")
        lost = [t.group.name for t in self._holding.tables if not t.can_resume(length)]
        if lost:
            raise InvalidInputError(
                f"crop: of {held} tokens, the windows of layer groups {lost} at {length} are not "
                f"held any more; call keep_from({length}) or less before appending"
            )
        self._await_arrivals()
        self._holding.crop(length)
        self._committer.crop(length)
        self._tokens = self._tokens[:length]
        self.gate.crop(length)
        self._prepared = None

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
    def load_time(self) -> LoadTime:
        """What loading took so far: what was waited for, and what computing has hidden."""
        return LoadTime() if self._meter is None else self._meter.result(self.gate.waited_s)

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
            InvalidInputError: fewer ids than ``length``, ids that differ from the prompt, or a
                forward that ended in the middle.
        """
        self._must_run()
        if self._back is not None:
            raise InvalidInputError("commit: pages load behind the front; call join first")
        tokens = check_fed(as_tokens(token_ids), self._tokens, self.gate.settled_length())
        if not self._arrived():
            return CommitReport()
        tails = self._holding.copy_tails(len(tokens)) if turn_end else None
        report = self._commit(tokens, tails)
        self._prepared = None  # what a step has obtained and not written goes back too
        self._holding.drop_outdated(len(tokens), self._committer.committed)
        return report

    def finish(self, token_ids: Any = None) -> CommitReport:
        """Commit everything including tail pages, then release the sequence.

        Args:
            token_ids: as for :meth:`commit`; may be omitted when nothing was fed beyond the
                prompt.
        """
        self._must_run()
        given = self._tokens if token_ids is None else as_tokens(token_ids)
        tokens = check_fed(given, self._tokens, self.gate.settled_length())
        try:
            if not self._arrived():
                return CommitReport()
            # A page handed over may leave host memory: nothing may load from it any more.
            quiet = self._drain()() if self._holding.spill.streams else True
            tails = self._holding.own_tails(len(tokens)) if quiet else {}
            return self._commit(tokens, tails)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the sequence without committing; idempotent."""
        if self._ended:
            return
        self._ended = True
        self.gate.close()
        for arrival in self._arrivals:
            arrival.cancel()
        over = self._drain()
        holding = self._holding
        with self._core.lock:  # what a late copy may still touch stays held until it is over
            holding.transfers.take_in()
            holding.transfers.when(lambda: over() and not holding.leaving, self._release)
        self._running.after_end()

    def spill(self, pages: list[int]) -> bool:
        """Keep the first ``pages`` pages of each group in host memory; False without room."""
        return self._holding.spill.to(pages)

    @property
    def spilled_pages(self) -> int:
        """Pages kept in host memory because the device pool is too small."""
        return sum(min(table.spilled, len(table.slots)) for table in self._holding.tables)

    def private_slots(self, tier: Tier) -> list[int]:
        """Return the slots of a memory tier that this sequence holds.  For ``check``."""
        return self._holding.private_slots(tier)

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
            write_pages(core, self._holding.transfers, fresh)
        if len(tokens) > len(self._tokens):
            self._tokens = tokens
        return report

    def _arrived(self) -> bool:
        """Wait for the pages on their way: what is published must be whole.

        False when a copy failed or is late; nothing may be published then.
        """
        try:
            self._await_arrivals()
        except DeviceError:
            with self._core.lock:
                self._core.counters.late_copies += 1
            return False
        return True

    def _await_arrivals(self) -> None:
        self.gate.await_all()
        self._settle_arrivals()

    def _settle_arrivals(self) -> None:
        self._loader.settle(self._arrivals)
        self._arrivals = []
        if self._meter is not None:
            self._meter.stop()

    def _reserve(self, start: int, count: int) -> None:
        """Called by the gate before each layer's append."""
        if self._prepared == (start, count):
            return
        if self._arrivals and all(arrival.done() for arrival in self._arrivals):
            self._settle_arrivals()
        if self.gate.all_hold(start) and not self.front and not self._arrivals:
            # What the window left can go; what is on its way comes to rest first.
            self._holding.drop_outdated(start, self._committer.committed)
        self._obtain(start, count, ahead=False)
        self._prepared = (start, count)

    def _obtain(self, start: int, count: int, *, ahead: bool) -> None:
        """Obtain the pages that ``count`` tokens from ``start`` need."""
        # What streams in any case keeps its windows; what is on its way cannot leave yet.
        spills = self._holding.spill.streams and not self._arrivals
        if not self._holding.obtain(start, count, ahead=ahead, spill=spills):
            return
        arrived = self._arrived()  # the sources of copies come free, and what arrived may leave
        if self.gate.all_hold(start) and not self.front:
            self._holding.give_up_boundaries()
            self._holding.drop_outdated(start, self._committer.committed)
        pages = self._holding.obtain(start, count, ahead=ahead, spill=arrived)
        if pages:
            raise no_room(self._core, start + count, pages)

    def _drain(self) -> Callable[[], bool]:
        """Wait until nothing touches the slots any more; return whether that is so by now."""
        arriving = [event for a in self._arrivals for event in a.events.values()]
        events = [*arriving, *self.gate.events(), *self._holding.spill.events()]
        if not drain(events, self._core.timeout_s):
            with self._core.lock:
                self._core.counters.late_copies += 1
        return lambda: all(event.done() for event in events)

    def _release(self) -> None:
        """Give everything back.  Called with the store's lock held."""
        self._settle_arrivals()
        self._holding.release()
        self._core.settled.notify_all()
        self._running.remove(self)

    def _must_run(self) -> None:
        if self._ended:
            raise SequenceEndedError("the sequence has ended; begin a new one")
