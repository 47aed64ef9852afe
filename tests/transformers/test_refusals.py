"""What would give wrong tokens is refused before the first one, and says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.errors import (  # noqa: E402
    InvalidInputError,
    NamespaceMismatchError,
    SequenceTooLongError,
    SpecError,
    StoreClosedError,
    UnsupportedError,
)
from tierkv.integrations.transformers import TierKV  # noqa: E402

GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def model(tiny: Any) -> Any:
    return tiny("gemma3_text")


@pytest.fixture
def kv(model: Any) -> Iterator[TierKV]:
    with TierKV.attach(model, device="1MiB", host="256KiB", page_tokens=4) as attached:
        yield attached
        attached.check()


@pytest.fixture
def row(steps: Any) -> Any:
    return steps.row(steps.ids(10))


def computed(cache: Any) -> int:
    """Return the tokens computed so far, which a refusal must leave at none."""
    return cache.get_seq_length() - cache.found.total


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "2 sequences were fed to a cache of 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "copies=n"),
        ({"use_cache": False}, "continuation|attention mask is 11 long"),
    ],
)
def test_ways_of_generating_that_the_cache_was_not_begun_for(
    kv: TierKV, model: Any, row: Any, options: dict[str, Any], says: str
) -> None:
    with kv.cache(row) as cache:
        pass  # committed empty: nothing was fed
    cache = kv.cache(row)
    with pytest.raises((UnsupportedError, InvalidInputError), match=says):
        model.generate(row, past_key_values=cache, **{**GREEDY, **options})
    cache.abandon()


def test_tokens_taken_back_without_notice(kv: TierKV, model: Any, steps: Any) -> None:
    """Where windows are gone; layers that keep every page can go back at any time."""
    ids = steps.ids(60)
    with kv.cache(ids) as cache:
        for start in range(0, 60, 10):
            steps.feed(model, cache, ids[start : start + 10])
        with pytest.raises(UnsupportedError, match="activate_past_recording"):
            cache.crop(-30)
        assert cache.get_seq_length() == 60
        cache.abandon()


def test_padding(kv: TierKV, model: Any, row: Any) -> None:
    mask = torch.ones_like(row)
    mask[0, :2] = 0
    with kv.cache(row) as cache:
        with pytest.raises(UnsupportedError, match="left-padded mask"):
            model.generate(row, attention_mask=mask, past_key_values=cache, **GREEDY)
        with pytest.raises(UnsupportedError, match="left-padded mask"):
            model(row, attention_mask=mask, past_key_values=cache)
        assert computed(cache) == 0


@pytest.mark.parametrize("zeros", [[7], [8, 9], list(range(10))])
def test_padding_that_is_not_on_the_left(kv: TierKV, row: Any, zeros: list[int]) -> None:
    mask = torch.ones_like(row)
    mask[0, zeros] = 0
    with pytest.raises(UnsupportedError, match="padding_side"):
        kv.cache(row, attention_mask=mask)
    with pytest.raises(UnsupportedError, match="padding_side"):
        kv.generate(row, attention_mask=mask, **GREEDY)
    with pytest.raises(InvalidInputError, match=r"shape \[1, 10\]"):
        kv.cache(row, attention_mask=mask[:, 1:])


def test_a_batch_whose_mask_was_forgotten(kv: TierKV, model: Any, row: Any) -> None:
    ids = row.repeat(2, 1)
    for columns in (slice(0, 3), slice(7, 10)):
        padded = ids.clone()
        padded[0, columns] = model.generation_config.pad_token_id
        with pytest.raises(InvalidInputError, match="no attention_mask"):
            kv.generate(padded, **GREEDY)


def test_a_padded_batch_without_positions(kv: TierKV, model: Any, row: Any) -> None:
    ids, mask = row.repeat(2, 1), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    with kv.cache(ids, attention_mask=mask) as cache:
        rest = ids[:, cache.get_seq_length() :]
        before = cache.get_seq_length()
        with pytest.raises(UnsupportedError, match="cumsum"):
            model(rest, attention_mask=mask, past_key_values=cache)
        with pytest.raises(UnsupportedError, match="left-padded mask"):
            model(rest, past_key_values=cache)
        with pytest.raises(UnsupportedError, match="left-padded mask"):
            model(rest, attention_mask=torch.ones_like(mask), past_key_values=cache)
        assert cache.get_seq_length() == before


def test_more_tokens_than_the_model_has_positions_for(kv: TierKV, steps: Any) -> None:
    for use in (
        lambda: kv.cache(steps.ids(513)),
        lambda: kv.cache(steps.ids(500), max_new_tokens=13),
        lambda: kv.generate(steps.ids(510), max_new_tokens=3),
    ):
        with pytest.raises(InvalidInputError, match="max_position_embeddings"):
            use()


def test_a_mask_that_generate_infers_from_pad_tokens(kv: TierKV, model: Any, row: Any) -> None:
    model.generation_config.pad_token_id = int(row[0, 0])
    with kv.cache(row) as cache:
        with pytest.raises(UnsupportedError, match="equal to the pad token"):
            model.generate(row, past_key_values=cache, **GREEDY)
        assert computed(cache) == 0
    assert kv.generate(row, **GREEDY).shape == (1, 14)  # passes its own mask of ones


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (lambda row: {"attention_mask": torch.ones(1, 3)}, InvalidInputError, "3 long.*10"),
        (lambda row: {"attention_mask": torch.ones(1, 1, 10, 10)}, UnsupportedError, "2-D row"),
        (lambda row: {"attention_mask": {}}, UnsupportedError, "2-D row"),
        (lambda row: {"position_ids": torch.arange(5, 15)[None]}, UnsupportedError, "from 0 on"),
        (lambda row: {"position_ids": torch.arange(9)[None]}, UnsupportedError, "from 0 on"),
        (lambda row: {"pixel_values": torch.ones(1)}, UnsupportedError, "pixel_values"),
        (lambda row: {"token_type_ids": torch.ones_like(row)}, UnsupportedError, "token_type"),
    ],
)
def test_arguments_of_forward(
    kv: TierKV, model: Any, row: Any, given: Any, error: type[Exception], says: str
) -> None:
    with kv.cache(row) as cache:
        with pytest.raises(error, match=says):
            model(row, past_key_values=cache, **given(row))
        assert computed(cache) == 0


def test_arguments_that_say_nothing_are_accepted(kv: TierKV, model: Any, row: Any) -> None:
    harmless = {
        "attention_mask": torch.ones_like(row),
        "position_ids": torch.arange(10)[None],
        "token_type_ids": torch.zeros_like(row),
        "logits_to_keep": 1,
        "output_hidden_states": True,
    }
    with kv.cache(row) as cache, torch.no_grad():
        model(row, past_key_values=cache, **harmless)
        assert computed(cache) == 10


def test_embeddings(kv: TierKV, model: Any, row: Any) -> None:
    embeds = model.get_input_embeddings()(row).detach()
    with kv.cache(row) as cache:
        with pytest.raises(UnsupportedError, match="inputs_embeds"):
            model(inputs_embeds=embeds, past_key_values=cache)
        with pytest.raises(UnsupportedError, match="inputs_embeds"):
            model.generate(inputs_embeds=embeds, past_key_values=cache, **GREEDY)
        assert computed(cache) == 0


def test_another_number_of_rows(kv: TierKV, model: Any, row: Any) -> None:
    with kv.cache(row) as cache:
        with pytest.raises(UnsupportedError, match="2 sequences were fed to a cache of 1"):
            model(row.repeat(2, 1), past_key_values=cache)
        for layer in cache.layers:
            for change in (
                lambda layer=layer: layer.batch_repeat_interleave(2),
                lambda layer=layer: layer.batch_select_indices(torch.tensor([0])),
                lambda layer=layer: layer.reorder_cache(torch.tensor([0])),
                lambda layer=layer: layer.crop(-1),
            ):
                with pytest.raises(UnsupportedError, match="on the cache itself"):
                    change()
        for indices in ([1], [-1], []):
            with pytest.raises(InvalidInputError, match="cache of 1 rows"):
                cache.batch_select_indices(torch.tensor(indices))
        assert computed(cache) == 0


def test_ids_that_the_cache_was_not_begun_with(kv: TierKV, model: Any, row: Any) -> None:
    row = kv.generate(row, **GREEDY)  # the last token was sampled, not fed
    other = row.clone()
    other[0, 3] += 1
    with kv.cache(row) as cache:
        assert cache.found.total == row.shape[1] - 1
        # Only the end reaches the model, and it is the same: the whole is compared.
        with pytest.raises(InvalidInputError, match="token 3 of the ids fed"):
            model.generate(other, past_key_values=cache, **GREEDY)
        with pytest.raises(InvalidInputError, match=f"token {cache.found.total} of the ids"):
            model(row[:, cache.found.total :] + 1, past_key_values=cache)
        assert computed(cache) == 0


def test_ids_that_are_not_longer_than_what_is_held(kv: TierKV, model: Any, row: Any) -> None:
    row = kv.generate(row, **GREEDY)
    with kv.cache(row) as cache:
        with pytest.raises(InvalidInputError, match="at least one new token"):
            model.generate(row[:, : cache.found.total], past_key_values=cache, **GREEDY)
        assert computed(cache) == 0


def test_another_model_is_not_recorded(kv: TierKV, row: Any, tiny: Any) -> None:
    other = tiny("gemma3_text", seed=1)
    with kv.cache(row) as cache:
        with pytest.raises(InvalidInputError, match="call the attached model"):
            other(row, past_key_values=cache)
        with TierKV.attach(other, device="1MiB", page_tokens=4) as second:
            with pytest.raises(InvalidInputError, match="call the attached model"):
                other(row, past_key_values=cache)
            assert second.generate(row, **GREEDY).shape == (1, 14)
        assert computed(cache) == 0


def test_a_part_of_the_model_is_not_recorded(kv: TierKV, model: Any, row: Any) -> None:
    with kv.cache(row) as cache, pytest.raises(InvalidInputError, match="call the attached model"):
        model.model(row, past_key_values=cache)


def test_training_mode(kv: TierKV, model: Any, row: Any) -> None:
    with kv.cache(row) as cache:
        model.train()
        with pytest.raises(UnsupportedError, match=r"model\.eval"):
            model(row, past_key_values=cache)
        model.eval()
        assert computed(cache) == 0


def test_copies(kv: TierKV, row: Any) -> None:
    with kv.cache(row) as cache:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="pages are shared"):
                attempt(cache)
        with pytest.raises(UnsupportedError, match="begin a new one"):
            cache.reset()


def test_a_spent_cache(kv: TierKV, model: Any, row: Any) -> None:
    with kv.cache(row) as cache, torch.no_grad():
        model(row, past_key_values=cache)
    for use in (cache.commit, lambda: model(row, past_key_values=cache)):
        with pytest.raises(InvalidInputError, match="committed or abandoned"):
            use()
    cache.abandon()  # harmless


def test_a_forward_that_died_inside_the_model(kv: TierKV, model: Any, row: Any) -> None:
    def explode(*args: Any) -> None:
        raise RuntimeError("out of memory")

    cache = kv.cache(row)
    hook = model.model.layers[1].mlp.register_forward_pre_hook(explode)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        model(row, past_key_values=cache)
    hook.remove()
    with pytest.raises(InvalidInputError, match="ended inside the model"):
        model(row, past_key_values=cache)
    with pytest.raises(InvalidInputError, match="ended inside the model"):
        cache.commit()
    cache.abandon()
    kv.check()
    assert kv.cache(row).found.total == 0


def test_an_exception_abandons(kv: TierKV, model: Any, row: Any) -> None:
    def interrupted() -> None:
        with kv.cache(row) as cache, torch.no_grad():
            model(row, past_key_values=cache)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with kv.cache(row) as cache:
        assert cache.found.total == 0


def test_a_dropped_cache_is_released(kv: TierKV, row: Any) -> None:
    sequence = kv.cache(row).sequence  # the cache itself is gone at once
    with kv.cache(row):
        assert sequence.ended


def test_a_sequence_longer_than_the_pool(tiny: Any, steps: Any) -> None:
    model = tiny("gemma3_text", max_position_embeddings=10**6)
    with TierKV.attach(model, device="1MiB", page_tokens=4) as kv:
        for use in (
            lambda: kv.cache(steps.ids(10), max_new_tokens=100_000),
            lambda: kv.generate(steps.ids(10), max_new_tokens=100_000),
        ):
            with pytest.raises(SequenceTooLongError, match=r"\d+ .*page"):
                use()
        with kv.cache(steps.ids(10)) as cache:
            with pytest.raises(SequenceTooLongError):
                model(steps.row(steps.ids(10) + steps.ids(30_000)), past_key_values=cache)
            assert computed(cache) == 0
        kv.check()


def test_changed_weights(kv: TierKV, model: Any, row: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    with pytest.raises(InvalidInputError, match="weights were changed"):
        kv.cache(row)


def test_after_closing(model: Any, row: Any) -> None:
    before = dict(model.__dict__)
    kv = TierKV.attach(model, device="1MiB", page_tokens=4)
    cache = kv.cache(row)
    kv.close()
    kv.close()
    with pytest.raises(StoreClosedError, match="closed"):
        kv.cache(row)
    with pytest.raises((InvalidInputError, StoreClosedError)):
        model(row, past_key_values=cache)
    assert model.__dict__.keys() == before.keys(), "something was left on the model"
    assert not model._forward_pre_hooks


def test_a_store_of_another_model(tiny: Any) -> None:
    with TierKV.attach(tiny("llama"), device="1MiB", page_tokens=4) as kv:
        for other in (tiny("llama", seed=1), tiny("gemma3_text")):
            with pytest.raises(NamespaceMismatchError, match="not of this model"):
                TierKV.attach(other, store=kv.store, page_tokens=4)
        with TierKV.attach(tiny("llama"), store=kv.store, page_tokens=4) as second:
            assert second.store is kv.store
        kv.check()  # still open: the second did not own it


def test_unknown_architectures(tiny: Any) -> None:
    model = tiny("llama")
    model.config.model_type = "somethingelse"
    with pytest.raises(SpecError, match=r"somethingelse.*CacheSpec\(groups"):
        TierKV.attach(model)


class FakeTuner(torch.nn.Module):
    """Stands for a layer that PEFT wrapped."""

    __module__ = "peft.tuners.lora.layer"
    disable_adapters = False
    merged = False
    active_adapters = ("mine",)


def test_adapters(model: Any, row: Any) -> None:
    model.model.layers[0].tuner = tuner = FakeTuner()
    with pytest.raises(UnsupportedError, match="adapter="):
        TierKV.attach(model)
    with TierKV.attach(model, adapter="mine:1", device="1MiB", page_tokens=4) as kv:
        kv.generate(row, **GREEDY)
        tuner.disable_adapters = True
        with pytest.raises(InvalidInputError, match="adapters changed"):
            kv.cache(row)
    TierKV.attach(model, device="1MiB", page_tokens=4).close()


def test_prompt_learning(model: Any) -> None:
    class Config:
        is_prompt_learning = True

    model.peft_config = {"default": Config()}
    with pytest.raises(UnsupportedError, match="prefix tuning"):
        TierKV.attach(model)


def test_several_devices(model: Any) -> None:
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(UnsupportedError, match="one device"):
        TierKV.attach(model)
