"""Byte budgets as numbers or strings."""

from __future__ import annotations

import re

from tierkv.errors import InvalidInputError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")},
    **{f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")},
    **{p: 1024 ** (i + 1) for i, p in enumerate("kmgt")},
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | str, *, name: str = "budget") -> int:
    """Return a byte count from an int or a string such as ``"8GiB"``, ``"500MB"``, ``"64k"``.

    Args:
        value: bytes as an int, or a string; ``MB`` is 10**6, ``MiB`` and ``M`` are 2**20.
        name: what the value is for, named in the error.

    Raises:
        InvalidInputError: not a number, an unknown unit, zero or negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InvalidInputError(
            f"{name}: expected bytes as an int or a string such as '8GiB', got {value!r}"
        )
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        factor = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or factor is None:
            raise InvalidInputError(
                f"{name}: cannot read {value!r} as bytes; write for example '8GiB' or '500MB'"
            )
        count = int(float(match.group(1)) * factor)
    else:
        count = value
    if count <= 0:
        raise InvalidInputError(f"{name}: must be more than zero bytes, got {value!r}")
    return count


def suggest_bytes(count: int) -> str:
    """Return a budget of at least ``count`` bytes, as one would write it (``7.2GiB``).

    Rounded up to a tenth of its unit; ``parse_bytes`` reads it.
    """
    factor, unit = 1, "B"
    for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1):
        if count >= 1024**power:
            factor, unit = 1024**power, name
    whole, tenth = divmod(-(-10 * count // factor), 10)
    return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"


def format_bytes(count: float) -> str:
    """Return a byte count with a binary unit, three significant digits (``1.41 MiB``)."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    # Without an exponent, which three significant digits of 1000 to 1023 would give.
    exact = units[0] == "B" or abs(size) >= 100
    return f"{size:.0f} {units[0]}" if exact else f"{size:.3g} {units[0]}"
