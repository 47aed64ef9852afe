"""Names for people: what a namespace's digest and a layer group's index stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.storage.format import PageInfo


class Names:
    """The namespaces of a directory, from the descriptions stored beside its pages.

    A description is the canonical JSON that the digest was made from.  One that is missing
    or unreadable costs only the names: digests and indices are shown instead.
    """

    def __init__(self, descriptions: Mapping[bytes, str]) -> None:
        self._described = {digest: _parse(text) for digest, text in descriptions.items()}

    def group(self, info: PageInfo) -> str:
        """Return the name of a page's layer group, or its index."""
        try:
            name = self._described[info.namespace]["spec"]["groups"][info.group]["name"]
        except (KeyError, IndexError, TypeError):
            return str(info.group)
        return str(name)

    def description(self, digest: bytes) -> dict[str, Any]:
        """Return what is known of a namespace; empty when nothing is.

        The salt that keeps tenants apart is a secret of theirs: only whether there is one.
        """
        described = self._described.get(digest, {})
        return {k: bool(v) if k == "salt" else v for k, v in described.items()}

    def summary(self, digest: bytes) -> str:
        """Return weights, dtype and adapter of a namespace in one line."""
        described = self.description(digest)
        try:
            dtypes = sorted({group["dtype"] for group in described["spec"]["groups"]})
            parts = [str(described["weights"])[:24], *dtypes]
        except (KeyError, TypeError):
            return "(no description)"
        if described.get("adapter"):
            parts.append(f"adapter {str(described['adapter'])[:12]}")
        return " ".join(parts)


def _parse(text: str) -> dict[str, Any]:
    try:
        described = json.loads(text)
    except ValueError:
        return {}
    return described if isinstance(described, dict) else {}
