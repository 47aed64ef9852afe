"""Keys of prompts, and the pages that are there under them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.control_plane.match import match
from tierkv.identity.keys import Extras, KeyChain, as_tokens

if TYPE_CHECKING:
    from tierkv.control_plane.planner import Rows
    from tierkv.data_plane.core import Core


def key_chains(core: Core, tokens: Any, extras: Extras) -> list[KeyChain]:
    """Return the key chain of each layer group over a prompt."""
    chains = [
        KeyChain(core.namespace.root(number), group.page_tokens, extras)
        for number, group in enumerate(core.spec.groups)
    ]
    for chain in chains:
        chain.extend(tokens)
    return chains


def find_pages(core: Core, token_ids: Any, extras: Extras) -> Rows:
    """Return the pages of the longest prefix that is there.  Call with the lock held."""
    tokens = as_tokens(token_ids)
    chains = key_chains(core, tokens, extras)
    found = match(core.index, core.spec, chains, tokens, limit=len(tokens))
    return np.concatenate([group.rows for group in found.groups])
