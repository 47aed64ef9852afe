"""The attention implementation ``"tierkv"``: a decoded token attends to the pages in place.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tierkv")
    model.set_attn_implementation("tierkv")      # or later, before TierKV.attach

Importing ``tierkv.integrations.transformers`` registers it; ``tierkv.register_attention()``
does too.  What it computes:

* Without a tierkv cache, and for several new tokens at once: what ``sdpa`` computes, to the
  bit, or what the model's own ``eager`` function computes where ``sdpa`` cannot serve (soft
  caps, sinks).
* One new token on a tierkv cache: attention over the pages where they lie, without gathering
  the history.  On a GPU by ``tierkv.kernels``; on a CPU in float32 (other types are gathered
  for ``sdpa`` there, since products of bfloat16 matrices in place are slower than the copy).
  Sums are taken in another order than ``sdpa`` takes them, so logits differ in the last bits.

The name is part of the namespace of a model's pages, as for every implementation.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tierkv.errors import UnsupportedError
from tierkv.identity.spec import GroupKind
from tierkv.integrations.transformers.attention_in_place import attend_in_place
from tierkv.integrations.transformers.attention_kernel import (
    attend_with_kernel,
    kernel_can_attend,
)
from tierkv.integrations.transformers.attention_open_layer import OpenLayer
from tierkv.integrations.transformers.refusals import (
    ATTENDED_TWICE,
    NO_WEIGHTS,
    OTHER_ATTENTION,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.identity.spec import LayerGroup

NAME = "tierkv"

# Arguments of attention that change its result, and that nothing here computes.
_CHANGING = ("head_mask", "indices", "position_bias")


def register_attention() -> None:
    """Make ``attn_implementation="tierkv"`` known to Transformers; harmless when it is known.

    The masks are those of ``sdpa``.
    """
    AttentionInterface.register(NAME, tierkv_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def uses_pages(config: Any) -> bool:
    """Return whether a model of this config attends by :func:`tierkv_attention`."""
    return getattr(config.get_text_config(), "_attn_implementation", None) == NAME


def can_attend_in_place(group: LayerGroup, states: tuple[Tensor, ...]) -> bool:
    """Return whether new states of a layer need not be gathered with the old ones."""
    if group.kind not in (GroupKind.FULL, GroupKind.SLIDING):
        return False
    keys = states[0]
    if keys.is_cuda:
        return kernel_can_attend(group)
    return keys.device.type == "cpu" and keys.dtype == torch.float32


def tierkv_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as Transformers asks for it; see the module's docstring.

    Args:
        module: the model's attention module.
        query: ``[rows, heads, new tokens, dim]``.
        key: ``[rows, KV heads, tokens, dim]``, or the new token's of an open layer.
        value: likewise.
        attention_mask: left aside for an open layer, whose pages hold real tokens only.
        dropout: of the weights, in training.
        scaling: factor of q.k; ``dim ** -0.5`` when None.
        kwargs: of these ``softcap`` and ``s_aux`` (sinks) count.

    Returns:
        The result ``[rows, new tokens, heads, dim]``, and None instead of weights.

    Raises:
        UnsupportedError: an open layer, and an argument that changes what attention computes.
    """
    opened = OpenLayer.of(key)
    if opened is None:
        return _stock(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if opened.closed:
        raise UnsupportedError(ATTENDED_TWICE.format(opened.layer))
    with opened:
        changing = [name for name in _CHANGING if kwargs.get(name) is not None]
        if dropout or changing:
            raise UnsupportedError(OTHER_ATTENTION.format(changing or ["dropout"]))
        if kwargs.get("output_attentions"):
            raise UnsupportedError(NO_WEIGHTS)
        given: dict[str, Any] = {
            "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
            "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux"),
        }
        last = query[:, :, -1]
        if last.is_cuda:
            return attend_with_kernel(last, opened.views, **given).unsqueeze(1), None
        out = query.new_empty((*last.shape[:2], value.shape[-1]))
        for row, view in enumerate(opened.views):
            attend_in_place(last[row], view, out[row], **given)
        return out.unsqueeze(1), None


def _stock(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what ``sdpa`` computes, or the model's own function where it cannot."""
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        result: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, mask, **kwargs
        )
        return result
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedError(OTHER_ATTENTION.format(["softcap", "s_aux"]))
    out: Tensor = own(module, query, key, value, _additive(mask, query, key), **kwargs)[0]
    return out, None


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return an ``sdpa`` mask (True: attend; None: causal) as ``eager`` functions take it."""
    if mask is None:
        new, held = query.shape[-2], key.shape[-2]
        if new == 1:
            return None
        square = torch.ones(1, 1, new, held, dtype=torch.bool, device=query.device)
        mask = square.tril(held - new)
    if mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
        ~mask, lowest
    )
