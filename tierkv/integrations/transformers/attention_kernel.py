"""Attention of one new token a row over pages, by the kernels for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tierkv.data_plane.layer_view import LayerView
    from tierkv.identity.spec import LayerGroup

_ABSENT = -1


def kernel_can_attend(group: LayerGroup) -> bool:
    """Return whether the kernels, and Triton for them, can serve a layer group."""
    from tierkv.kernels.attention_arguments import MAX_ATTENTION_DIM
    from tierkv.kernels.launch import HAS_TRITON

    dims = {component.dim for component in group.components}
    return HAS_TRITON and len(dims) == 1 and max(dims) <= MAX_ATTENTION_DIM and max(dims) % 8 == 0


def attend_with_kernel(
    query: Tensor,
    views: Sequence[LayerView],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the last token of each row to the tokens in its pages, its own included.

    Args:
        query: ``[rows, heads, dim]``.
        views: one a row, between entering and leaving the gate, the token's K and V appended.
        scale: factor of q.k.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``[heads]``, a logit of each head that takes part in the softmax's denominator
            only.

    Returns:
        ``[rows, heads, dim]``.
    """
    from tierkv.kernels.paged_decode import paged_decode  # brings Triton, slow to import

    first = views[0]
    group, window = first.group, first.group.window
    tables = [view.page_table(queries=1) for view in views]
    if len(views) == 1:
        table = tables[0].unsqueeze(0)
    else:
        table = pad_sequence(tables, batch_first=True, padding_value=_ABSENT)
    numbers = [[view.length, view.attended_from(1) // group.page_tokens] for view in views]
    lengths, first_pages = torch.tensor(numbers, device="cpu").t().contiguous().to(query.device)
    return paged_decode(
        query,
        first.memory,
        table,
        lengths,
        v_offset=first.component_offsets[1],
        page_tokens=group.page_tokens,
        kv_heads=group.components[0].heads,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.to(query.dtype).contiguous(),
        first_page=None if window is None else first_pages,
    )
