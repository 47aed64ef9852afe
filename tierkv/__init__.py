"""tierkv keeps the attention state of language models in tiers: device, host memory, SSD.

Importing this package imports neither torch nor anything that needs it: the public names
are resolved on first use, so that the command line and a storage process start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierkv.aio.sequence import AsyncSequence
    from tierkv.aio.store import AsyncStore
    from tierkv.attached.keys import EnginePage, PageKeys
    from tierkv.attached.lease import Lease
    from tierkv.attached.loads import LoadTicket
    from tierkv.attached.pool import AttachedPool
    from tierkv.attached.results import LoadResult, PoolStats, SaveResult
    from tierkv.attached.saves import SaveTicket
    from tierkv.control_plane.costs import ComputeCost
    from tierkv.errors import (
        CapacityError,
        ForkError,
        InvalidInputError,
        NamespaceMismatchError,
        NotAStoreError,
        PinError,
        PoolExhaustedError,
        SequenceEndedError,
        SequenceTooLongError,
        SpecError,
        StoreClosedError,
        StoreError,
        StoreLockedError,
        StoreReadOnlyError,
        StoreVersionError,
        TierKVError,
        UnsupportedError,
    )
    from tierkv.events import EventKind, EventQueue, PageEvent
    from tierkv.identity.keys import Namespace
    from tierkv.identity.opaque import OpaqueGroup
    from tierkv.identity.spec import CacheSpec, Component, GroupKind, LayerGroup
    from tierkv.integrations.transformers.attention import register_attention
    from tierkv.integrations.transformers.one_call import generate
    from tierkv.integrations.transformers.opening import open_store
    from tierkv.sequence import Sequence
    from tierkv.stats import CommitReport, FlushReport, Found, StoreStats, TierStats
    from tierkv.store import Store
    from tierkv.tiers import Tier
    from tierkv.units import parse_bytes

# Where each public name lives; a module is imported when one of its names is first asked for.
_HOMES = {
    "tierkv.aio.sequence": ("AsyncSequence",),
    "tierkv.aio.store": ("AsyncStore",),
    "tierkv.attached.keys": ("EnginePage", "PageKeys"),
    "tierkv.attached.lease": ("Lease",),
    "tierkv.attached.loads": ("LoadTicket",),
    "tierkv.attached.pool": ("AttachedPool",),
    "tierkv.attached.results": ("LoadResult", "PoolStats", "SaveResult"),
    "tierkv.attached.saves": ("SaveTicket",),
    "tierkv.errors": (
        "CapacityError",
        "ForkError",
        "InvalidInputError",
        "NamespaceMismatchError",
        "NotAStoreError",
        "PinError",
        "PoolExhaustedError",
        "SequenceEndedError",
        "SequenceTooLongError",
        "SpecError",
        "StoreClosedError",
        "StoreError",
        "StoreLockedError",
        "StoreReadOnlyError",
        "StoreVersionError",
        "TierKVError",
        "UnsupportedError",
    ),
    "tierkv.events": ("EventKind", "EventQueue", "PageEvent"),
    "tierkv.control_plane.costs": ("ComputeCost",),
    "tierkv.identity.keys": ("Namespace",),
    "tierkv.identity.opaque": ("OpaqueGroup",),
    "tierkv.integrations.transformers.attention": ("register_attention",),
    "tierkv.integrations.transformers.one_call": ("generate",),
    "tierkv.integrations.transformers.opening": ("open_store",),
    "tierkv.sequence": ("Sequence",),
    "tierkv.identity.spec": ("CacheSpec", "Component", "GroupKind", "LayerGroup"),
    "tierkv.stats": ("CommitReport", "FlushReport", "Found", "StoreStats", "TierStats"),
    "tierkv.store": ("Store",),
    "tierkv.tiers": ("Tier",),
    "tierkv.units": ("parse_bytes",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncSequence",
    "AsyncStore",
    "AttachedPool",
    "CacheSpec",
    "CapacityError",
    "CommitReport",
    "Component",
    "ComputeCost",
    "EnginePage",
    "EventKind",
    "EventQueue",
    "FlushReport",
    "ForkError",
    "Found",
    "GroupKind",
    "InvalidInputError",
    "LayerGroup",
    "Lease",
    "LoadResult",
    "LoadTicket",
    "Namespace",
    "NamespaceMismatchError",
    "NotAStoreError",
    "OpaqueGroup",
    "PageEvent",
    "PageKeys",
    "PinError",
    "PoolExhaustedError",
    "PoolStats",
    "SaveResult",
    "SaveTicket",
    "Sequence",
    "SequenceEndedError",
    "SequenceTooLongError",
    "SpecError",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreLockedError",
    "StoreReadOnlyError",
    "StoreStats",
    "StoreVersionError",
    "Tier",
    "TierKVError",
    "TierStats",
    "UnsupportedError",
    "__version__",
    "generate",
    "open_store",
    "parse_bytes",
    "register_attention",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
