"""Page keys of one prefix, from an engine's own hashes or from token ids.

An engine's hash says which tokens a block continues (and which adapter, image or salt); it
does not say which weights, layout or rank made the bytes.  So the key of a page is SHA-256
over (root of its group in the namespace, engine's hash at the page's last token): two
namespaces, or two groups of one, never share a key.  Parent keys travel with every page:
pages of the anchor group, and of every group that needs all its pages, form chains; pages
of windows and snapshots hang below the anchor page of the boundary they serve, so that
they leave before it does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.errors import InvalidInputError
from tierkv.identity.keys import KEY_BYTES, Extras, KeyArray, KeyChain, TokenArray, as_tokens

if TYPE_CHECKING:
    from tierkv.identity.keys import Namespace
    from tierkv.identity.spec import CacheSpec

_UNKNOWN = bytes(KEY_BYTES)  # the key of pages before the first hash given


@dataclass(frozen=True, slots=True)
class EnginePage:
    """One page of a prefix: what must be known of it to keep and to find it.

    Attributes:
        group: index of its layer group in the spec.
        number: its number in the prefix, counted in pages of the group.
        key: its key.
        parent: key of the page (or chain's root) that it hangs below.
        end_token: tokens of the prefix up to its end.
        num_tokens: tokens it holds.
        engine_hash: the engine's own hash at its last token, if that is where keys come from.
        parent_hash: the engine's hash at the end of ``parent``, if known.
        token_ids: the ids of its tokens, if known.
    """

    group: int
    number: int
    key: bytes
    parent: bytes
    end_token: int
    num_tokens: int
    engine_hash: bytes | None = None
    parent_hash: bytes | None = None
    token_ids: TokenArray | None = field(default=None, compare=False, repr=False)


class PageKeys:
    """The keys of one prefix's pages in every layer group; they grow with the prefix.

    Made by :meth:`AttachedPool.keys_from_hashes` and :meth:`AttachedPool.keys_from_tokens`.
    One thread at a time may use it.

    Attributes:
        namespace: digest of the namespace that they belong to.
        tokens: length of the prefix whose keys are known.
        start_token: tokens before the first one whose keys are known.
    """

    def __init__(self, spec: CacheSpec, namespace: Namespace, *, start_token: int = 0) -> None:
        self.namespace = namespace.digest
        self.tokens = self.start_token = start_token
        self._spec = spec
        self._roots = [namespace.root(number) for number in range(len(spec.groups))]
        self._keys: list[list[bytes]] = []
        for group in spec.groups:
            if start_token % group.page_tokens:
                raise InvalidInputError(
                    f"keys: start_token={start_token} lies inside a page of group "
                    f"{group.name!r} ({group.page_tokens} tokens)"
                )
            self._keys.append([_UNKNOWN] * (start_token // group.page_tokens))
        self._ids: TokenArray | None = np.empty(0, np.uint32)

    def full_pages(self, group: int) -> int:
        """Return how many pages of a group the known prefix fills."""
        return len(self._keys[group])

    def array(self, group: int, stop: int) -> KeyArray:
        """Return the keys of a group's first pages as ``[pages, 32]`` bytes."""
        joined = b"".join(self._keys[group][:stop])
        return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)

    def pages(self, group: int, start: int = 0, stop: int | None = None) -> list[EnginePage]:
        """Return full pages [start, stop) of a layer group, ready to be saved.

        Args:
            group: index of the group in the spec.
            start: number of the first page.
            stop: number behind the last one; None for all that are full.

        Raises:
            InvalidInputError: no such group, or pages that are not full or have no key.
        """
        if not 0 <= group < len(self._keys):
            raise InvalidInputError(f"keys: no layer group {group}; there are {len(self._keys)}")
        full, first = len(self._keys[group]), self._first_known(group)
        stop = full if stop is None else stop
        if not first <= start <= stop <= full:
            raise InvalidInputError(
                f"keys: pages [{start}, {stop}) of group {self._spec.groups[group].name!r} asked "
                f"for, but keys are known of full pages [{first}, {full})"
            )
        return [self._page(group, number) for number in range(start, stop)]

    def _page(self, group: int, number: int) -> EnginePage:
        size = self._spec.groups[group].page_tokens
        end = (number + 1) * size
        parent, parent_end = self._parent(group, number)
        return EnginePage(
            group=group,
            number=number,
            key=self._keys[group][number],
            parent=parent,
            end_token=end,
            num_tokens=size,
            engine_hash=self._hash_at(end),
            parent_hash=self._hash_at(parent_end),
            token_ids=self._token_ids(end - size, end),
        )

    def _parent(self, group: int, number: int) -> tuple[bytes, int]:
        """Return the key that a page hangs below, and where that ends."""
        spec = self._spec
        size = spec.groups[group].page_tokens
        if group == spec.anchor or spec.groups[group].kind.needs_every_page:
            return (self._keys[group][number - 1], number * size) if number else self._top(group)
        # The anchor page of the boundary served, or the last one known while that is growing.
        anchor = self._keys[spec.anchor]
        anchor_size = spec.groups[spec.anchor].page_tokens
        at = min(-(-(number + 1) * size // anchor_size), len(anchor))
        return (anchor[at - 1], at * anchor_size) if at else self._top(spec.anchor)

    def _top(self, group: int) -> tuple[bytes, int]:
        return self._roots[group], 0

    def _first_known(self, group: int) -> int:
        return self.start_token // self._spec.groups[group].page_tokens

    def _hash_at(self, end: int) -> bytes | None:
        """Return the engine's hash of the prefix of ``end`` tokens, if known."""
        return None

    def _token_ids(self, start: int, stop: int) -> TokenArray | None:
        if self._ids is None or stop > len(self._ids) + self.start_token:
            return None
        return self._ids[start - self.start_token : stop - self.start_token]


class HashKeys(PageKeys):
    """Keys made from an engine's own hashes, one for every so many tokens."""

    def __init__(
        self,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        hash_tokens: int,
        start_token: int = 0,
        parent_hash: bytes | None = None,
    ) -> None:
        super().__init__(spec, namespace, start_token=start_token)
        uneven = [g.name for g in spec.groups if hash_tokens < 1 or g.page_tokens % hash_tokens]
        if uneven:
            raise InvalidInputError(
                f"keys: hash_tokens={hash_tokens} does not divide the pages of groups {uneven}; a "
                "page's key is the hash at its last token"
            )
        self._hash_tokens = hash_tokens
        self._hashes: list[bytes] = []
        self._parent_hash = parent_hash
        if start_token and parent_hash is not None:
            for group, keys in enumerate(self._keys):
                keys[-1] = self._scoped(group, parent_hash)

    def extend(self, hashes: Iterable[bytes], token_ids: Any = None) -> None:
        """Add the hashes that follow, and the ids of their tokens if events shall name them.

        Raises:
            InvalidInputError: a hash that is empty or no bytes, or ids that do not fit the hashes.
        """
        new = list[bytes]()
        for value in hashes:
            if not isinstance(value, bytes) or not value:
                raise InvalidInputError(f"keys: a hash must be bytes, one or more, got {value!r}")
            new.append(value)
        if token_ids is None:
            self._ids = None if new else self._ids
        else:
            ids = as_tokens(token_ids)
            if len(ids) != len(new) * self._hash_tokens:
                raise InvalidInputError(
                    f"keys: {len(ids)} token ids for {len(new)} hashes of {self._hash_tokens} "
                    "tokens each"
                )
            if self._ids is not None:
                self._ids = np.concatenate([self._ids, ids])
        self._hashes += new
        self.tokens += len(new) * self._hash_tokens
        for group, keys in enumerate(self._keys):
            size = self._spec.groups[group].page_tokens
            for number in range(len(keys), self.tokens // size):
                engine_hash = self._hash_at((number + 1) * size)
                assert engine_hash is not None
                keys.append(self._scoped(group, engine_hash))

    def _scoped(self, group: int, engine_hash: bytes) -> bytes:
        head = b"tierkv/engine\0" + self._roots[group]
        return hashlib.sha256(head + engine_hash).digest()

    def _hash_at(self, end: int) -> bytes | None:
        at, rest = divmod(end - self.start_token, self._hash_tokens)
        if at == rest == 0:
            return self._parent_hash
        return self._hashes[at - 1] if rest == 0 and 0 < at <= len(self._hashes) else None


class TokenKeys(PageKeys):
    """Keys made from token ids, for engines without hashes of their own."""

    def __init__(self, spec: CacheSpec, namespace: Namespace, *, extras: Extras = ()) -> None:
        super().__init__(spec, namespace)
        self._chains = [
            KeyChain(root, group.page_tokens, extras)
            for root, group in zip(self._roots, spec.groups, strict=True)
        ]

    def extend(self, token_ids: Any) -> None:
        """Add the ids that follow.

        Raises:
            InvalidInputError: not one sequence of token ids.
        """
        assert self._ids is not None
        self._ids = np.concatenate([self._ids, as_tokens(token_ids)])
        self.tokens = len(self._ids)
        for chain, keys in zip(self._chains, self._keys, strict=True):
            chain.extend(self._ids)
            keys += [chain.key(page) for page in range(len(keys), len(chain))]


def check_pages(pages: Sequence[EnginePage], spec: CacheSpec) -> None:
    """Refuse pages named twice, or made for another spec.

    Raises:
        InvalidInputError: with the page.
    """
    seen: set[bytes] = set()
    for page in pages:
        name = f"page {page.number} of group {page.group}"
        if not 0 <= page.group < len(spec.groups):
            raise InvalidInputError(f"save: {name}: the spec has {len(spec.groups)} groups")
        if page.num_tokens != spec.groups[page.group].page_tokens or page.key == _UNKNOWN:
            raise InvalidInputError(f"save: {name} was made for another spec, or has no key")
        if page.key in seen:
            raise InvalidInputError(f"save: {name} (prefix of {page.end_token}) is named twice")
        seen.add(page.key)
