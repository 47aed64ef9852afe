"""What differs between releases of Transformers."""

from __future__ import annotations

import inspect
from typing import Any

from tierkv.integrations.transformers.identity import inner_model


def cache_keyword(model: Any) -> str:
    """Return the argument that takes the cache: ``cache``, before 5.24 ``past_key_values``."""
    parameters = inspect.signature(inner_model(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def last_logits_only(model: Any) -> dict[str, int]:
    """Return the argument that computes the last token's logits alone, where there is one."""
    parameters = inspect.signature(inner_model(model).forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
