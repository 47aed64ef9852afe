"""Batches, beams, returned sequences, assisted generation: the tokens of a stock cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tierkv.integrations.transformers import TierKV  # noqa: E402
from tierkv.integrations.transformers.versions import cache_keyword  # noqa: E402

NEW = 9
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
LENGTHS = [13, 21, 6]


# The last one overrides the call that prepares a forward.
@pytest.fixture(params=["llama", "gemma3_text", "gpt_oss", "phi3"])
def model(request: pytest.FixtureRequest, tiny: Any) -> Any:
    return tiny(request.param)


@pytest.fixture
def kv(model: Any) -> Iterator[TierKV]:
    with TierKV.attach(model, device="8MiB", host="1MiB", page_tokens=4) as attached:
        yield attached
        attached.check()


def padded(rows: list[list[int]]) -> tuple[Any, Any]:
    """Return left-padded ids and their mask."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.fixture
def rows(steps: Any) -> list[list[int]]:
    return [steps.ids(length, seed=10 + n) for n, length in enumerate(LENGTHS)]


def test_a_left_padded_batch_cold_and_warm(kv: TierKV, model: Any, rows: Any, steps: Any) -> None:
    ids, mask = padded(rows)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    for attempt in range(3):
        output = kv.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(output, expected), f"attempt {attempt}"
        kv.check()
    for row, said in zip(rows, expected, strict=True):
        talk = said[len(ids[0]) - len(row) :].tolist() + steps.ids(3, seed=77)
        with kv.cache(talk) as cache:
            assert cache.found.total == len(row) + NEW - 1


def test_rows_as_lists_of_different_lengths(kv: TierKV, model: Any, rows: Any) -> None:
    ids, mask = padded(rows)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(kv.generate(rows, **GREEDY), expected)


def test_a_batch_of_conversations_over_several_turns(
    kv: TierKV, model: Any, rows: Any, steps: Any
) -> None:
    """Each turn adds another number of tokens to each row, so paddings shift."""
    talks = [list(row) for row in rows]
    for turn in range(3):
        ids, mask = padded(talks)
        expected = model.generate(ids, attention_mask=mask, **GREEDY)
        found = 0
        with kv.cache(ids, NEW, attention_mask=mask) as cache:
            found = cache.found.total
            output = model.generate(
                ids, attention_mask=mask, **{cache_keyword(model): cache}, **GREEDY
            )
        assert torch.equal(output, expected)
        assert (found > 0) == (turn > 0)
        talks = [
            said[ids.shape[1] - len(talk) :].tolist() + steps.ids(2 + 3 * n + turn, seed=turn)
            for n, (talk, said) in enumerate(zip(talks, output, strict=True))
        ]
        kv.check()


def test_rows_that_end_early_are_kept_up_to_their_end(
    kv: TierKV, model: Any, rows: Any, steps: Any
) -> None:
    ids, mask = padded(rows)
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    width = ids.shape[1]
    end = int(plain[0, width + 2])  # ends the first row at its third token
    expected = model.generate(ids, attention_mask=mask, **GREEDY, eos_token_id=end)
    output = kv.generate(ids, attention_mask=mask, **GREEDY, eos_token_id=end)
    assert torch.equal(output, expected)
    kv.check()
    for row, said in zip(rows, expected[:, width:].tolist(), strict=True):
        length = said.index(end) + 1 if end in said else NEW
        fed = min(length, expected.shape[1] - width - 1)  # the last one sampled is never fed
        with kv.cache([*row, *said[:length], 1, 2]) as cache:
            assert cache.found.total >= len(row) + fed


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2}, {"early_stopping": True}])
def test_beam_search(kv: TierKV, model: Any, steps: Any, options: dict[str, Any]) -> None:
    row = steps.row(steps.ids(18))
    beams = {**GREEDY, "num_beams": 3, **options}
    expected = model.generate(row, **beams)
    for _ in range(2):
        assert torch.equal(kv.generate(row, **beams), expected)
        kv.check()
    best = expected[0].tolist()
    with kv.cache([*best, 1, 2]) as cache:
        assert cache.found.total >= row.shape[1] + NEW - 3, "the best beam was kept"
    output = kv.generate(row, **beams, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, expected)


def test_beams_that_lost_leave_nothing(kv: TierKV, model: Any, steps: Any) -> None:
    row = steps.row(steps.ids(16))
    expected = model.generate(row, **GREEDY, num_beams=4)
    kv.generate(row, **GREEDY, num_beams=4)
    stats = kv.stats()
    spec = kv.store.spec
    # What one sequence of that length leaves, boundaries of sliding layers included.
    with TierKV.attach(model, device="8MiB", host="1MiB", page_tokens=4) as other:
        with other.cache(expected) as cache:
            steps.feed(model, cache, expected[:, :-1])
        assert stats.tiers["device"].pages <= other.stats().tiers["device"].pages + len(spec.groups)
    assert stats.tiers["device"].held == 0


def test_beam_search_over_a_padded_batch(kv: TierKV, model: Any, rows: Any) -> None:
    ids, mask = padded(rows)
    beams = {**GREEDY, "num_beams": 2}
    expected = model.generate(ids, attention_mask=mask, **beams)
    for _ in range(2):
        assert torch.equal(kv.generate(ids, attention_mask=mask, **beams), expected)
        kv.check()


def test_several_returned_samples(kv: TierKV, model: Any, steps: Any) -> None:
    row = steps.row(steps.ids(14))
    options = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    expected = model.generate(row, **options)
    for _ in range(2):
        torch.manual_seed(5)
        assert torch.equal(kv.generate(row, **options), expected)
        kv.check()
    for said in expected.tolist():
        with kv.cache([*said, 1]) as cache:
            assert cache.found.total == len(said) - 1


def test_beams_on_a_cache_that_is_repeated_by_hand(kv: TierKV, model: Any, steps: Any) -> None:
    row = steps.row(steps.ids(18))
    beams = {**GREEDY, "num_beams": 3}
    expected = model.generate(row, **beams)
    with kv.cache(row) as cache:
        steps.feed(model, cache, row[:, cache.found.total : -1])
        cache.batch_repeat_interleave(3)
        output = model.generate(row, **{cache_keyword(model): cache}, **beams)
        cache.commit(output)
    assert torch.equal(output, expected)


def repetitive(steps: Any) -> Any:
    """Return a prompt in which prompt lookup finds something to draft."""
    return steps.row(steps.ids(6) * 4 + steps.ids(3))


@pytest.mark.parametrize("drafted", [1, 3, 10])
def test_prompt_lookup(kv: TierKV, model: Any, steps: Any, drafted: int) -> None:
    """Rejected tokens are taken back across pages, tails and windows."""
    row = repetitive(steps)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(row, **options)
    options["prompt_lookup_num_tokens"] = drafted
    expected = model.generate(row, **options)  # some releases go on beyond max_new_tokens
    assert torch.equal(expected[:, : plain.shape[1]], plain)
    for _ in range(3):
        assert torch.equal(kv.generate(row, **options), expected)
        kv.check()
    with kv.cache(expected) as cache:
        assert cache.found.total >= expected.shape[1] - 2


def test_an_assistant_model(kv: TierKV, model: Any, steps: Any, tiny: Any) -> None:
    assistant = tiny(model.config.model_type, seed=1)
    row = repetitive(steps)
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(row, **options)
    for _ in range(2):
        assert torch.equal(kv.generate(row, **options, assistant_model=assistant), expected)
        kv.check()


def test_a_chat_that_mixes_every_way(kv: TierKV, model: Any, steps: Any) -> None:
    """One conversation, each turn generated in another way, found by the next."""
    ways = [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 5}, {}]
    talk = steps.ids(11)
    for turn, way in enumerate(ways):
        row = steps.row(talk)
        expected = model.generate(row, **GREEDY, **way)
        with kv.cache(row) as cache:
            assert cache.found.total >= (len(talk) - 6 if turn else 0)
            cache.abandon()
        output = kv.generate(row, **GREEDY, **way)
        assert torch.equal(output, expected)
        kv.check()
        talk = output[0].tolist() + steps.ids(4, seed=turn)


def test_a_reply_that_is_tokenised_anew(kv: TierKV, model: Any, steps: Any) -> None:
    """The ids of the next turn differ from those generated: found up to there, no further."""
    row = steps.row(steps.ids(20))
    said = kv.generate(row, **GREEDY)[0].tolist()
    again = [*said[:24], (said[24] + 1) % 97, *said[25:], *steps.ids(5, seed=3)]
    expected = model.generate(steps.row(again), **GREEDY)
    with kv.cache(again) as cache:
        assert cache.found.total <= 24
        cache.abandon()
    assert torch.equal(kv.generate(again, **GREEDY), expected)


def stock_batch(model: Any, rows: list[list[int]], columns: int, steps: Any) -> Any:
    """Return a stock cache of rows computed one by one up to a column, padded with zeros."""
    width = max(len(row) for row in rows)
    singles = []
    for row in rows:
        cache = transformers.DynamicCache(config=model.config)
        real = row[: columns - width + len(row)]
        if real:
            steps.feed(model, cache, real)
        singles.append(cache)
    whole = transformers.DynamicCache(config=model.config)
    for number, layer in enumerate(whole.layers):
        parts = [single.layers[number] for single in singles]
        held = min(columns, layer.sliding_window - 1) if layer.is_sliding else columns
        for name in ("keys", "values"):
            states = [getattr(part, name) for part in parts]
            shape = next(s.shape for s in states if s is not None)
            out = torch.zeros(len(rows), shape[1], held, shape[3], dtype=model.dtype)
            for r, state in enumerate(states):
                if state is not None and state.shape[-2]:
                    out[r, :, held - state.shape[-2] :] = state[0]
            if name == "keys":
                steps.initialize(layer, out, out)
            setattr(layer, name, out)
        if layer.is_sliding:
            layer.cumulative_length = columns
    return whole


@torch.no_grad()
def batch_step(model: Any, cache: Any, ids: Any, mask: Any) -> Any:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    given = {cache_keyword(model): cache, "position_ids": positions, "attention_mask": mask}
    output = model(input_ids=ids, use_cache=True, output_hidden_states=True, **given)
    return torch.cat([output.hidden_states[-1].flatten(), output.logits.flatten()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "mistral"])
def test_a_batch_equals_one_in_memory_to_the_bit(
    family: str, dtype: Any, tiny: Any, rows: Any, steps: Any
) -> None:
    """Rows found at different lengths; the same steps on a stock cache."""
    model = tiny(family, dtype=dtype)
    ids, mask = padded(rows)
    with TierKV.attach(model, device="8MiB", host="1MiB", page_tokens=4) as kv:
        with kv.cache(rows[1][:16]) as cache:
            steps.feed(model, cache, rows[1][:16])
        with kv.cache(ids, attention_mask=mask) as cache:
            columns = cache.get_seq_length()
            assert columns >= 16
            stock = stock_batch(model, rows, columns, steps)
            assert [row.sequence.found.total for row in cache.batch.rows][1] == 16
            for start, stop in ((columns, ids.shape[1]), *((n, n + 1) for n in range(21, 27))):
                part = ids[:, start:stop] if stop <= 21 else torch.full((3, 1), 7 + stop)
                mask = torch.cat([mask, torch.ones(3, stop - mask.shape[1])], 1).long()
                left = batch_step(model, stock, part, mask[:, :stop])
                right = batch_step(model, cache, part, mask[:, :stop])
                assert torch.equal(left, right), f"columns {start} to {stop}"
        kv.check()


def test_a_load_that_fails_starts_over_with_less(
    model: Any, steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, but lost on the way to the device: the same tokens, streamed once."""
    ids = steps.ids(24)
    options = {"max_new_tokens": NEW, "do_sample": True}
    slot = TierKV.attach(model, device="1MiB", page_tokens=4)
    size = slot.store.spec.slot_bytes
    slot.close()
    with TierKV.attach(model, device=40 * size, host=64 * size, page_tokens=4) as kv:
        kv.generate(ids, max_new_tokens=1)
        kv.generate(steps.ids(110, seed=9), max_new_tokens=1)  # pushes it down to the host
        torch.manual_seed(1)
        expected = model.generate(steps.row(ids), **options)
        failed = fail_copies(kv, monkeypatch, times=2)
        streamer = Collector()
        torch.manual_seed(1)
        output = kv.generate(ids, streamer=streamer, **options)
        assert torch.equal(output, expected)
        assert streamer.ids == expected[0].tolist()
        kv.check()
        assert len(failed) == 2


def fail_copies(kv: TierKV, monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[int]:
    """Make the next copies to the device fail."""
    stream = kv.store._loader._stream
    copy, failed = stream._copy_now, list[int]()

    def failing(ops: Any) -> None:
        if len(failed) < times:
            failed.append(len(ops))
            raise OSError("the link is down")
        copy(ops)

    monkeypatch.setattr(stream, "_copy_now", failing)
    return failed


class Collector:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Any) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_beams_and_drafts_equal_memory_to_the_bit(
    family: str, dtype: Any, tiny: Any, steps: Any
) -> None:
    """The scores of every step, against the same steps on a stock cache."""
    model = tiny(family, dtype=dtype)
    told = {"return_dict_in_generate": True, "output_scores": True}
    row = repetitive(steps)
    with TierKV.attach(model, device="8MiB", host="1MiB", page_tokens=4) as kv:
        ours = kv.generate(row, **GREEDY, **told, num_beams=3)
        stock = transformers.DynamicCache(config=model.config)
        steps.feed(model, stock, row[:, :-1])
        stock.batch_repeat_interleave(3)
        given = {cache_keyword(model): stock}
        theirs = model.generate(row, **given, **GREEDY, **told, num_beams=3)
        assert torch.equal(ours.sequences, theirs.sequences)
        for mine, other in zip(ours.scores, theirs.scores, strict=True):
            assert torch.equal(mine, other)

        stock = transformers.DynamicCache(config=model.config)
        if hasattr(stock, "activate_past_recording") or not any(stock.is_sliding):
            # Older stock caches cannot take tokens back once a window is full.
            longer = steps.row([5, *row[0].tolist()])  # nothing of it is stored
            drafts = {**told, **GREEDY, "prompt_lookup_num_tokens": 4, "max_new_tokens": 16}
            theirs = model.generate(longer, **{cache_keyword(model): stock}, **drafts)
            ours = kv.generate(longer, **drafts)
            assert torch.equal(ours.sequences, theirs.sequences)
            for mine, other in zip(ours.scores, theirs.scores, strict=True):
                assert torch.equal(mine, other)
        kv.check()
