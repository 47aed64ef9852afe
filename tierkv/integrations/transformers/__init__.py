"""Conversations of a Transformers model that keep their state.

with TierKV.attach(model, "store-directory") as kv:
    output = kv.generate(input_ids, max_new_tokens=64)

Importing this package registers the attention implementation ``"tierkv"`` (``attention.py``).
"""

from __future__ import annotations

from tierkv.integrations.transformers.attach import TierKV
from tierkv.integrations.transformers.attention import register_attention
from tierkv.integrations.transformers.cache import TierKVCache

__all__ = ["TierKV", "TierKVCache", "register_attention"]

register_attention()
