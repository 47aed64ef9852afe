"""Identity: namespaces and chained page keys.

A page key is SHA-256 over (parent key, number of tokens, token ids, extra keys); the
first parent of a group's chain is derived from the namespace, which is SHA-256 over a
canonical JSON description of everything that must agree for bytes to be interchangeable.
Nothing depends on a process, an environment variable or a builtin hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import InvalidInputError
from tierkv.identity.spec import CacheSpec

KEY_BYTES = 32
_MAX_TOKEN = 2**32 - 1

KeyArray = NDArray[np.uint8]  # shape [pages, KEY_BYTES]
TokenArray = NDArray[np.uint32]
Extras = Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A fingerprint of everything that must agree for pages to be interchangeable.

    Attributes:
        digest: 32 bytes.
        description: what went into it, as canonical JSON.
    """

    digest: bytes
    description: str

    @classmethod
    def build(
        cls,
        spec: CacheSpec,
        *,
        weights: str,
        adapter: str = "",
        salt: str = "",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> Namespace:
        """Return the namespace of a model's pages.

        Args:
            spec: geometry, dtype, page sizes, position encoding, layout.
            weights: a digest over all parameter bytes, or an id that the user vouches for.
            adapter: digest of a LoRA or other adapter; empty for none.
            salt: separates tenants that must not share pages.
            tp_rank: tensor-parallel rank, with ``tp_size`` ranks in all.

        Raises:
            InvalidInputError: an empty ``weights``, or a rank outside ``tp_size``.
        """
        if not weights:
            raise InvalidInputError(
                "namespace: weights must be a digest of the parameters or an id you vouch for; "
                "a model's name is not enough, since weights change under one name"
            )
        if not 0 <= tp_rank < tp_size:
            raise InvalidInputError(
                f"namespace: tp_rank must be in [0, tp_size), got {tp_rank} of {tp_size}"
            )
        described: dict[str, Any] = {
            "format": "tierkv/1",
            "spec": spec.identity(),
            "weights": weights,
            "adapter": adapter,
            # The description is stored with the pages; a tenant's secret must not be.
            "salt": hashlib.sha256(salt.encode()).hexdigest() if salt else "",
            "tp": [tp_rank, tp_size],
        }
        text = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return cls(hashlib.sha256(text.encode()).digest(), text)

    def root(self, group: int) -> bytes:
        """Return the parent key of the first page of a layer group's chain."""
        return hashlib.sha256(
            b"tierkv/chain\0" + self.digest + group.to_bytes(4, "little")
        ).digest()


def as_tokens(ids: Any) -> TokenArray:
    """Return token ids as a one-dimensional uint32 array.

    Args:
        ids: a list, numpy array or one-dimensional (or ``[1, n]``) tensor of integers.

    Raises:
        InvalidInputError: not integers, more than one row, negative or above 2**32 - 1.
    """
    if hasattr(ids, "detach"):  # a tensor, without importing torch here
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise InvalidInputError(
            f"token ids: expected one sequence, got shape {array.shape}; "
            "begin one sequence for each row of a batch"
        )
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype == bool or not np.issubdtype(array.dtype, np.integer):
        raise InvalidInputError(f"token ids: expected integers, got dtype {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _MAX_TOKEN:
        raise InvalidInputError(
            f"token ids: must lie in [0, 2**32), got values from {low} to {high}"
        )
    return np.ascontiguousarray(array, dtype=np.uint32)


class KeyChain:
    """The chained page keys of one layer group over a growing list of tokens."""

    __slots__ = ("_digests", "_extras", "page_tokens", "root")

    def __init__(self, root: bytes, page_tokens: int, extras: Extras = ()) -> None:
        self.root = root
        self.page_tokens = page_tokens
        self._digests: list[bytes] = []
        self._extras = sorted(extras)

    def __len__(self) -> int:
        """Number of full pages hashed so far."""
        return len(self._digests)

    def extend(self, tokens: TokenArray) -> None:
        """Hash the full pages of ``tokens`` (the whole sequence) not hashed yet."""
        size = self.page_tokens
        for page in range(len(self._digests), len(tokens) // size):
            start = page * size
            self._digests.append(
                self._digest(self.parent(page), start, tokens[start : start + size])
            )

    def fork(self) -> KeyChain:
        """Return a chain over the same tokens that grows apart."""
        other = KeyChain(self.root, self.page_tokens, self._extras)
        other._digests = list(self._digests)
        return other

    def crop(self, tokens: int) -> None:
        """Forget the pages that end behind the first ``tokens`` tokens."""
        del self._digests[tokens // self.page_tokens :]

    def parent(self, page: int) -> bytes:
        """Return the key before page ``page``: the previous page's, or the root."""
        return self._digests[page - 1] if page else self.root

    def key(self, page: int) -> bytes:
        """Return the key of full page ``page``."""
        return self._digests[page]

    def tail(self, tokens: TokenArray) -> bytes:
        """Return the key of the partial page that ends ``tokens`` (the whole sequence)."""
        page, rest = divmod(len(tokens), self.page_tokens)
        assert rest, "no partial page"
        self.extend(tokens)
        start = page * self.page_tokens
        return self._digest(self.parent(page), start, tokens[start:])

    def array(self, start: int = 0, stop: int | None = None) -> KeyArray:
        """Return the keys of full pages [start, stop) as ``[pages, 32]`` bytes."""
        return key_array(self._digests[start:stop])

    def _digest(self, parent: bytes, start: int, tokens: TokenArray) -> bytes:
        # Lengths go in before contents, so that no two inputs share an encoding.
        head = parent + len(tokens).to_bytes(4, "little") + tokens.tobytes()
        return hashlib.sha256(head + self._encode_extras(start, start + len(tokens))).digest()

    def _encode_extras(self, start: int, stop: int) -> bytes:
        if not self._extras:
            return b""
        inside = [(at - start, value) for at, value in self._extras if start <= at < stop]
        return b"".join(
            at.to_bytes(4, "little") + len(value).to_bytes(4, "little") + value
            for at, value in inside
        )


def key_array(keys: Iterable[bytes]) -> KeyArray:
    """Return page keys as an array of shape ``[pages, 32]``."""
    joined = b"".join(keys)
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
