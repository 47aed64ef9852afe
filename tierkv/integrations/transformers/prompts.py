"""Prompts of one or several rows, as ids and as the padded tensor that a model is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.identity.keys import TokenArray, as_tokens
from tierkv.integrations.transformers.refusals import NO_MASK, RIGHT_PADDING, TOO_LONG


@dataclass(frozen=True, slots=True)
class Prompts:
    """Left-padded rows of ids.

    Attributes:
        rows: the real ids of each row.
        paddings: columns before each row's first id.
        columns: columns in all.
    """

    rows: tuple[TokenArray, ...]
    paddings: tuple[int, ...]
    columns: int

    @classmethod
    def of(
        cls, input_ids: Any, attention_mask: Any = None, *, pad_id: int | None = None
    ) -> Prompts:
        """Return the prompts that ids and a mask describe.

        Args:
            input_ids: ids of one sequence, ``[n]``, or of several, ``[rows, n]``; a list of
                lists of different lengths, without a mask; or what a tokenizer returns.
            attention_mask: ``[rows, n]`` (or ``[n]``), zeros before each row's first token;
                None for ones.
            pad_id: the pad token if there is one, to notice a mask that was forgotten.

        Raises:
            InvalidInputError: no ids, ids that are no integers, or a mask of another shape.
            UnsupportedError: a mask with zeros elsewhere than before the first token.
        """
        if isinstance(input_ids, Mapping) and "input_ids" in input_ids:  # a tokenizer's output
            if attention_mask is None:
                attention_mask = input_ids.get("attention_mask")
            input_ids = input_ids["input_ids"]
        if isinstance(input_ids, str | Mapping):
            raise InvalidInputError(
                f"input_ids: expected token ids, got a {type(input_ids).__name__}; encode text "
                "with the model's tokenizer"
            )
        ragged = _ragged(input_ids)
        if ragged is not None:
            if attention_mask is not None:
                raise InvalidInputError("rows of different lengths need no attention_mask")
            columns = max(len(row) for row in ragged)
            return cls(tuple(ragged), tuple(columns - len(row) for row in ragged), columns)
        several = _two_dimensional(input_ids)
        rows = [as_tokens(row) for row in several]
        if not rows or not len(rows[0]):
            raise InvalidInputError("input_ids: no ids; a sequence needs one token or more")
        if attention_mask is None:
            if len(rows) > 1 and pad_id is not None and _looks_padded(rows, pad_id):
                raise InvalidInputError(NO_MASK)
            return cls(tuple(rows), (0,) * len(rows), len(rows[0]))
        paddings = _paddings(attention_mask, len(rows), len(rows[0]))
        real = tuple(row[pad:] for row, pad in zip(rows, paddings, strict=True))
        return cls(real, tuple(paddings), len(rows[0]))

    def check_length(self, config: Any, new_tokens: int) -> None:
        """Refuse prompts beyond the positions that a model knows.

        Raises:
            InvalidInputError: with the arithmetic.
        """
        known = getattr(config.get_text_config(), "max_position_embeddings", None)
        longest = max(len(row) for row in self.rows)
        if known is not None and longest + new_tokens > known:
            raise InvalidInputError(
                TOO_LONG.format(longest, new_tokens, longest + new_tokens, known)
            )

    def tensors(self, pad_id: int, device: Any) -> tuple[Tensor, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, ``[rows, columns]`` each."""
        ids = torch.full((len(self.rows), self.columns), pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, (row, padding) in enumerate(zip(self.rows, self.paddings, strict=True)):
            ids[number, padding:] = torch.from_numpy(row.astype(np.int64))
            mask[number, padding:] = 1
        return ids.to(device), mask.to(device)


def _looks_padded(rows: Sequence[TokenArray], pad_id: int) -> bool:
    return any(pad_id in (int(row[0]), int(row[-1])) for row in rows)


def _two_dimensional(ids: Any) -> Any:
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.ndim not in (1, 2):
        raise InvalidInputError(
            f"input_ids: expected ids of one sequence or rows of ids, got shape {array.shape}"
        )
    return array if array.ndim == 2 else array[None]


def _ragged(ids: Any) -> list[TokenArray] | None:
    """Return the rows of a list of lists whose lengths differ, else None."""
    if not isinstance(ids, list | tuple) or not all(isinstance(row, list | tuple) for row in ids):
        return None
    if len({len(row) for row in ids}) < 2:
        return None
    rows = [as_tokens(row) for row in ids]
    if not all(len(row) for row in rows):
        raise InvalidInputError("input_ids: a row has no ids; each needs one token or more")
    return rows


def _paddings(attention_mask: Any, rows: int, columns: int) -> Sequence[int]:
    mask = torch.as_tensor(attention_mask).detach().cpu()
    if mask.ndim == 1:
        mask = mask.unsqueeze(0)
    if tuple(mask.shape) != (rows, columns):
        raise InvalidInputError(
            f"attention_mask: expected shape [{rows}, {columns}] like the ids, "
            f"got {tuple(mask.shape)}"
        )
    real = mask.bool()
    paddings = (~real).sum(dim=1)
    left = torch.arange(columns) >= paddings.unsqueeze(1)
    if not torch.equal(real, left) or int(paddings.max()) >= columns:
        raise UnsupportedError(RIGHT_PADDING)
    counts: list[int] = paddings.tolist()
    return counts
