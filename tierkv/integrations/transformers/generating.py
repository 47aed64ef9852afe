"""Generation around the store: find and load, generate, commit; again after a failed load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierkv.devices.base import DeviceError
from tierkv.errors import InvalidInputError
from tierkv.integrations.transformers.keeping import Endings
from tierkv.integrations.transformers.prompts import Prompts
from tierkv.integrations.transformers.refusals import OWN_CACHE
from tierkv.integrations.transformers.versions import cache_keyword, last_logits_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tierkv.integrations.transformers.attach import TierKV
    from tierkv.integrations.transformers.cache import TierKVCache

_ATTEMPTS = 4  # each load that fails takes its pages off the device, so the next finds less


def run_generation(kv: TierKV, input_ids: Any, kwargs: Mapping[str, Any]) -> Any:
    """Carry :meth:`TierKV.generate` out."""
    return attempts(Generation(kv, input_ids, kwargs))[0]


def attempts(generation: Generation) -> tuple[Any, TierKVCache]:
    """Begin and run, over again while loads fail; return the output and the cache, spent."""
    while True:
        try:
            with generation.begin() as cache:
                return generation.run(cache), cache
        except DeviceError:
            if not generation.can_start_over:
                raise


class Generation:
    """One call of ``generate``: :meth:`begin` finds and loads, :meth:`run` computes and commits.

    A page that was found but did not reach the device ends the forward that waits for it, by
    a ``DeviceError``.  While :attr:`can_start_over`, begin and run again: less is found
    then, the random state is what it was, and a streamer does not see tokens a second time.
    """

    def __init__(self, kv: TierKV, input_ids: Any, kwargs: Mapping[str, Any]) -> None:
        self._kv = kv
        self._kwargs = dict(kwargs)
        _refuse_other_caches(kwargs)
        mask = self._kwargs.pop("attention_mask", None)
        self._options = Defaults(kwargs.get("generation_config"), kv.generation_config, kwargs)
        self._endings = Endings.of(self._options)
        pad_id = self._endings.pad_id
        self._prompts = prompts = Prompts.of(input_ids, mask, pad_id=pad_id)
        self._ids, self._mask = prompts.tensors(pad_id or 0, kv.model.device)
        beams, returned = self._options.num_beams, self._options.num_return_sequences
        self._copies = max(int(beams or 1), int(returned or 1))
        self._room = self._options.new_tokens(prompts.columns)
        self._streamer: ReplayStreamer | None = None
        if kwargs.get("streamer") is not None:
            self._streamer = ReplayStreamer(kwargs["streamer"])
            self._kwargs["streamer"] = self._streamer
        self._random_state = _random_state(kv.model.device)
        self._begun = 0

    @property
    def computes_to_begin(self) -> bool:
        """Whether :meth:`begin` runs the model: rows of a batch are brought to one column."""
        return self._copies > 1 or len(self._ids) > 1

    @property
    def can_start_over(self) -> bool:
        """Whether another attempt is worth it."""
        return self._begun < _ATTEMPTS

    def begin(self) -> TierKVCache:
        """Find and load; raises what :meth:`TierKV.cache` raises."""
        if self._begun:
            _restore_random_state(self._random_state, self._kv.model.device)
            if self._streamer is not None:
                self._streamer.start_over()
        self._begun += 1
        cache = self._kv.begin(
            self._prompts,
            self._room,
            copies=self._copies,
            endings=self._endings,
            restartable=self.can_start_over,
            can_split=True,
        )
        if self._options.takes_tokens_back:
            cache.activate_past_recording()
        return cache

    def run(self, cache: TierKVCache, **more: Any) -> Any:
        """Generate and commit; return the output of ``model.generate``.

        Raises:
            DeviceError: what was found did not arrive; the cache can only be abandoned.
        """
        given = {**self._kwargs, **more, cache_keyword(self._kv.model): cache}
        if cache.front:
            self._feed(cache, cache.front)
            cache.join()
        piece = self._options.prefill_chunk_size
        if piece is not None:  # some releases forget here that a prefix is cached
            self._prefill(cache, int(piece))
            given["prefill_chunk_size"] = None
        with torch.no_grad():
            output = self._kv.model.generate(self._ids, attention_mask=self._mask, **given)
        kept = None
        if self._copies > 1:
            kept = output if isinstance(output, torch.Tensor) else output.sequences
        cache.commit(kept)
        return output

    def _prefill(self, cache: TierKVCache, piece: int) -> None:
        """Feed what was not found in pieces, but for the last piece."""
        if piece < 1:
            raise InvalidInputError(f"prefill_chunk_size must be at least 1, got {piece}")
        for start in range(cache.get_seq_length(), self._ids.shape[1] - piece, piece):
            self._feed(cache, start + piece)

    def _feed(self, cache: TierKVCache, stop: int) -> None:
        """Feed the prompt's columns up to ``stop``."""
        new = self._ids[:, cache.get_seq_length() : stop]
        feed_rows(self._kv.model, cache, new, self._mask[:, :stop])


def feed_rows(model: Any, cache: TierKVCache, ids: Tensor, mask: Tensor | None = None) -> None:
    """Run one forward over new ids ``[rows, n]`` for the state that it leaves in the cache.

    Args:
        model: the attached model.
        cache: continues by ``n`` columns.
        ids: the new columns.
        mask: of all columns held and new, for rows that are padded.
    """
    given: dict[str, Any] = {cache_keyword(model): cache, **last_logits_only(model)}
    if mask is not None:
        given["attention_mask"] = mask
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        model(input_ids=ids.to(model.device), use_cache=True, **given)


def _refuse_other_caches(kwargs: Mapping[str, Any]) -> None:
    for name in ("past_key_values", "cache", "cache_implementation"):
        if kwargs.get(name) is not None:
            raise InvalidInputError(OWN_CACHE.format(name + "="))
    if kwargs.get("use_cache") is False:
        raise InvalidInputError(OWN_CACHE.format("use_cache="))


class Defaults:
    """Options of ``generate``: its arguments, then the config given, then the model's."""

    def __init__(self, given: Any, model: Any, kwargs: Mapping[str, Any]) -> None:
        self._sources = [source for source in (given, model) if source is not None]
        self._kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        """Return an option, None where nobody sets it."""
        if self._kwargs.get(name) is not None:
            return self._kwargs[name]
        values = (getattr(source, name, None) for source in self._sources)
        return next((value for value in values if value is not None), None)

    @property
    def takes_tokens_back(self) -> bool:
        """Whether drafted tokens will be rejected (assisted generation, prompt lookup)."""
        names = ("assistant_model", "prompt_lookup_num_tokens", "custom_generate")
        return any(getattr(self, name) for name in names)

    def new_tokens(self, prompt: int) -> int:
        """Return how many tokens may be added, as far as the options tell."""
        count = self.max_new_tokens
        if count is not None:
            if int(count) < 0:
                raise InvalidInputError(f"max_new_tokens must not be negative, got {count}")
            return int(count)
        return max(0, int(self.max_length or 0) - prompt)


class ReplayStreamer:
    """Passes tokens on; after a new start, leaves out as many calls as were passed on before."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._calls = 0
        self._seen = 0

    def start_over(self) -> None:
        """The calls that follow repeat those seen so far."""
        self._calls = 0

    def put(self, value: Any) -> None:
        """Pass tokens on unless the streamer has them."""
        self._calls += 1
        if self._calls > self._seen:
            self._seen = self._calls
            self._streamer.put(value)

    def end(self) -> None:
        """Pass the end on."""
        self._streamer.end()


def _random_state(device: Any) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _restore_random_state(state: tuple[Tensor, Tensor | None], device: Any) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
