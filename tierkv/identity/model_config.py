"""From a Transformers config to a :class:`~tierkv.identity.spec.CacheSpec`.

Only attributes of the config are read: neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.errors import SpecError
from tierkv.identity.page_size import GroupSize, choose_page_tokens, override_page_tokens
from tierkv.identity.rope_identity import rope_identity
from tierkv.identity.spec import DTYPE_BYTES, CacheSpec, GroupKind, LayerGroup, kv_components

# Decoders whose layers cache K after the position encoding and V, one pair a KV head, and
# nothing else.  A family joins when its tiny model passes the tests of the integration.
SUPPORTED_MODEL_TYPES = frozenset(
    {
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "granite",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BY_HAND = "; describe its layers yourself with CacheSpec(groups=...) if you know its cache"


def spec_from_config(
    config: Any, *, dtype: Any, page_tokens: int | Mapping[str, int] | None = None
) -> CacheSpec:
    """Return the spec of a model from its config; see :meth:`CacheSpec.from_config`.

    Args:
        config: a Transformers config; of a multimodal one the text part is used.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or the torch dtype.
        page_tokens: tokens a page of the first group, or a map from group name; chosen
            automatically when None.

    Raises:
        SpecError: an architecture, layer type or position encoding that is not supported.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type = getattr(text, "model_type", None)
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise SpecError(
            f"unknown architecture: model_type {model_type!r}, "
            f"architectures {getattr(config, 'architectures', None)!r}; "
            f"known are {sorted(SUPPORTED_MODEL_TYPES)}{_BY_HAND}"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise SpecError(
            f"{model_type}: attention is bidirectional, so a token's state depends on the "
            "tokens after it and no prefix can be reused"
        )
    element = _dtype_name(dtype)
    kinds = _layer_kinds(text)
    heads, head_dim = _geometry(text)
    row_bytes = sum(c.elements for c in kv_components(heads, head_dim)) * DTYPE_BYTES[element]
    names = _group_names(kinds)
    sizes = [GroupSize(name=names[w], layers=kinds.count(w), row_bytes=row_bytes) for w in names]
    tokens = (
        choose_page_tokens(sizes)
        if page_tokens is None
        else override_page_tokens(sizes, page_tokens)
    )
    return CacheSpec(
        groups=tuple(
            LayerGroup(
                name=name,
                kind=GroupKind.FULL if window is None else GroupKind.SLIDING,
                layers=tuple(i for i, kind in enumerate(kinds) if kind == window),
                components=kv_components(heads, head_dim),
                dtype=element,
                page_tokens=tokens[name],
                window=window,
            )
            for window, name in names.items()
        ),
        rope=rope_identity(text),
    )


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise SpecError(f"dtype {dtype!r}: the cache of a model is float32, bfloat16 or float16")
    return name


def _positive(text: Any, *names: str) -> int:
    """Return the first of the named attributes that is a positive whole number."""
    for name in names:
        value = getattr(text, name, None)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise SpecError(
                    f"{text.model_type}: config.{name} must be a positive whole number, "
                    f"got {value!r}{_BY_HAND}"
                )
            return value
    raise SpecError(f"{text.model_type}: the config has none of {list(names)}{_BY_HAND}")


def _geometry(text: Any) -> tuple[int, int]:
    """Return (KV heads, head dim)."""
    heads = _positive(text, "num_key_value_heads", "num_attention_heads")
    if getattr(text, "head_dim", None) is not None:
        return heads, _positive(text, "head_dim")
    return heads, _positive(text, "hidden_size") // _positive(text, "num_attention_heads")


def _layer_kinds(text: Any) -> list[int | None]:
    """Return for each layer its window, or None for full attention."""
    layers = _positive(text, "num_hidden_layers")
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", None) is False:
        window = None
    types = getattr(text, "layer_types", None)
    if types is None:
        if getattr(text, "attention_chunk_size", None) is not None:
            raise SpecError(f"{text.model_type}: chunked attention is not supported{_BY_HAND}")
        types = [_FULL if window is None else _SLIDING] * layers
    if len(types) != layers:
        raise SpecError(
            f"{text.model_type}: config.layer_types names {len(types)} layers, "
            f"num_hidden_layers is {layers}"
        )
    odd = sorted({t for t in types if t not in (_FULL, _SLIDING)})
    if odd:
        raise SpecError(
            f"{text.model_type}: layers of type {odd} are not supported, "
            f"only {[_FULL, _SLIDING]}{_BY_HAND}"
        )
    if _SLIDING in types:
        window = _positive(text, "sliding_window")
    return [window if t == _SLIDING else None for t in types]


def _group_names(kinds: list[int | None]) -> dict[int | None, str]:
    """Return the groups in order (full attention first, it anchors prefixes) by window."""
    names: dict[int | None, str] = {}
    if None in kinds:
        names[None] = "full"
    windows = sorted({w for w in kinds if w is not None})
    names.update({w: "sliding" if len(windows) == 1 else f"sliding-{w}" for w in windows})
    return names
