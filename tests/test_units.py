"""Byte budgets read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import InvalidInputError
from tierkv.units import format_bytes, parse_bytes, suggest_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1b", 1),
        ("64k", 64 << 10),
        ("256MiB", 256 << 20),
        (" 8 GiB ", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("2TB", 2 * 10**12),
        ("1t", 1 << 40),
    ],
)
def test_budgets_are_numbers_or_strings(text, count) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "value", [0, -1, "0", "-5MiB", "", "MiB", "5 parsecs", "1e9", "0.1b", 1.5, None, True, b"5"]
)
def test_what_is_no_budget_is_refused_by_name(value) -> None:
    with pytest.raises(InvalidInputError, match="host: "):
        parse_bytes(value, name="host")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1_474_560, "1.41 MiB"),
        (1020 << 20, "1020 MiB"),
        (152 << 20, "152 MiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5 TiB"),
        (5000 << 40, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_bytes_are_written_with_three_digits_and_no_exponent(count, text) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1025, "1.1KiB"),
        (7_683_440_640, "7.2GiB"),
        ((1 << 30) - 1, "1024MiB"),
        (3 << 29, "1.5GiB"),
        (5000 << 40, "5000TiB"),
    ],
)
def test_a_suggested_budget_is_short(count, text) -> None:
    assert suggest_bytes(count) == text


@given(st.integers(1, 1 << 50))
def test_a_suggested_budget_suffices_and_is_no_tenth_too_large(count) -> None:
    assert count <= parse_bytes(suggest_bytes(count)) <= count * 1.1 + 1
