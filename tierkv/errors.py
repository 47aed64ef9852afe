"""The error tree: one base class, each error with a builtin parent.

A message says what went wrong, where, and what the user can do about it.  Faults of a
tier while serving are never raised: they are counted misses.
"""

from __future__ import annotations


class TierKVError(Exception):
    """Base of every error that tierkv raises."""


class InvalidInputError(TierKVError, ValueError):
    """The caller passed something that cannot work (wrong shape, dtype, budget, ids)."""


class SpecError(InvalidInputError):
    """A cache specification is inconsistent, or a model's architecture is not supported."""


class NamespaceMismatchError(InvalidInputError):
    """Two things that must share a namespace (model, spec, store, sequence) do not."""


class CapacityError(TierKVError, MemoryError):
    """A tier cannot have the size asked for, or a page does not fit into it."""


class SequenceTooLongError(CapacityError):
    """A sequence needs more pages than the device pool has in all."""


class PoolExhaustedError(CapacityError):
    """The device pool is full of pages that running sequences or pins hold."""


class PinError(CapacityError):
    """A pin would exceed the quota that keeps a tier usable."""


class StoreError(TierKVError, OSError):
    """A store directory cannot be opened or used."""


class NotAStoreError(StoreError):
    """The directory exists but does not hold a tierkv store."""


class StoreVersionError(StoreError):
    """The directory was written by another version of the on-disk format."""


class StoreLockedError(StoreError):
    """Another process owns the directory.

    Attributes:
        pid: process id of the owner, or None when unknown.
        host: host name of the owner, or None.
        since: Unix seconds at which the owner took the lock, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int | None = None,
        host: str | None = None,
        since: float | None = None,
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host
        self.since = since


class StoreReadOnlyError(StoreError):
    """A write was asked of a store, directory or filesystem that is read-only."""


class StoreClosedError(TierKVError, RuntimeError):
    """The store, tier or sequence was used after it was closed."""


class SequenceEndedError(StoreClosedError):
    """The sequence was used after it was finished or abandoned; its store may be open."""


class ForkError(TierKVError, RuntimeError):
    """A store was used in a child process that inherited it through fork()."""


class UnsupportedError(TierKVError, NotImplementedError):
    """A way of using tierkv that would give wrong results and is therefore refused."""
