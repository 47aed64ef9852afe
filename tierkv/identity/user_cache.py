"""The folder for what can be made again: converted models, digests of weight files."""

from __future__ import annotations

from pathlib import Path


def user_cache_dir() -> Path:
    """Return tierkv's folder inside the user's cache folder (not created here)."""
    return Path.home() / ".cache" / "tierkv"
