"""Digests over the bytes of a model's weights, the part of identity that names cannot give.

Two functions: one over tensors in memory, one over the weight files of a directory.  Both
read every byte once and remember the answer while they can prove that nothing changed.
torch is imported only when tensors are given.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.errors import InvalidInputError
from tierkv.identity.user_cache import user_cache_dir

if TYPE_CHECKING:
    import torch

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_PIECE_BYTES = 16 << 20
_SETTLED_S = 2.0

# A memo only: it changes how long an answer takes, never the answer.
_digests: weakref.WeakKeyDictionary[Any, tuple[object, str]] = weakref.WeakKeyDictionary()


def weights_digest(model: Any) -> str:
    """Return a SHA-256 (hex) over all parameters and persistent buffers, with their names.

    Names, dtypes, shapes and bytes count; where the tensors live, and the model's name or
    path, do not.  For a module the digest is remembered while no tensor was replaced or
    changed in place.  Not safe to call while another thread trains the model.

    Args:
        model: a ``torch.nn.Module``, or a state dict.

    Raises:
        InvalidInputError: a tensor without readable bytes (meta device, packed subclass).
    """
    if isinstance(model, Mapping):
        return _digest_of(model)
    state = model.state_dict()
    version = tensor_versions(state)
    known = _digests.get(model)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    digest = _digest_of(state)
    if version is not None:
        _digests[model] = (version, digest)
    return digest


def tensor_versions(state: Mapping[str, Any]) -> object | None:
    """Return what changes when a tensor is replaced or written, None where torch cannot tell.

    Writes through ``tensor.data`` escape it, as they escape torch's own version counter.
    """
    if any(getattr(t, "is_inference", bool)() for t in state.values()):
        return None
    return tuple((n, t.data_ptr(), t._version, t.shape, t.dtype) for n, t in state.items())


def _digest_of(state: Mapping[str, Any]) -> str:
    whole = hashlib.sha256(b"tierkv/weights/1\0")
    done: dict[tuple[Any, ...], bytes] = {}
    for name in sorted(state):
        tensor = _readable(name, state[name])
        # Tied weights count under each name, and are read once.
        where = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if where not in done:
            done[where] = _tensor_digest(name, tensor)
        label = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        whole.update(len(label).to_bytes(4, "little") + label + done[where])
    return whole.hexdigest()


def _readable(name: str, tensor: Any) -> torch.Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(
            f"weights: {name!r} is a {type(tensor).__name__}, not a tensor; "
            "give weights_id=, an id you vouch for"
        )
    if tensor.device.type == "meta":
        raise InvalidInputError(
            f"weights: {name!r} has no bytes here (meta device; the weights are offloaded); "
            "give weights_id=, an id you vouch for"
        )
    return tensor


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    import torch

    digest = hashlib.sha256()
    try:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), _PIECE_BYTES):
            digest.update(flat[start : start + _PIECE_BYTES].cpu().numpy().data)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InvalidInputError(
            f"weights: cannot read the bytes of {name!r} ({type(tensor).__name__}, "
            f"{tensor.dtype}): {error}; give weights_id=, an id you vouch for"
        ) from error
    return digest.digest()


def files_digest(path: str | os.PathLike[str], *, cache: Path | None = None) -> str:
    """Return a SHA-256 (hex) over the weight files of a model directory, or of one file.

    Each file's digest is remembered by device, inode, size and times, so that an unchanged
    directory costs no reading.  Names of files and of the directory do not count.

    Args:
        path: a directory with ``*.safetensors``, ``*.bin`` or ``*.gguf``, or one such file.
        cache: JSON file that remembers; in the user's cache folder by default.

    Raises:
        InvalidInputError: no weight file there.
    """
    root = Path(path)
    files = [root] if root.is_file() else _weight_files(root)
    if not files:
        raise InvalidInputError(
            f"weights: no file of {', '.join(WEIGHT_SUFFIXES)} in {root}; "
            "give a model directory or one weight file"
        )
    memo = _FileMemo(cache or user_cache_dir() / "weight_digests.json")
    digests = sorted(memo.digest(file) for file in files)
    memo.save()
    return hashlib.sha256("\n".join(["tierkv/files/1", *digests]).encode()).hexdigest()


def _weight_files(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())


class _FileMemo:
    """Digests of files by identity, in one small JSON file; losing it costs time only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            loaded = json.loads(path.read_text())
        except (OSError, ValueError):
            loaded = {}
        self._known: dict[str, str] = loaded if isinstance(loaded, dict) else {}

    def digest(self, file: Path) -> str:
        before = file.stat()
        identity = _file_identity(before)
        known = self._known.get(identity)
        if known is not None:
            return known
        value = _hash_file(file)
        # A file written just now may be written again within one tick of its clock.
        newest = max(before.st_mtime, before.st_ctime)
        if time.time() - newest > _SETTLED_S and _file_identity(file.stat()) == identity:
            self._known[identity] = value
            self._changed = True
        return value

    def save(self) -> None:
        if not self._changed:
            return
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._known, indent=0, sort_keys=True))
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)  # a read-only home: read the files again next time


def _file_identity(stat: os.stat_result) -> str:
    parts: Iterable[int] = (
        stat.st_dev,
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
    )
    return ":".join(map(str, parts))


def _hash_file(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
