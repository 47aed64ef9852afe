"""Attention over pages in place: what a stock cache computes, in every way of generating."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tierkv.errors import InvalidInputError, UnsupportedError  # noqa: E402
from tierkv.identity.model_config import SUPPORTED_MODEL_TYPES  # noqa: E402
from tierkv.integrations.transformers import TierKV, attention, layers  # noqa: E402
from tierkv.integrations.transformers.attention_in_place import attend_in_place  # noqa: E402
from tierkv.integrations.transformers.versions import cache_keyword  # noqa: E402

NEW = 9
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
CLOSE = 1e-5  # of logits up to 5: about ten times what was measured
WINDOW, PAGE = 8, 4
FULL = ["full_attention"]


@pytest.fixture
def paged(tiny: Any) -> Callable[..., Any]:
    """Return a maker of tiny models that attend to pages, and their stock attention."""

    def make(family: str, **given: Any) -> tuple[Any, str]:
        model = tiny(family, **given)
        stock = model.config._attn_implementation
        if getattr(model.config, "attn_logit_softcapping", None) is not None:
            stock = "eager"  # older releases leave the soft cap out of sdpa
        model.set_attn_implementation("tierkv")
        return model, stock

    return make


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one for each row that attends in place."""
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        attend_in_place(*args, **kwargs)

    monkeypatch.setattr(attention, "attend_in_place", counting)
    return calls


def padded(rows: list[list[int]], pad: int = 0) -> tuple[Any, Any]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def generated(model: Any, implementation: str, *args: Any, **options: Any) -> Any:
    """Return what a model generates with another attention implementation."""
    now = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    output = model.generate(*args, **options)
    model.set_attn_implementation(now)
    return output


def test_the_name_is_known_once_and_again() -> None:
    for _ in range(2):
        tierkv.register_attention()
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    assert functions["tierkv"] is attention.tierkv_attention
    assert masks["tierkv"] is masks["sdpa"]


@pytest.mark.parametrize("family", sorted(SUPPORTED_MODEL_TYPES))
def test_every_family_decodes_close_to_stock(
    family: str, paged: Any, steps: Any, in_place: list[int]
) -> None:
    """Across pages and windows; with a stock cache, and in prefill, to the bit."""
    model, stock = paged(family)
    row = steps.row(steps.ids(13))
    told = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    told["do_sample"] = False
    expected = generated(model, stock, row, **told)
    same = model.generate(row, **told)
    assert not in_place, "a stock cache has no pages"
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE) as kv:
        in_place.clear()  # of the check at attach
        output = kv.generate(row, **told)
        assert len(in_place) == 19 * model.config.num_hidden_layers
        kv.check()
    assert torch.equal(output.sequences, expected.sequences)
    for number, (left, mine, right) in enumerate(
        zip(same.scores, output.scores, expected.scores, strict=True)
    ):
        assert torch.equal(left, right)
        assert torch.equal(mine, right) if not number else (mine - right).abs().max() < CLOSE


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_bfloat16_on_a_cpu_is_gathered_and_stays_exact(
    family: str, paged: Any, steps: Any, in_place: list[int]
) -> None:
    model, stock = paged(family, dtype=torch.bfloat16)
    row = steps.row(steps.ids(13))
    expected = generated(model, stock, row, **GREEDY)
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE) as kv:
        assert torch.equal(kv.generate(row, **GREEDY), expected)
    assert not in_place


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "drafts": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20},
    "pieces": {"prefill_chunk_size": 5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "phi3"])
def test_ways_of_generating_cold_and_warm(family: str, way: str, paged: Any, steps: Any) -> None:
    model, stock = paged(family)
    options = {**GREEDY, **WAYS[way]}
    row = steps.row(steps.ids(6) * 3 + steps.ids(3))
    torch.manual_seed(5)
    expected = generated(model, stock, row, **options)
    with TierKV.attach(model, device="8MiB", host="1MiB", page_tokens=PAGE) as kv:
        for _ in range(2):
            torch.manual_seed(5)
            assert torch.equal(kv.generate(row, **options), expected)
            kv.check()
        assistant = tierkv_free_copy(model, stock)
        if way == "drafts":
            plain = generated(model, stock, row, max_new_tokens=20, do_sample=False)
            output = kv.generate(row, max_new_tokens=20, do_sample=False, assistant_model=assistant)
            assert torch.equal(output, plain)


def tierkv_free_copy(model: Any, implementation: str) -> Any:
    """Return a model of the same kind and other weights, with stock attention."""
    other = type(model)(type(model.config)(**model.config.to_dict())).eval()
    other.generation_config = model.generation_config
    other.set_attn_implementation(implementation)
    return other


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "mistral"])
def test_a_padded_batch_over_turns(family: str, paged: Any, steps: Any) -> None:
    model, stock = paged(family)
    talks = [steps.ids(n, seed=10 + n) for n in (13, 21, 6)]
    with TierKV.attach(model, device="8MiB", host="1MiB", page_tokens=PAGE) as kv:
        for turn in range(3):
            ids, mask = padded(talks)
            expected = generated(model, stock, ids, attention_mask=mask, **GREEDY)
            assert torch.equal(kv.generate(ids, attention_mask=mask, **GREEDY), expected)
            kv.check()
            talks = [
                said[ids.shape[1] - len(talk) :].tolist() + steps.ids(2 + 3 * n, seed=turn)
                for n, (talk, said) in enumerate(zip(talks, expected, strict=True))
            ]


def test_a_resumed_sequence_equals_one_kept_in_pages(paged: Any, steps: Any, tmp_path: Any) -> None:
    """Decoding from disk and decoding on: the same bits, wherever the pages lie."""
    model, _ = paged("gemma3_text")
    ids = steps.ids(40)
    options = {"disk": "16MiB", "page_tokens": PAGE, "self_check": False}
    with TierKV.attach(model, tmp_path, device="4MiB", host="1MiB", **options) as kv:
        with kv.cache(ids[:30]) as cache:
            steps.feed(model, cache, ids[:30])
        with kv.cache(ids) as cache:
            kept = [steps.feed(model, cache, [token]) for token in ids[30:]]
            cache.abandon()
    with TierKV.attach(model, tmp_path, device="4MiB", host="1MiB", **options) as kv:
        with kv.cache(ids) as cache:
            assert cache.found.disk == 30
            again = [steps.feed(model, cache, [token]) for token in ids[30:]]
        kv.check()
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("torch_device", ["cpu", "sim"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_sequence_longer_than_the_device_pool(
    family: str, torch_device: str, paged: Any, steps: Any
) -> None:
    """The same bits as in a pool large enough, with the orders checked on the simulated device."""
    kinds = {} if family == "llama" else {"layer_types": ["sliding_attention"] + FULL * 5}
    model, _ = paged(family, num_hidden_layers=6, **kinds)
    ids, told = steps.ids(90), []
    small = 18 if family == "llama" else 26
    for slots in (200, small):
        spec = tierkv.CacheSpec.from_config(model.config, dtype="float32", page_tokens=PAGE)
        store = tierkv.open_store(
            model,
            device=slots * spec.slot_bytes,
            host="2MiB",
            page_tokens=PAGE,
            torch_device=torch_device,
        )
        with store, TierKV.attach(model, store=store, self_check=False) as kv:
            with kv.cache(ids, 10) as cache:
                parts = [ids[:70], *([token] for token in ids[70:])]
                told.append([steps.feed(model, cache, part) for part in parts])
                spilled = cache.sequence.spilled_pages
                cache.abandon()
            kv.check()
            assert (spilled > 0) == (slots == small)
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


@pytest.fixture
def attached(paged: Any) -> Iterator[TierKV]:
    model, _ = paged("llama")
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE, self_check=False) as kv:
        yield kv
        kv.check()
        assert kv.stats().tiers["device"].held == 0


def losing_keys(model: Any) -> None:
    """Make the model copy what its cache returns, as one that cuts or repeats keys does."""
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(copying_cache(number), with_kwargs=True)


def copying_cache(number: int) -> Any:
    class Copying:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def update(self, *args: Any, **kwargs: Any) -> Any:
            keys, values = self.cache.update(*args, **kwargs)
            return keys.clone(), values

        def __getattr__(self, name: str) -> Any:
            return getattr(self.cache, name)

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        changed = {
            name: Copying(value) if isinstance(value, transformers.Cache) else value
            for name, value in kwargs.items()
        }
        return args, changed

    return hook


def test_keys_that_lost_their_pages_are_noticed(attached: TierKV, steps: Any) -> None:
    model, ids = attached.model, steps.ids(12)
    losing_keys(model)
    with pytest.raises(UnsupportedError, match=r"layer 0.*did not ask"):
        attached.generate(ids, **GREEDY)
    with pytest.raises(UnsupportedError, match=r"resuming a short sequence failed.*did not ask"):
        TierKV.attach(model)
    model.set_attn_implementation("sdpa")
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE) as kv:
        kv.generate(ids, **GREEDY)


def test_the_last_layer_that_lost_its_pages_is_noticed(attached: TierKV, steps: Any) -> None:
    model, ids = attached.model, steps.ids(12)
    last = model.model.layers[-1].self_attn
    last.register_forward_pre_hook(copying_cache(2), with_kwargs=True)
    cache = attached.cache(ids)
    steps.feed(model, cache, ids[:11])
    steps.feed(model, cache, ids[11:])
    for use in (cache.commit, lambda: steps.feed(model, cache, [5]), lambda: cache.crop(-1)):
        with pytest.raises(UnsupportedError, match="layer 2"):
            use()
    cache.abandon()


def test_keys_used_twice_and_arguments_that_change_attention(
    attached: TierKV, steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = attached.model, steps.ids(6)
    name, kept = cache_keyword(model), []
    update = layers.PagedLayer.update

    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(update(self, *args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(layers.PagedLayer, "update", keeping)
    module = model.model.layers[0].self_attn
    cache = attached.cache(ids)
    steps.feed(model, cache, ids[:5])
    steps.feed(model, cache, ids[5:])
    query = torch.zeros(1, 4, 1, 16)
    with pytest.raises(UnsupportedError, match="second time"):
        attention.tierkv_attention(module, query, *kept[-1], None)
    cache.batch.settle()
    cache.batch.begin([torch.tensor([1]).numpy()], in_place=True)
    keys, values = cache.layers[0].update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    with pytest.raises(UnsupportedError, match="position_bias"):
        attention.tierkv_attention(module, query, keys, values, None, position_bias=query)
    with pytest.raises(InvalidInputError, match="ended inside"):
        cache.commit()
    cache.abandon()
    cache = attached.cache(ids)
    with pytest.raises(UnsupportedError, match="weights"):
        model(steps.row(ids), **{name: cache}, output_attentions=True)
    cache.abandon()


def test_gradients_gather(attached: TierKV, steps: Any, in_place: list[int]) -> None:
    model, ids = attached.model, steps.ids(6)
    with attached.cache(ids) as cache:
        given = {cache_keyword(model): cache}
        model(steps.row(ids[:5]), **given)
        logits = model(steps.row(ids[5:]), **given).logits
    logits.sum().backward()
    assert not in_place
    assert model.lm_head.weight.grad is not None


def test_another_attention_than_at_attach_is_refused(attached: TierKV, steps: Any) -> None:
    attached.model.set_attn_implementation("eager")
    with pytest.raises(InvalidInputError, match=r"'eager'.*'tierkv'"):
        attached.generate(steps.ids(5), **GREEDY)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_without_tokens_may_hold_anything(family: str, paged: Any, steps: Any) -> None:
    model, stock = paged(family)
    row = steps.row(steps.ids(13))
    expected = generated(model, stock, row, **GREEDY)
    with TierKV.attach(model, device="4MiB", page_tokens=PAGE, self_check=False) as kv:
        kv.store._core.pool.memory.fill_(0xFF)  # not a number, in any type
        assert torch.equal(kv.generate(row, **GREEDY), expected)


def test_a_step_copies_no_history(attached: TierKV, steps: Any) -> None:
    """What a step allocates does not grow with what is held, but for scores."""
    model, taken = attached.model, []
    for length in (60, 300):
        ids = steps.ids(length)
        with attached.cache(ids) as cache:
            steps.feed(model, cache, ids[:-1])
            with torch.profiler.profile(profile_memory=True) as profile:
                steps.feed(model, cache, ids[-1:])
            taken.append(sum(max(0, e.self_cpu_memory_usage) for e in profile.events()))
            cache.abandon()
    gathered = 240 * 3 * 2 * 2 * 16 * 4  # of K and V, more in the longer one
    assert taken[1] - taken[0] < gathered / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_give_the_tokens_of_stock_attention(
    name: str, real_model: Any, steps: Any
) -> None:
    """In float32, across pages and Gemma's window of 512; logits within 2e-3 (up to 30)."""
    model, tokenizer = real_model(name, "float32")
    import pydoc_data.topics

    lengths = {"smollm2": [5, 150], "gemma3": [509]}[name]
    ids = tokenizer.encode(pydoc_data.topics.topics["compound"][:4000], verbose=False)
    told = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    pages: Any = {"smollm2": 16, "gemma3": {"full": 80, "sliding": 16}}[name]
    model.set_attn_implementation("tierkv")
    try:
        with TierKV.attach(model, device="128MiB", page_tokens=pages) as kv:
            for length in lengths:
                row = steps.row(ids[:length])
                expected = generated(model, "sdpa", row, **told)
                for _ in range(2):
                    output = kv.generate(row, **told)
                    assert torch.equal(output.sequences, expected.sequences)
                    for mine, right in zip(output.scores, expected.scores, strict=True):
                        assert (mine - right).abs().max() < 2e-3
            kv.check()
            rows = [ids[:20], ids[100:133]]
            batch, mask = padded(rows, model.generation_config.pad_token_id)
            expected = generated(model, "sdpa", batch, attention_mask=mask, **GREEDY)
            assert torch.equal(kv.generate(batch, attention_mask=mask, **GREEDY), expected)
    finally:
        model.set_attn_implementation("sdpa")
