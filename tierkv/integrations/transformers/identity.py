"""Who a model is: the part of a namespace that comes from the model object.

The weights' digest covers the parameters; the settings of the config decide what is
computed from them (norm epsilon, soft caps, activation, the attention implementation),
so they are digested too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tierkv.errors import NamespaceMismatchError, UnsupportedError
from tierkv.identity.keys import Namespace
from tierkv.identity.spec import CacheSpec
from tierkv.identity.weights import weights_digest
from tierkv.integrations.transformers.refusals import (
    ADAPTER,
    PROMPT_LEARNING,
    SEVERAL_DEVICES,
)

# Settings that change neither K nor V of any token.
_IRRELEVANT = frozenset(
    {
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def inner_model(model: Any) -> Any:
    """Return the model that generates: a PEFT wrapper's base, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_namespace(
    model: Any, spec: CacheSpec, *, weights_id: str | None, adapter: str, salt: str
) -> Namespace:
    """Return the namespace of a model's pages.

    Args:
        model: the model, on its device.
        spec: the layer groups.
        weights_id: an id that the user vouches for, or None to digest all weights.
        adapter: id or digest of an active adapter.
        salt: separates tenants.

    Raises:
        UnsupportedError: an active adapter without ``adapter``, prompt tuning, or several
            devices.
    """
    check_adapters(model, adapter)
    if len(set(getattr(inner_model(model), "hf_device_map", {}).values())) > 1:
        raise UnsupportedError(SEVERAL_DEVICES)
    weights = f"id:{weights_id}" if weights_id else f"sha256:{weights_digest(model)}"
    return Namespace.build(
        spec, weights=f"{weights};config:{config_digest(model)}", adapter=adapter, salt=salt
    )


def check_same(model: Any, spec: CacheSpec, namespace: Namespace) -> None:
    """Refuse a namespace that is not of this model; what its owner vouched for is taken over.

    Raises:
        NamespaceMismatchError: naming what differs.
        UnsupportedError: adapters active on the model that the namespace does not name.
    """
    held = json.loads(namespace.description)
    weights = str(held["weights"]).rpartition(";config:")[0]
    vouched = weights.removeprefix("id:") if weights.startswith("id:") else None
    asked = model_namespace(model, spec, weights_id=vouched, adapter=str(held["adapter"]), salt="")
    mine = {**json.loads(asked.description), "salt": held["salt"]}
    if mine != held:
        raise NamespaceMismatchError(mismatch(held, mine))


def mismatch(held: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Return what differs between the descriptions of a store and of a model, and what to do."""
    differing = [
        f"{name}: store {_short(a)}, model {_short(b)}"
        for name, a, b in _differences("", held, mine)
    ]
    return (
        f"the store is not of this model ({'; '.join(differing[:4])}): open a store for this one "
        "(tierkv.open_store or TierKV.attach with a path); one directory may keep the pages of "
        "several models"
    )


def _differences(name: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            yield from _differences(f"{name}.{key}" if name else key, a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{name}[{number}]", left, right)
    elif a != b:
        yield name, a, b


def _short(value: Any) -> str:
    text = "none" if value in ("", None) else str(value)
    return text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}"


def config_digest(model: Any) -> str:
    """Return a SHA-256 (hex) over the settings that decide the state of a token."""
    text = model.config.get_text_config()
    settings = {k: v for k, v in text.to_dict().items() if k not in _IRRELEVANT}
    settings["attention"] = attention_name(model)
    described = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


def attention_name(model: Any) -> str | None:
    """Return which attention implementation of Transformers a model uses."""
    name: str | None = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return name


def adapter_state(model: Any) -> tuple[tuple[str, ...], ...]:
    """Return the adapters active in each adapted layer, merged ones excluded."""
    active = set()
    for module in model.modules():
        if not type(module).__module__.startswith("peft."):
            continue
        if getattr(module, "disable_adapters", False) or getattr(module, "merged", False):
            continue
        names = getattr(module, "active_adapters", None)
        if names and not callable(names):
            active.add(tuple(names))
    return tuple(sorted(active))


def check_adapters(model: Any, adapter: str) -> None:
    """Refuse adapters that the namespace would not know of.

    Raises:
        UnsupportedError: an active adapter without ``adapter``, or prompt tuning.
    """
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and any(
        getattr(c, "is_prompt_learning", False) for c in configs.values()
    ):
        raise UnsupportedError(PROMPT_LEARNING)
    if not adapter and adapter_state(model):
        raise UnsupportedError(ADAPTER)
