"""Sequences and batches that the device pool cannot hold: the same tokens and bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tierkv.control_plane.spilling import pages_needed  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402

PAGE = 8
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "drafts": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


def spec_of(model: Any) -> Any:
    return tierkv.CacheSpec.from_config(model.config, dtype="float32", page_tokens=PAGE)


def slots_for(model: Any, *lengths: int) -> int:
    """Return the slots that sequences of so many tokens take."""
    return sum(sum(pages_needed(spec_of(model), length)) for length in lengths)


def attach(model: Any, slots: int) -> TierKV:
    slot = spec_of(model).slot_bytes
    return TierKV.attach(
        model, device=slots * slot, host=600 * slot, page_tokens=PAGE, self_check=False
    )


def outputs(model: Any, slots: int, turns: list[Any], **options: Any) -> tuple[list[Any], int]:
    """Return what is generated in each of the turns, and the bytes of spilled pages streamed."""
    with attach(model, slots) as kv:
        told = []
        for turn in turns:
            torch.manual_seed(5)
            told.append(
                kv.generate(
                    turn,
                    max_new_tokens=8,
                    output_logits=True,
                    return_dict_in_generate=True,
                    **options,
                )
            )
            kv.check()
        return told, kv.stats().counters["streamed_bytes"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_one_sequence(family: str, way: str, tiny: Any) -> None:
    model = deep(tiny, family)
    ids = torch.randint(3, 90, (1, 240), generator=torch.Generator().manual_seed(1))
    turns = [ids, torch.cat([ids, ids[:, :9]], 1)]
    small = slots_for(model, 250) * 7 // 10
    large, none = outputs(model, 600, turns, **WAYS[way])
    spilled, some = outputs(model, small, turns, **WAYS[way])
    assert none == 0
    assert some > 0, "the pool was large enough"
    compare(large, spilled)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_batch_whose_sum_does_not_fit(family: str, tiny: Any) -> None:
    model = deep(tiny, family)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (100, 40, 77)]
    turns = [rows, [row + [7, 8, 9] for row in rows]]
    small = slots_for(model, 111, 51, 88) * 7 // 10
    large, none = outputs(model, 600, turns, do_sample=False)
    spilled, some = outputs(model, small, turns, do_sample=False)
    assert none == 0
    assert some > 0, "the pool was large enough"
    compare(large, spilled)


def test_beams_need_a_pool_that_holds_their_prompt(tiny: Any) -> None:
    """Each beam streams through buffers of its own, for which sharing the prompt leaves no room."""
    model = deep(tiny, "llama")
    ids = torch.randint(3, 90, (1, 240))
    with attach(model, slots_for(model, 250) * 7 // 10) as kv:
        with pytest.raises(tierkv.SequenceTooLongError, match="3 beams or samples of 240"):
            kv.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
        kv.check()
        assert kv.stats().tiers["device"].used_bytes == 0, "something was computed"
        kv.generate(ids, max_new_tokens=8, do_sample=False)


def test_what_cannot_fit_is_refused_before_anything_is_computed(tiny: Any) -> None:
    model = deep(tiny, "llama")
    slot = spec_of(model).slot_bytes
    budgets = {"device": 6 * slot, "host": 8 * slot}
    with (
        TierKV.attach(model, page_tokens=PAGE, self_check=False, **budgets) as kv,
        pytest.raises(tierkv.SequenceTooLongError, match="tokens in all"),
    ):
        kv.generate(torch.randint(3, 90, (1, 200)), max_new_tokens=8)


def deep(tiny: Any, family: str) -> Any:
    """Return a model with layers enough that a slot of the ring serves several pages."""
    kinds = {"layer_types": ["sliding_attention"] + ["full_attention"] * 11}
    return tiny(family, num_hidden_layers=12, **({} if family == "llama" else kinds))


def compare(right: list[Any], told: list[Any]) -> None:
    for a, b in zip(right, told, strict=True):
        assert torch.equal(a.sequences, b.sequences)
        assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
