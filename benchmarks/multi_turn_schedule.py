"""The multi-turn workload: who asks what, in which order, and what a perfect cache would find.

The parameters are those of SGLang's ``bench_multiturn``.  Everything is drawn from one seed and
nothing depends on how fast a turn is served, so that every method sees the very same turns.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


class WorkloadError(ValueError):
    """Parameters that make no workload."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request.

    Attributes:
        client: whose conversation.
        round: from 1 up.
        gap_s: least time between the request sent before and this one.
        ideal_tokens: tokens of the prompt that any turn served before contained.
    """

    client: int
    round: int
    gap_s: float
    ideal_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The parameters, and what follows from them.

    Attributes:
        clients: conversations.
        rounds: turns of each.
        request_length: tokens of a first prompt.
        output_length: tokens generated in a turn.
        question_length: tokens of a follow-up question; 0 for as many as the first prompt has.
        shared_document: tokens of the first prompt that all clients share.
        rate: requests sent a second, at most, with exponential gaps; 0 for no limit.
        max_parallel: requests sent and not answered, at most.  They are served one at a time,
            in the order sent.
        seed: of everything drawn.
        barrier: a round begins when all clients have ended the one before.
        order: how the next of the waiting clients is chosen, ``"random"`` or ``"fifo"``.
        vocabulary: token ids lie below.
    """

    clients: int = 8
    rounds: int = 4
    request_length: int = 4096
    output_length: int = 8
    question_length: int = 0
    shared_document: int = 0
    rate: float = 0.0
    max_parallel: int = 128
    seed: int = 1
    barrier: bool = False
    order: str = "random"
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "request_length", "output_length", "max_parallel"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.question_length < 0 or self.rate < 0:
            raise WorkloadError("question_length and rate must not be negative")
        if not 0 <= self.shared_document < self.request_length:
            raise WorkloadError(
                f"shared_document must be 0 to {self.request_length - 1} (a first prompt has "
                f"{self.request_length} tokens, one of them the client's own), "
                f"got {self.shared_document}"
            )
        if self.order not in ("random", "fifo"):
            raise WorkloadError(f"order must be 'random' or 'fifo', got {self.order!r}")

    @property
    def question(self) -> int:
        """Tokens of a follow-up question."""
        return self.question_length or self.request_length

    def prompt_tokens(self, number: int) -> int:
        """Return the length of the prompt of a round."""
        return self.request_length + (number - 1) * (self.output_length + self.question)

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.prompt_tokens(self.rounds) + self.output_length

    @property
    def sum_of_prompts(self) -> int:
        """Tokens of all prompts."""
        return self.clients * sum(self.prompt_tokens(k) for k in range(1, self.rounds + 1))

    @property
    def ideal_tokens(self) -> int:
        """Tokens of all prompts that were part of an earlier turn."""
        later = sum(self.prompt_tokens(k) - self.question for k in range(2, self.rounds + 1))
        return self.clients * later + (self.clients - 1) * self.shared_document

    @property
    def ideal_ratio(self) -> float:
        """The hit ratio of a cache that holds every earlier token."""
        return self.ideal_tokens / self.sum_of_prompts

    @property
    def unique_tokens(self) -> int:
        """Distinct tokens of all conversations at their ends."""
        return self.clients * self.longest - (self.clients - 1) * self.shared_document

    def first_prompts(self) -> list[list[int]]:
        """Return the first prompt of each client."""
        draw = np.random.default_rng(self.seed)
        document = _sample(draw, 0, self.shared_document, self.vocabulary)
        own = self.request_length - self.shared_document
        return [
            document + _sample(draw, client + 1, own, self.vocabulary)
            for client in range(self.clients)
        ]

    def questions(self) -> Iterator[list[int]]:
        """Yield follow-up questions in the order in which turns are served."""
        draw = np.random.default_rng(self.seed + 1)
        count = self.clients * (self.rounds - 1)
        samples = [_sample(draw, n, self.question, self.vocabulary) for n in range(count)]
        while samples:
            yield samples.pop()  # from the end, as the original does

    def turns(self) -> list[Turn]:
        """Return every turn in the order served."""
        draw, gaps = random.Random(self.seed), np.random.default_rng(self.seed + 2)
        ready = deque((client, 1) for client in range(self.clients))
        waiting: list[tuple[int, int]] = []  # for the others, at the barrier
        sent: deque[tuple[int, int, float]] = deque()
        served: list[Turn] = []
        while ready or sent or waiting:
            if not ready and not sent:
                ready.extend(waiting)
                waiting.clear()
            while ready and len(sent) < self.max_parallel:
                at = draw.randrange(len(ready)) if self.order == "random" else 0
                client, number = ready[at]
                del ready[at]
                gap = float(gaps.exponential(1 / self.rate)) if self.rate else 0.0
                sent.append((client, number, gap))
            client, number, gap = sent.popleft()
            ideal = self.prompt_tokens(number) - self.question
            if number == 1:
                ideal = self.shared_document if served else 0
            served.append(Turn(client=client, round=number, gap_s=gap, ideal_tokens=ideal))
            if number < self.rounds:
                (waiting if self.barrier else ready).append((client, number + 1))
        return served


def _sample(draw: np.random.Generator, number: int, length: int, vocabulary: int) -> list[int]:
    """Return ``length`` ids that count up from a random one, as the original's samples do."""
    offset = int(draw.integers(0, vocabulary))
    return ((offset + number + np.arange(length)) % vocabulary).tolist()
