"""Tokens a page: the sizes the brief names, and what holds for any geometry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import SpecError
from tierkv.identity.page_size import (
    MAX_PAGE_BYTES,
    MIN_PAGE_BYTES,
    GroupSize,
    choose_page_tokens,
    override_page_tokens,
)


def group(name: str, layers: int, row_bytes: int) -> GroupSize:
    return GroupSize(name=name, layers=layers, row_bytes=row_bytes)


def gemma_270m(element: int) -> list[GroupSize]:
    row = 2 * 256 * element
    return [group("full", 3, row), group("sliding", 15, row)]


@pytest.mark.parametrize(("element", "tokens"), [(2, 64), (4, 32)])
def test_smollm2_pages_are_1_4_mib(element: int, tokens: int) -> None:
    groups = [group("full", 30, 2 * 3 * 64 * element)]
    assert choose_page_tokens(groups) == {"full": tokens}
    assert tokens * groups[0].token_bytes == 1_474_560


@pytest.mark.parametrize(("element", "full", "sliding"), [(2, 640, 128), (4, 320, 64)])
def test_gemma_pages_have_equal_bytes(element: int, full: int, sliding: int) -> None:
    groups = gemma_270m(element)
    assert choose_page_tokens(groups) == {"full": full, "sliding": sliding}
    assert full * groups[0].token_bytes == sliding * groups[1].token_bytes


def test_odd_geometry_sizes_each_group_alone() -> None:
    # 7 and 11 layers share no page size below 4 MiB with powers of two in both.
    groups = [group("a", 7, 4 * 1009), group("b", 11, 4 * 997)]
    chosen = choose_page_tokens(groups)
    for g in groups:
        assert chosen[g.name] * g.token_bytes >= MIN_PAGE_BYTES


def test_a_token_heavier_than_a_page_gets_a_page_of_its_own() -> None:
    assert choose_page_tokens([group("full", 100, 65_536)]) == {"full": 1}


sizes = st.builds(
    group,
    st.sampled_from(["a", "b", "c"]),
    st.integers(1, 96),
    st.one_of(st.integers(1, 5000), st.sampled_from([256, 512, 1024, 2048, 4096, 8192])),
)


@given(st.lists(sizes, min_size=1, max_size=3, unique_by=lambda g: g.name))
def test_any_geometry_gets_pages_of_at_least_one_mib(groups: list[GroupSize]) -> None:
    chosen = choose_page_tokens(groups)
    assert set(chosen) == {g.name for g in groups}
    for g in groups:
        tokens = chosen[g.name]
        assert tokens >= 1
        assert tokens * g.token_bytes >= MIN_PAGE_BYTES
        assert tokens == 1 or tokens * g.token_bytes <= MAX_PAGE_BYTES + g.token_bytes


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([256, 512, 1024, 2048]))
def test_where_ranges_can_be_aligned_they_are(first: int, second: int, row: int) -> None:
    groups = [group("a", first, row), group("b", second, row)]
    chosen = choose_page_tokens(groups)
    for g in groups:
        assert chosen[g.name] * row % 4096 == 0
    pages = {chosen[g.name] * g.token_bytes for g in groups}
    smallest_equal = choose_page_tokens(groups[:1] if first >= second else groups[1:])
    if len(pages) > 1:  # no equal size was there to be had
        heavier = max(groups, key=lambda g: g.token_bytes)
        assert chosen[heavier.name] == smallest_equal[heavier.name]


def test_a_number_overrides_the_first_group_and_the_others_follow_by_weight() -> None:
    assert override_page_tokens(gemma_270m(2), 320) == {"full": 320, "sliding": 64}
    assert override_page_tokens(gemma_270m(2), 2) == {"full": 2, "sliding": 1}


def test_a_map_overrides_by_name() -> None:
    assert override_page_tokens(gemma_270m(2), {"sliding": 32}) == {"full": 160, "sliding": 32}
    assert override_page_tokens(gemma_270m(2), {"sliding": 8, "full": 16}) == {
        "full": 16,
        "sliding": 8,
    }


@pytest.mark.parametrize("wrong", [0, -4, 1.5, True, "64", {"full": 0}, {"window": 8}, {}])
def test_nonsense_is_refused_with_the_group_named(wrong: object) -> None:
    with pytest.raises(SpecError, match=r"page_tokens: .*(full|map|window)"):
        override_page_tokens(gemma_270m(2), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [0, -1])
def test_a_group_without_layers_is_refused(layers: int) -> None:
    with pytest.raises(SpecError, match="must be positive"):
        group("full", layers, 4)
