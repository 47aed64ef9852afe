"""Conversations of a Transformers model that keep their state.

with TierKV.attach(model, "store-directory") as kv:
    output = kv.generate(input_ids, max_new_tokens=64)
"""

from __future__ import annotations

from tierkv.integrations.transformers.attach import TierKV
from tierkv.integrations.transformers.cache import TierKVCache

__all__ = ["TierKV", "TierKVCache"]
