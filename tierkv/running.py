"""The sequences that run in a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.sequence import Sequence


class Running:
    """Keeps the sequences of a store from their beginning to their end.  Thread-safe."""

    def __init__(self, core: Core, after_end: Callable[[], None]) -> None:
        self._core = core
        self.after_end = after_end  # called, without the lock, when one has ended
        self._sequences: set[Sequence] = set()

    def __len__(self) -> int:
        """Number of sequences that run."""
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in.  Call with the lock held, before anybody else can see it."""
        self._sequences.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go that has given everything back.  Call with the lock held."""
        self._sequences.discard(sequence)

    def abandon_all(self) -> None:
        """Abandon every sequence."""
        with self._core.lock:
            sequences = list(self._sequences)
        for sequence in sequences:
            sequence.abandon()

    def check(self) -> None:
        """Raise AssertionError when a slot has other holders than the sequences that use it.

        Call with the lock held.
        """
        planner = self._core.planner
        for tier in (Tier.DEVICE, Tier.HOST):
            uses = Counter(slot for s in self._sequences for slot in s.private_slots(tier))
            for slot, count in uses.items():
                holders = planner.holders(tier, slot)
                assert holders == count, (
                    f"{tier.label} slot {slot}: used {count} times, held {holders} times"
                )
