"""The position encoding of a model as canonical text, for the identity of its pages.

K is stored after RoPE, so two models that differ in nothing but RoPE share no page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tierkv.errors import SpecError

# These rescale frequencies by the total length of the sequence: K of the same tokens
# differs between a short call and a long one, so a page would be valid for one length only.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


def rope_identity(text: Any) -> str:
    """Return canonical JSON of everything that decides the position encoding.

    Args:
        text: the config of a text model, with ``rope_parameters`` (flat, or one entry a
            layer type) or the older ``rope_theta`` and ``rope_scaling``.

    Raises:
        SpecError: a regime that depends on the total length (dynamic NTK, LongRoPE).
    """
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = {k: v for k, v in given.items() if isinstance(v, Mapping)}
    entries = {k: _entry(text, v) for k, v in (nested or {"": given}).items()}
    described: dict[str, Any] = {"rope": entries}
    for name in ("rope_local_base_freq", "no_rope_layers"):
        value = getattr(text, name, None)
        if value is not None:
            described[name] = _canonical(value)
    if any(e.get("rope_type") != "default" for e in entries.values()):
        # yarn falls back to it for the original length
        described["max_position_embeddings"] = getattr(text, "max_position_embeddings", None)
    return json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _entry(text: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return one RoPE regime with its defaults filled in."""
    entry = {k: _canonical(v) for k, v in given.items() if v is not None}
    if "type" in entry:
        entry.setdefault("rope_type", entry.pop("type"))
    entry.setdefault("rope_type", "default")
    kind = str(entry["rope_type"])
    if any(name in kind for name in _LENGTH_DEPENDENT):
        raise SpecError(
            f"{getattr(text, 'model_type', 'model')}: rope_type {kind!r} rescales positions by "
            "the total length of the sequence, so the state of a prefix is not the same in a "
            "longer sequence and reusing it would give wrong tokens"
        )
    for name in ("rope_theta", "partial_rotary_factor"):
        value = getattr(text, name, None)
        if value is not None:
            entry.setdefault(name, _canonical(value))
    return entry


def _canonical(value: Any) -> Any:
    """Return a value in which 10000 and 10000.0 are written alike."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(v) for v in value]
    raise SpecError(f"position encoding: cannot describe {value!r} in the identity of pages")
