"""Measures the forward passes of an attached model, for the planner's estimates."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from tierkv.control_plane.costs import ComputeCost
from tierkv.identity.spec import GroupKind

if TYPE_CHECKING:
    from tierkv.identity.spec import CacheSpec
    from tierkv.sequence import Sequence
    from tierkv.store import Store


def compute_cost(model: Any, spec: CacheSpec) -> ComputeCost:
    """Return what a forward pass of a model costs; its rate is measured later."""
    config = model.config.get_text_config()
    embeddings = model.get_input_embeddings()
    params = sum(p.numel() for p in model.parameters()) - embeddings.weight.numel()
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sliding = [group for group in spec.groups if group.kind is GroupKind.SLIDING]
    return ComputeCost.from_model(
        max(1, params),
        len(spec.layer_to_group),
        heads,
        int(head_dim),
        sliding_layers=sum(len(group.layers) for group in sliding),
        window=max((group.window or 0 for group in sliding), default=0) or None,
    )


class ForwardClock:
    """Times forward passes and tells the store; on a GPU by events, read when they are done.

    One thread at a time.
    """

    def __init__(self, store: Store, *, on_gpu: bool) -> None:
        self._store = store
        self._on_gpu = on_gpu
        self._started: Any = None
        self._forward: tuple[int, int, Sequence, float] | None = None
        self._pending: deque[tuple[Any, Any, int, int]] = deque()

    def start(self, new: int, past: int, sequence: Sequence) -> None:
        """A forward over ``new`` tokens of a sequence after ``past`` begins."""
        self._harvest()
        self._forward = (new, past, sequence, _waited(sequence))
        self._started = self._now()

    def stop(self) -> None:
        """It has ended, or nothing had begun."""
        if self._forward is None:
            return
        started, (new, past, sequence, waited_s) = self._started, self._forward
        self._forward = None
        if self._on_gpu:
            self._pending.append((started, self._now(), new, past))
        else:
            waited_s = _waited(sequence) - waited_s
            self._tell(new, past, time.perf_counter() - started - waited_s)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _harvest(self) -> None:
        while self._pending and self._pending[0][1].query():
            started, ended, new, past = self._pending.popleft()
            self._tell(new, past, started.elapsed_time(ended) / 1e3)

    def _tell(self, new: int, past: int, seconds: float) -> None:
        if seconds > 0:
            self._store.observe_compute(new, past, seconds)


def _waited(sequence: Sequence) -> float:
    """Return the seconds that a sequence has waited for pages so far."""
    return sequence.gate.waited_s + sequence.gate.streaming_s
