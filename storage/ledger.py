"""What was put and is not resolved yet: the bound on the writer's queue."""

from __future__ import annotations

from collections import Counter

from tierkv.storage.types import PageWrite


class Ledger:
    """Payload bytes and keys on their way.  Not thread-safe: the writer's lock guards it."""

    def __init__(self, bound: int) -> None:
        """Args:
        bound: payload bytes that may be on their way; one page always may.
        """
        self._bound = bound
        self._keys: Counter[bytes] = Counter()
        self.bytes = 0

    def admit(self, page: PageWrite) -> bool:
        """Take a page in, unless that would exceed the bound."""
        size = page.payload.nbytes
        if self.bytes and self.bytes + size > self._bound:
            return False
        self.bytes += size
        self._keys[page.info.key] += 1
        return True

    def settle(self, page: PageWrite) -> None:
        """Let a page go that was taken in."""
        key = page.info.key
        self.bytes -= page.payload.nbytes
        left = self._keys[key] - 1
        assert left >= 0, "settled a page twice"
        if left:
            self._keys[key] = left
        else:
            del self._keys[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys
