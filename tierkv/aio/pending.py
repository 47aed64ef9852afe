"""One call on its way through a thread, and who waits for it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from tierkv.aio.strand import Strand

T = TypeVar("T")


class State(enum.Enum):
    """Where a call stands.  It changes under its owner's lock only."""

    WAITED_FOR = enum.auto()  # it waits for a thread, or runs; its caller waits
    UNATTENDED = enum.auto()  # it waits for a thread and will run though nobody waits for it
    ENDED = enum.auto()  # there is a result or an error, not yet taken
    GONE = enum.auto()  # taken, or its caller has gone away


class Owner(Protocol):
    """Who keeps the calls: :class:`tierkv.aio.workers.Workers`."""

    def take(self, call: Pending[T]) -> None:
        """Let go of a call whose outcome has reached the caller."""
        ...

    def leave(self, call: Pending[T]) -> None:
        """See to a call whose caller has gone away."""
        ...


class Pending(Generic[T]):
    """A call that was started; await :meth:`result`, or :meth:`leave` it.

    Attributes:
        keep: it runs even if its caller leaves before it has started.
        undo: gives the result back when nobody is left to take it.
        loop: the event loop of the caller, None when nobody waits.
        running: its work is being done.
        strand: where it must say that it has ended, or will not run.
        posted: its turn on the strand has come.
    """

    def __init__(
        self,
        owner: Owner,
        work: Callable[[], T],
        *,
        undo: Callable[[T], object] | None = None,
        keep: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        strand: Strand | None = None,
    ) -> None:
        self.keep = keep
        self.undo = undo
        self.loop = loop
        self.state = State.UNATTENDED if loop is None else State.WAITED_FOR
        self.running = False
        self.strand = strand
        self.posted = False
        self.error: BaseException | None = None
        self._owner = owner
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._woken = None if loop is None else loop.create_future()

    async def result(self) -> T:
        """Return the result or raise the error, once.

        Cancelling leaves the call; see :meth:`leave`.
        """
        assert self._woken is not None, "a call without a caller is not awaited"
        try:
            await self._woken
        except BaseException:  # cancelled, or destroyed together with the loop
            self.leave()
            raise
        self._owner.take(self)
        try:
            if self.error is not None:
                raise self.error
            return self._value  # type: ignore[return-value]  # set, as there is no error
        finally:
            self.forget()  # an error's traceback refers to this frame: keep no cycle

    def leave(self) -> None:
        """Give the call up: it does not start, or its result is undone.  Returns at once."""
        self._owner.leave(self)

    def on_woken(self, call: Callable[[], object]) -> None:
        """Call ``call()`` on the event loop when there is an outcome or the caller has left."""
        assert self._woken is not None, "a call without a caller wakes nobody"
        self._woken.add_done_callback(lambda _: call())

    def wake(self) -> bool:
        """Tell the caller that there is an outcome; False when its loop is closed."""
        assert self.loop is not None, "nobody waits"
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            return False
        return True

    def run(self) -> None:
        """Do the work on this thread and keep its outcome."""
        assert self._work is not None, "a call runs once"
        try:
            self._value = self._work()
        except BaseException as error:  # the thread's top frame: the caller gets it
            self.error = error

    def give_back(self) -> bool:
        """Undo a result that nobody takes; return whether there was one."""
        if self.undo is None or self.error is not None:
            return False
        self.undo(self._value)  # type: ignore[arg-type]  # set, as there is no error
        return True

    def forget(self) -> None:
        """Let go of arguments and outcome."""
        self._work = self.undo = self._value = self.error = None

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
