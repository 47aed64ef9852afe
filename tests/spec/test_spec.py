"""Layer groups: sizes, ranges, and which pages resuming needs, for every kind."""

import pytest
from toy_model import FULL, LATENT, MIXED, full_group, latent_group, sliding_group

from tierkv import CacheSpec, Component, GroupKind, LayerGroup, SpecError
from tierkv.identity.spec import kv_components


def snapshot_group(page_tokens=64):
    return LayerGroup(
        name="state",
        kind=GroupKind.SNAPSHOT,
        layers=(4, 5),
        components=(
            Component(name="conv", heads=1, dim=96),
            Component(name="ssm", heads=4, dim=256),
        ),
        dtype="float32",
        page_tokens=page_tokens,
    )


def test_sizes_of_a_full_group():
    group = full_group(page_tokens=4, heads=2, dim=32)
    assert group.row_bytes == 2 * 2 * 32 * 4
    assert group.layer_bytes == 4 * group.row_bytes
    assert group.page_bytes == 2 * group.layer_bytes
    assert group.layer_range(1) == (group.layer_bytes, group.layer_bytes)
    assert group.component_offsets == (0, 4 * 2 * 32 * 4)


def test_latent_components_have_widths_of_their_own():
    group = latent_group(page_tokens=4)
    assert group.row_bytes == (48 + 16) * 2
    assert group.component_offsets == (0, 4 * 48 * 2)
    assert group.kind.needs_every_page


def test_a_snapshot_holds_one_state_however_long_the_page():
    short, long = snapshot_group(64), snapshot_group(1024)
    assert short.page_bytes == long.page_bytes == 2 * (96 + 1024) * 4
    assert short.rows == 1
    assert not short.kind.needs_every_page


@pytest.mark.parametrize(
    ("group", "tokens", "first", "pages"),
    [
        (full_group(page_tokens=4), 0, 0, range(0, 0)),
        (full_group(page_tokens=4), 9, 0, range(0, 3)),
        (sliding_group(page_tokens=2, window=6), 4, 0, range(0, 2)),
        (sliding_group(page_tokens=2, window=6), 5, 0, range(0, 3)),
        (sliding_group(page_tokens=2, window=6), 6, 1, range(0, 3)),
        (sliding_group(page_tokens=2, window=6), 7, 2, range(1, 4)),
        (sliding_group(page_tokens=2, window=6), 20, 15, range(7, 10)),
        (snapshot_group(8), 16, 15, range(1, 2)),
        (snapshot_group(8), 17, 16, range(2, 3)),
    ],
)
def test_what_resuming_needs(group, tokens, first, pages):
    assert group.first_needed(tokens) == first
    assert group.needed_pages(tokens) == pages


def test_a_slot_holds_the_largest_page_on_4_kib():
    assert MIXED.slot_bytes % 4096 == 0
    assert MIXED.slot_bytes >= max(g.page_bytes for g in MIXED.groups)
    assert MIXED.anchor == 0
    assert CacheSpec(groups=(sliding_group(), full_group())).anchor == 1
    assert LATENT.layer_to_group == {0: 0, 1: 0, 2: 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (1, 0)}, "ascending"),
        ({"layers": (0, 0)}, "ascending"),
        ({"layers": (-1,)}, "non-negative"),
        ({"dtype": "float12"}, "float12"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"window": 5}, "window"),
        ({"kind": GroupKind.SLIDING}, "window"),
        ({"kind": GroupKind.SLIDING, "window": 1}, "at least 2"),
        ({"components": ()}, "component"),
    ],
)
def test_groups_that_make_no_sense_are_refused(changed, message):
    good = {
        "name": "g",
        "kind": GroupKind.FULL,
        "layers": (0,),
        "components": kv_components(1, 8),
        "dtype": "float32",
        "page_tokens": 4,
    }
    with pytest.raises(SpecError, match=message):
        LayerGroup(**{**good, **changed})


def test_specs_that_make_no_sense_are_refused():
    with pytest.raises(SpecError, match="at least one"):
        CacheSpec(groups=())
    with pytest.raises(SpecError, match="unique"):
        CacheSpec(groups=(full_group(), full_group(layers=(5,))))
    with pytest.raises(SpecError, match="more than one"):
        CacheSpec(groups=(full_group(), full_group("other", layers=(1,))))
    with pytest.raises(SpecError, match="heads and dim"):
        Component(name="k", heads=0, dim=8)


def test_the_identity_has_everything_that_decides_the_bytes():
    assert FULL.identity() != LATENT.identity()
    base = full_group().identity()
    for other in (
        full_group("other"),
        full_group(layers=(0, 2)),
        full_group(page_tokens=8),
        full_group(heads=1),
        full_group(dim=64),
        full_group(dtype="bfloat16"),
    ):
        assert other.identity() != base
