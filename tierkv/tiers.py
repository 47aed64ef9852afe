"""The tiers a page can live in, from the nearest to the farthest."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where a page's bytes are.  A page may be resident in several tiers at once."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        """Lower-case name, as the CLI and the statistics spell it."""
        return self.name.lower()
