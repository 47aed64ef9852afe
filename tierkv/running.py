"""The sequences that run in a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING

from tierkv.data_plane.committing import Committer
from tierkv.data_plane.gate import LayerGate
from tierkv.data_plane.holding import Holding
from tierkv.sequence import Sequence
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.data_plane.core import Core
    from tierkv.data_plane.loading import Loaded, Loader
    from tierkv.data_plane.transfer import Transfers
    from tierkv.identity.keys import KeyChain, TokenArray


class Running:
    """Keeps the sequences of a store from their beginning to their end.  Thread-safe."""

    def __init__(
        self, core: Core, loader: Loader, transfers: Transfers, after_end: Callable[[], None]
    ) -> None:
        self._core = core
        self._loader = loader
        self._transfers = transfers
        self.after_end = after_end  # called, without the lock, when one has ended
        self._sequences: set[Sequence] = set()

    def __len__(self) -> int:
        """Number of sequences that run."""
        return len(self._sequences)

    def begin(
        self,
        chains: SequenceOf[KeyChain],
        tokens: TokenArray,
        loaded: Loaded,
        total: int,
        device_pages: int | None,
    ) -> Sequence:
        """Begin a sequence with what was loaded, with room for ``total`` tokens in all.

        Raises:
            SequenceTooLongError, PoolExhaustedError: there is no such room.
        """
        core, tables = self._core, loaded.tables
        holding = Holding(core, self._transfers, tables, device_pages)
        length, resumed = (0, 0) if loaded.front else (loaded.tokens, loaded.resumed)
        committer = Committer(core, chains, tables, committed=length, turn_end=resumed)
        gate = partial(
            LayerGate,
            core.device,
            core.pool,
            tables,
            core.spec.layer_to_group,
            length,
            timeout_s=core.timeout_s,
            rings=holding.spill.rings,
            clock=core.clock,
        )
        sequence = Sequence(
            core, self._loader, self, tokens, loaded.found, holding, committer, gate
        )
        sequence.start_from(loaded)
        with core.lock:
            self.add(sequence)
            core.counters.begins += 1
            core.counters.spilled_pages += sum(table.spilled for table in tables)
            core.counters.prompt_tokens += len(tokens)
            for tier in Tier:
                core.counters.found_tokens[tier.label] += getattr(loaded.found, tier.label)
        try:
            sequence.spill(list(loaded.spill))
            sequence.reserve(total - sequence.length)
        except BaseException:
            sequence.abandon()
            raise
        return sequence

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
