"""Opening a store for a model of Transformers."""

from __future__ import annotations

import os
from typing import Any

from tierkv.errors import SpecError
from tierkv.identity.spec import CacheSpec
from tierkv.integrations.transformers.identity import model_namespace
from tierkv.store import Store


def model_spec(model: Any, page_tokens: int | dict[str, int] | None = None) -> CacheSpec:
    """Return the layer groups of a model's attention state.

    Raises:
        SpecError: an architecture or position encoding that is not supported.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise SpecError(f"{model.config.model_type}: encoder-decoder models are not supported")
    dtype = str(model.dtype).removeprefix("torch.")
    return CacheSpec.from_config(model.config, dtype=dtype, page_tokens=page_tokens)


def open_store(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    device: int | str = "256MiB",
    host: int | str | None = "1GiB",
    disk: int | str | None = "8GiB",
    weights_id: str | None = None,
    adapter: str = "",
    salt: str = "",
    page_tokens: int | dict[str, int] | None = None,
    **store_options: Any,
) -> Store:
    """Open a store for a model of Transformers, to share or for :func:`tierkv.generate`.

    Args:
        model: a causal language model, on its device.
        path: directory of the store, created when missing; None for memory only.
        device: budget of the device page pool.
        host: budget of host memory, or None.
        disk: budget of the directory, or None.
        weights_id: an id of the weights that you vouch for; without one, a digest over all of
            them is computed.
        adapter: id or digest of the adapter that is active on the model.
        salt: separates tenants that must not share pages.
        page_tokens: tokens a page of the first layer group, or a map from group name.
        store_options: passed on to :meth:`tierkv.Store.open`; ``torch_device`` is the model's
            unless given.

    Raises:
        SpecError: an architecture that is not known.
        UnsupportedError: an unknown adapter, or several devices.
        StoreError, CapacityError: what :meth:`tierkv.Store.open` raises.
    """
    spec = model_spec(model, page_tokens)
    namespace = model_namespace(model, spec, weights_id=weights_id, adapter=adapter, salt=salt)
    store_options.setdefault("torch_device", str(model.device))
    return Store.open(
        path,
        spec,
        namespace,
        device=device,
        host=host,
        disk=None if path is None else disk,
        **store_options,
    )
