"""Leases: a prefix found, its pages pinned in host memory until somebody has loaded them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.errors import InvalidInputError
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.attached.pool import AttachedPool
    from tierkv.data_plane.claims import Claims
    from tierkv.data_plane.core import Core
    from tierkv.stats import Found


@dataclass(frozen=True, slots=True)
class LeasedPages:
    """The pages of one layer group that a lease holds.

    Attributes:
        numbers: their numbers in the prefix.
        rows: their rows in the index.
    """

    numbers: range
    rows: tuple[int, ...]


class Lease:
    """A promise: these tokens' pages lie verified in host memory and stay there.

    Made by :meth:`AttachedPool.match`.  It ends by :meth:`release`, by leaving it as a context
    manager, or when its time is up; loading from it afterwards gives misses.  Loads that run
    already go on.  Thread-safe.

    Attributes:
        tokens: length of the prefix that can be resumed, the caller's own part included.
        found: tokens beyond the caller's own part, by the tier that held them.
        owner: who asked.
        pool: the attached pool it was asked of.
    """

    def __init__(
        self,
        core: Core,
        pool: AttachedPool,
        claims: Claims,
        groups: Sequence[LeasedPages],
        *,
        tokens: int,
        found: Found,
        owner: str,
        ttl_s: float,
        on_end: Callable[[Lease], None],
    ) -> None:
        self.tokens = tokens
        self.found = found
        self.owner = owner
        self.pool = pool
        self._core = core
        self._claims = claims
        self._groups = tuple(groups)
        self._expires_at = core.clock() + ttl_s
        self._on_end = on_end
        self._held = True

    @property
    def groups(self) -> tuple[range, ...]:
        """Numbers of the pages to load, by layer group."""
        return tuple(group.numbers for group in self._groups)

    @property
    def held(self) -> bool:
        """Whether the promise still holds."""
        return self._held and self._core.clock() < self._expires_at

    @property
    def expires_at(self) -> float:
        """The store's clock at which the lease ends by itself, seconds."""
        return self._expires_at

    def renew(self, ttl_s: float) -> bool:
        """Let the lease live for ``ttl_s`` seconds from now; False if it has ended.

        Raises:
            InvalidInputError: a time to live that is not positive.
        """
        check_ttl(ttl_s, "renew")
        with self._core.lock:
            if not self.held:
                return False
            self._expires_at = self._core.clock() + ttl_s
            return True

    def release(self) -> None:
        """End the lease; idempotent."""
        with self._core.lock:
            if self._held:
                self._held = False
                self._claims.release()
                self._on_end(self)

    def pages(self) -> tuple[LeasedPages, ...]:
        """Return the leased pages by group."""
        return self._groups

    def check(self) -> None:
        """Raise AssertionError when a leased page is not in host memory, or not pinned."""
        core = self._core
        with core.lock:
            if not self._held:
                return
            for group in self._groups:
                for row in group.rows:
                    assert core.is_in(row, Tier.HOST), f"row {row} is leased but not in memory"
                    assert core.index.pins([row], Tier.HOST)[0] > 0, f"row {row} is not pinned"

    def __enter__(self) -> Lease:
        """Return the lease."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease."""
        self.release()


def check_ttl(ttl_s: float, what: str) -> None:
    """Refuse a time to live that is not positive.

    Raises:
        InvalidInputError: with the value.
    """
    if not isinstance(ttl_s, int | float) or not ttl_s > 0:
        raise InvalidInputError(f"{what}: ttl_s must be positive, got {ttl_s}")
