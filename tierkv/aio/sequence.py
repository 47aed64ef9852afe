"""A running sequence for asyncio, and its layers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tierkv.aio.strand import Strand
from tierkv.errors import InvalidInputError, SequenceEndedError, StoreClosedError

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.aio.workers import Workers
    from tierkv.data_plane.layer_view import LayerView
    from tierkv.identity.keys import TokenArray
    from tierkv.identity.spec import CacheSpec
    from tierkv.sequence import Sequence
    from tierkv.stats import CommitReport, Found

T = TypeVar("T")


class AsyncSequence:
    """A :class:`tierkv.Sequence` whose waiting calls are awaited.

    Made by :meth:`AsyncStore.begin`.  Use it as a context manager: leaving waits for a call
    that a cancellation left running, then abandons the sequence, unless it was finished.
    One task at a time may use a sequence; calls on it run one after the other, also behind
    one whose caller was cancelled.
    """

    def __init__(
        self,
        sequence: Sequence,
        workers: Workers,
        *,
        adopt: Callable[[Sequence], AsyncSequence],
        ended: Callable[[Sequence], None],
        dropped: deque[Sequence],
    ) -> None:
        """Use :meth:`AsyncStore.begin`."""
        self._sequence = sequence
        self._workers = workers
        self._strand = Strand()
        self._adopt = adopt
        self._tell_end = ended
        self._room: tuple[int, int] | None = None  # (first token, count) that appends may write
        self._dropper = weakref.finalize(self, dropped.append, sequence)
        self._dropper.atexit = False

    @property
    def sync(self) -> Sequence:
        """The sequence behind this one."""
        return self._sequence

    @property
    def found(self) -> Found:
        """Tokens whose state was found, by tier."""
        return self._sequence.found

    @property
    def length(self) -> int:
        """Tokens whose state every layer holds."""
        return self._sequence.length

    @property
    def spec(self) -> CacheSpec:
        """The layer groups of the sequence's state."""
        return self._sequence.spec

    @property
    def prompt(self) -> TokenArray:
        """The token ids that the sequence was begun with."""
        return self._sequence.prompt

    @property
    def ended(self) -> bool:
        """Whether the sequence was finished or abandoned."""
        return self._sequence.ended

    def layer(self, layer: int) -> AsyncLayer:
        """Return the context in which a layer's state may be used.

        ``async with sequence.layer(i) as view:`` waits for the layer's transfers, off the
        event loop, and at once where they are done.

        Raises:
            InvalidInputError: the spec has no such layer.
            SequenceEndedError: the sequence has ended.
        """
        return AsyncLayer(self, layer, self._sequence.gate.layer(layer))

    async def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens; see :meth:`tierkv.Sequence.reserve`."""
        await self._run(partial(self._sequence.reserve, count))

    async def commit(self, token_ids: Any, *, turn_end: bool = False) -> CommitReport:
        """Make full pages visible to later sequences; see :meth:`tierkv.Sequence.commit`.

        Cancelled while it runs, it has its effect.
        """
        self._room = None
        return await self._run(partial(self._sequence.commit, token_ids, turn_end=turn_end))

    async def finish(self, token_ids: Any = None) -> CommitReport:
        """Commit everything and release the sequence; see :meth:`tierkv.Sequence.finish`.

        Cancelled while it runs, it has its effect; before, the sequence goes on.
        """
        report = await self._run(partial(self._sequence.finish, token_ids))
        self._gone()
        return report

    async def fork(self) -> AsyncSequence:
        """Return another sequence with the same state; see :meth:`tierkv.Sequence.fork`."""
        self._room = None
        return self._adopt(await self._run(self._sequence.fork, undo=_abandon))

    async def crop(self, length: int) -> None:
        """Take back the tokens from ``length`` on; see :meth:`tierkv.Sequence.crop`."""
        self._room = None
        await self._run(partial(self._sequence.crop, length))

    def keep_from(self, length: int | None) -> None:
        """See :meth:`tierkv.Sequence.keep_from`; does not wait."""
        self._must_be_idle("keep_from")
        self._room = None
        self._sequence.keep_from(length)

    async def abandon(self) -> None:
        """Release the sequence without committing, after a call that still runs.  Idempotent.

        Even if this is cancelled, the sequence is abandoned.
        """
        if self._sequence.ended and self._strand.idle:
            self._gone()
            return
        try:
            await self._workers.run(self._sequence.abandon, strand=self._strand, keep=True)
        except StoreClosedError:
            return  # closing abandons every sequence
        self._gone()

    async def __aenter__(self) -> Self:
        """Return the sequence."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Abandon the sequence unless it has ended."""
        if kind is GeneratorExit:  # the coroutine is being destroyed and cannot wait
            self._workers.later(self._sequence.abandon, strand=self._strand)
            return
        await self.abandon()

    def _gone(self) -> None:
        self._dropper.detach()
        self._tell_end(self._sequence)

    async def _run(self, work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        if self._sequence.ended:
            raise SequenceEndedError("the sequence has ended; begin a new one")
        return await self._workers.run(work, undo=undo, strand=self._strand)

    def _must_be_idle(self, what: str) -> None:
        if not self._strand.idle:
            raise InvalidInputError(
                f"{what}: another call on this sequence still runs, which a cancelled caller left "
                "or another task makes; one task at a time may use a sequence"
            )

    async def _enter(self, layer: int) -> None:
        """Wait for a layer's transfers, on a thread if that takes a wait."""
        gate = self._sequence.gate
        if not (self._strand.idle and gate.arrived(layer)):
            await self._run(partial(gate.enter, layer))

    async def _make_room(self, layer: int, start: int, count: int) -> None:
        """Obtain pages for tokens that a layer is given, once for all layers."""
        if self._room != (start, count):
            await self._run(partial(self._sequence.gate.make_room, layer, count))
            self._room = (start, count)


class AsyncLayer:
    """One layer of one sequence, between entering and leaving the gate.

    Shapes as in :class:`tierkv.data_plane.gate.LayerView`.
    """

    __slots__ = ("_layer", "_sequence", "_view")

    def __init__(self, sequence: AsyncSequence, layer: int, view: LayerView) -> None:
        """Use :meth:`AsyncSequence.layer`."""
        self._sequence = sequence
        self._layer = layer
        self._view = view

    @property
    def length(self) -> int:
        """Tokens of this layer written so far."""
        return self._view.length

    async def append(self, *states: Tensor) -> None:
        """Write the states of new tokens into the pages, ``[heads, tokens, dim]`` each.

        The first layer of a step obtains the pages, off the event loop, since something may
        have to leave the pool for them; the other layers do not wait.

        Raises:
            InvalidInputError: wrong number, shape, dtype or device.
            SequenceTooLongError, PoolExhaustedError: no room for the tokens.
        """
        self._must_be_usable()
        count = int(states[0].shape[1]) if states and states[0].dim() == 3 else 0
        if count:  # else the view refuses, saying what is wrong
            await self._sequence._make_room(self._layer, self._view.length, count)
            self._must_be_usable()
        self._view.append(*states)

    def read(self) -> tuple[Tensor, ...]:
        """Return copies ``[heads, tokens, dim]`` of what the layer attends to; does not wait.

        Sliding groups: the last ``window - 1`` tokens, so read before appending.
        """
        self._must_be_usable()
        return self._view.read()

    async def __aenter__(self) -> Self:
        """Wait for the layer's transfers."""
        await self._sequence._enter(self._layer)
        self._view.__enter__()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Record the last use."""
        self._view.__exit__(None, error)

    def _must_be_usable(self) -> None:
        if self._sequence.ended:
            raise SequenceEndedError("the sequence has ended; begin a new one")
        self._sequence._must_be_idle(f"layer {self._layer}")


def _abandon(sequence: Sequence) -> None:
    sequence.abandon()
