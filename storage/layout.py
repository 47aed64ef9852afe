"""The files of a store directory, and the small ones that describe it.

``meta`` names the store and its slabs; ``names`` describes namespaces for people; ``clean``
says that the index is complete.  Each ends in a checksum line and is replaced whole or not
at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import xxhash

from tierkv.errors import NotAStoreError, StoreError, StoreVersionError
from tierkv.storage.format import FORMAT_VERSION

STORE_KIND = "tierkv-store"
LMDB_ENGINE = "0.9"

_SLAB_NAME = re.compile(r"\d{4,}(?:\.new)?")
_INDEX_FILES = ("data.mdb", "lock.mdb")
_INDEX_DIRS = ("index", "index.new")
_TOP_FILES = ("meta", "names", "lock", "clean", "live")


@dataclass(frozen=True, slots=True)
class SlabMeta:
    """One slab file.  ``state`` is ``active``, ``retired`` (read, never written) or ``dropped``."""

    id: int
    uuid: str
    slot_bytes: int
    slots: int
    state: str = "active"

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.slot_bytes * self.slots


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What ``meta`` says.  Slab ids are never used twice: ``next_slab`` only grows."""

    fingerprint: str
    next_slab: int = 0
    slabs: tuple[SlabMeta, ...] = ()
    version: int = FORMAT_VERSION
    lmdb: str = LMDB_ENGINE
    kind: str = STORE_KIND

    def with_slab(self, slab: SlabMeta) -> StoreMeta:
        """Return the meta with one slab added or replaced."""
        others = tuple(s for s in self.slabs if s.id != slab.id)
        slabs = tuple(sorted((*others, slab), key=lambda s: s.id))
        return replace(self, slabs=slabs, next_slab=max(self.next_slab, slab.id + 1))

    def without_slab(self, slab_id: int) -> StoreMeta:
        """Return the meta without one slab."""
        return replace(self, slabs=tuple(s for s in self.slabs if s.id != slab_id))


@dataclass(frozen=True, slots=True)
class CleanMark:
    """What ``clean`` says of the index that an orderly close left behind.

    The hash covers the whole index file: LMDB may take the process down over a damaged one,
    so it is not even opened unless it is as it was.
    """

    pages: int
    record_sum: int
    max_seq: int
    durable_seq: int
    index_bytes: int
    index_hash: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths inside a store directory."""

    root: str
    meta: str = field(init=False)
    lock: str = field(init=False)
    clean: str = field(init=False)
    names: str = field(init=False)
    index: str = field(init=False)
    slabs: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("meta", "lock", "clean", "names", "index", "slabs"):
            object.__setattr__(self, name, os.path.join(self.root, name))

    def slab(self, slab_id: int) -> str:
        """Return the path of a slab file."""
        return os.path.join(self.slabs, f"{slab_id:04d}")

    def files(self) -> tuple[list[str], list[str]]:
        """Return (our own files, unknown ones) as sorted paths relative to the root."""
        known: list[str] = []
        unknown: list[str] = []
        for folder, subdirs, names in os.walk(self.root):
            relative = os.path.relpath(folder, self.root)
            subdirs.sort()
            for name in sorted(names):
                path = os.path.normpath(os.path.join(relative, name))
                (known if _is_ours(relative, name) else unknown).append(path)
        return known, unknown


def _is_ours(folder: str, name: str) -> bool:
    if folder == ".":
        return name.removesuffix(".new") in _TOP_FILES
    if folder in _INDEX_DIRS:
        return name in _INDEX_FILES
    return folder == "slabs" and (name == ".probe" or _SLAB_NAME.fullmatch(name) is not None)


def encode_sealed(value: Any) -> bytes:
    """Return a JSON line followed by a line with its checksum."""
    line = json.dumps(value, sort_keys=True).encode()
    return line + b"\n" + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"


def decode_sealed(data: bytes) -> dict[str, Any] | None:
    """Return the object that ``encode_sealed`` wrote, or None when it was damaged."""
    line, _, rest = data.partition(b"\n")
    if rest.strip() != xxhash.xxh3_64_hexdigest(line).encode():
        return None
    value = json.loads(line)
    return value if isinstance(value, dict) else None


def encode_meta(meta: StoreMeta) -> bytes:
    """Return the contents of ``meta``."""
    return encode_sealed(asdict(meta))


def load_meta(path: str) -> StoreMeta | None:
    """Read ``meta``; None when there is none.

    Raises:
        StoreVersionError: written by another version of the format or of LMDB.
        NotAStoreError: not a meta file of ours, or damaged.
        StoreError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(64 << 20)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); check its owner") from error
    value = decode_sealed(data)
    if value is None or value.get("kind") != STORE_KIND:
        raise NotAStoreError(
            f"{path}: not the meta file of a tierkv store, or damaged; restore it from a copy, "
            "or empty the directory to start anew"
        )
    if value["version"] != FORMAT_VERSION:
        raise StoreVersionError(
            f"{path}: written in format version {value['version']}, this tierkv reads version "
            f"{FORMAT_VERSION}; use the matching release or another directory (nothing was changed)"
        )
    if value["lmdb"] != LMDB_ENGINE:
        raise StoreVersionError(
            f"{path}: its index is of LMDB {value['lmdb']}, this tierkv uses {LMDB_ENGINE}; "
            "use the matching release, or another directory (nothing was changed)"
        )
    slabs = tuple(SlabMeta(**slab) for slab in value["slabs"])
    return StoreMeta(value["fingerprint"], value["next_slab"], slabs)


def load_clean(path: str) -> CleanMark | None:
    """Read the clean-shutdown marker; None when it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            value = decode_sealed(file.read(4096))
    except OSError:
        return None
    try:
        return CleanMark(**value) if value else None
    except TypeError:
        return None


def load_names(path: str) -> dict[bytes, str]:
    """Read the descriptions of namespaces; what cannot be read is left out."""
    try:
        with open(path, "rb") as file:
            value = decode_sealed(file.read(64 << 20)) or {}
    except OSError:
        return {}
    return {bytes.fromhex(digest): str(text) for digest, text in value.items()}


def encode_names(names: Mapping[bytes, str]) -> bytes:
    """Return the contents of ``names``."""
    return encode_sealed({digest.hex(): text for digest, text in names.items()})


def hash_file(path: str) -> tuple[int, str]:
    """Return a file's length and the xxh3_128 of its contents, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    hasher, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(4 << 20):
            hasher.update(piece)
            size += len(piece)
    return size, hasher.hexdigest()
