"""State that went through host memory, the disk or a restart is the state that left."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.integrations.transformers import TierKV  # noqa: E402

WINDOW, PAGE = 8, 4
ENDS = [1, 3, 4, 5, 7, 8, 9, 12, 13, 25]
ROUTES = ["device", "host", "disk", "reopened"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_every_route_at_every_boundary(
    family: str, dtype: str, route: str, tiny: Any, steps: Any, tmp_path: Path
) -> None:
    model = tiny(family, getattr(torch, dtype))
    ids = steps.ids(ENDS[-1])
    traveller = steps.traveller(model, tmp_path, tokens=64, page_tokens=PAGE)
    twin, tiers = steps.twin(model), dict.fromkeys(ROUTES, 0)
    with traveller:
        for start, end in pairwise([0, *ENDS]):
            traveller.travel(route)
            with traveller.kv.cache(ids[:end]) as cache:
                assert cache.found.total == start
                for tier in ("device", "host", "disk"):
                    tiers[tier] += getattr(cache.found, tier)
                part = ids[start:end]
                assert torch.equal(twin.feed(part), steps.feed(model, cache, part))
            traveller.kv.check()
    assert tiers["disk" if route == "reopened" else route] > 0, f"nothing came from there: {tiers}"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_prefix_shared_by_others_at_every_length(
    family: str, tiny: Any, steps: Any, tmp_path: Path
) -> None:
    """Prompts that leave a stored one anywhere resume at the longest usable boundary."""
    model = tiny(family)
    ids, other = steps.ids(48), steps.ids(48, seed=2)
    twin = steps.twin(model)
    with TierKV.attach(
        model,
        device="4MiB",
        page_tokens={"full": PAGE} if family == "llama" else PAGE,
        boundary_pages=1,
    ) as kv:
        with kv.cache(ids) as cache:
            for part in (ids[:20], ids[20:21], ids[21:]):
                assert torch.equal(twin.feed(part), steps.feed(model, cache, part))
        resumed = 0
        for length in range(1, 48):
            prompt = ids[:length] + other[:3]
            cache = kv.cache(prompt)
            found = cache.found.total
            assert found <= length
            resumed += found
            rest = prompt[found:]
            expected = steps.feed(model, twin.at(found), rest)
            assert torch.equal(expected, steps.feed(model, cache, rest))
            cache.abandon()
        assert resumed > 20 * 47 // 2, "hardly anything was resumed"
        kv.check()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 33])
def test_exactly_the_same_prompt_again(family: str, length: int, tiny: Any, steps: Any) -> None:
    """A full hit still computes the last token, and answers the same."""
    model = tiny(family)
    row = steps.row(steps.ids(length))
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(row, **options)
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE, boundary_pages=1) as kv:
        for _ in range(3):
            assert torch.equal(kv.generate(row, **options), expected)
            with kv.cache(row) as cache:
                assert cache.found.total < length
        kv.check()
