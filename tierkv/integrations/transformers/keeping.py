"""What of a batch is worth keeping: real tokens, and of beams those that won."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.errors import InvalidInputError
from tierkv.identity.keys import TokenArray, as_tokens
from tierkv.stats import CommitReport

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.integrations.transformers.batch import Row


@dataclass(frozen=True, slots=True)
class Endings:
    """How a model ends a row: its end tokens, and what it is fed while others go on."""

    end_ids: frozenset[int] = frozenset()
    pad_id: int | None = None

    @classmethod
    def of(cls, config: Any) -> Endings:
        """Return the endings that a generation config describes."""
        ends = getattr(config, "eos_token_id", None)
        several = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
        pad = getattr(config, "pad_token_id", None)
        if pad is None and several:  # what generate() falls back to
            pad = several[0]
        return cls(frozenset(int(end) for end in several), None if pad is None else int(pad))

    def real(self, ids: TokenArray, prompt: int) -> int:
        """Return the length without padding behind an end token that follows the prompt."""
        length = len(ids)
        while length > prompt and ids[length - 1] == self.pad_id:
            length -= 1
        behind = ids[length : length + 1]
        if length < len(ids) and int(behind[0]) in self.end_ids:
            length += 1  # the end token is the pad token
        ended = length > prompt and int(ids[length - 1]) in self.end_ids
        return length if ended else len(ids)


def keep_rows(rows: Sequence[Row], endings: Endings) -> CommitReport:
    """Commit every row, without the padding behind the ends of those that ended early."""
    reports = []
    for row in rows:
        ids = row.feed.ids(row.feed.length)
        length = endings.real(ids, len(row.sequence.prompt)) if len(rows) > 1 else len(ids)
        reports.append(_finish(row, length))
    return _sum(reports)


def keep_outputs(rows: Sequence[Row], outputs: Tensor, endings: Endings) -> CommitReport:
    """Commit what the outputs begin with; the rows themselves are left for the caller.

    Raises:
        InvalidInputError: outputs that are not ids, one row each.
    """
    if outputs.ndim != 2:
        raise InvalidInputError(
            f"outputs: expected the ids that generate() returned, [n, length], "
            f"got shape {tuple(outputs.shape)}"
        )
    wanted: dict[int, int] = {}  # of each row, the longest part that some output begins with
    for output in outputs.cpu():
        shared = [_shared(row, as_tokens(output)) for row in rows]
        best = int(np.argmax(shared))
        wanted[best] = max(wanted.get(best, 0), shared[best])
    reports = []
    for number, length in wanted.items():
        row = rows[number]
        ids = row.feed.ids(length)
        reports.append(_finish(row.fork(), endings.real(ids, len(row.sequence.prompt))))
    return _sum(reports)


def _shared(row: Row, output: TokenArray) -> int:
    """Return how many of the ids a row was fed an output begins with, behind the padding."""
    fed, given = row.feed.ids(row.feed.length), output[row.padding :]
    count = min(len(fed), len(given))
    different = np.flatnonzero(fed[:count] != given[:count])
    return int(different[0]) if different.size else count


def _finish(row: Row, length: int) -> CommitReport:
    with row.sequence as sequence:
        sequence.crop(length)
        return sequence.finish(row.feed.ids(length))


def _sum(reports: Sequence[CommitReport]) -> CommitReport:
    return CommitReport(
        pages=sum(r.pages for r in reports),
        tail_pages=sum(r.tail_pages for r in reports),
        shared=sum(r.shared for r in reports),
        skipped=sum(r.skipped for r in reports),
        bytes=sum(r.bytes for r in reports),
    )
