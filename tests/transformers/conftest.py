"""Tiny models, real models, and a cache that never leaves memory to compare with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tierkv.errors import PoolExhaustedError  # noqa: E402
from tierkv.identity.spec import CacheSpec  # noqa: E402
from tierkv.integrations.models import PACKAGED, load_model  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIX = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 8, "layer_types": _MIX, "hidden_size": 64},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "layer_types": _MIX},
    "gemma3_text": {"sliding_window": 8, "layer_types": _MIX},
    "gpt_oss": {"sliding_window": 8, "layer_types": _MIX, "num_local_experts": 4},
    "granite": {},
    "llama": {},
    "ministral": {"sliding_window": 8, "layer_types": _MIX},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **_MOE},
    "smollm3": {},
    "starcoder2": {},
}


def make_tiny(family: str, dtype: Any = torch.float32, seed: int = 0, **given: Any) -> Any:
    """Return a tiny randomly initialised model of a family."""
    fields = {**TINY, **FAMILIES[family], **given}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # large enough to make logits differ, and biases not zero
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 10**6  # some releases need one; this never comes
    return model.to(dtype).eval()


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread: a busy machine makes two slower than one, and bits do not care."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Return the maker of tiny models."""
    return make_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ordinary model directory with a tiny model and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tiny") / "model"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.save_pretrained(folder)
    make_tiny("llama", vocab_size=len(vocabulary)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def real_model() -> Iterator[Callable[[str, str], Any]]:
    """Return a loader of real models, each loaded once a session; skips what is absent."""
    loaded: dict[tuple[str, str], Any] = {}

    def load(name: str, dtype: str) -> Any:
        if not PACKAGED[name].installed:
            pytest.skip(f"{name} is not installed: {PACKAGED[name].install}")
        if (name, dtype) not in loaded:
            loaded[name, dtype] = load_model(name, dtype=dtype)
        return loaded[name, dtype]

    yield load
    loaded.clear()


class Twin:
    """A stock cache that never leaves memory and remembers the state at every length."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = transformers.DynamicCache(config=model.config)
        self.history: list[list[tuple[Any, Any]]] = []
        for layer in self.cache.layers:
            self.history.append([])
            self._record(layer, self.history[-1])

    def feed(self, ids: Any) -> Any:
        """Return the logits of ids fed after what the cache holds."""
        return feed(self.model, self.cache, ids)

    def at(self, length: int) -> Any:
        """Return a stock cache in the state that this one had at ``length`` tokens."""
        cache = transformers.DynamicCache(config=self.model.config)
        for layer, parts in zip(cache.layers, self.history, strict=True):
            keys, values = (torch.cat([p[i] for p in parts], dim=-2) for i in (0, 1))
            keep = slice(
                max(0, length - layer.sliding_window + 1) if layer.is_sliding else 0, length
            )
            if length:
                initialize(layer, keys, values)
                layer.keys, layer.values = keys[:, :, keep].clone(), values[:, :, keep].clone()
            if layer.is_sliding:
                layer.cumulative_length = length
        return cache

    @staticmethod
    def _record(layer: Any, parts: list[tuple[Any, Any]]) -> None:
        update = layer.update

        def recording(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            parts.append((keys.clone(), values.clone()))
            return update(keys, values, *args, **kwargs)

        layer.update = recording


def initialize(layer: Any, keys: Any, values: Any) -> None:
    """Make a stock layer ready for states like these; older releases look at the keys only."""
    count = len(inspect.signature(layer.lazy_initialization).parameters)
    layer.lazy_initialization(*(keys, values)[:count])


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Any) -> Any:
    """Feed ``ids`` after what ``cache`` holds; return all last hidden states and the logits.

    Of the logits only those of the last token, which the hidden states decide: a vocabulary
    of 262144 would take longer than all layers together.
    """
    row = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
    output = model(
        input_ids=row,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        output_hidden_states=True,
    )
    return torch.cat([output.hidden_states[-1].flatten(), output.logits.flatten()])


class Traveller:
    """A model with a store, whose pages can be sent down the tiers between turns."""

    def __init__(self, model: Any, path: Path, *, tokens: int, **options: Any) -> None:
        self._model, self._path, self._options = model, path, options
        spec = CacheSpec.from_config(
            model.config, dtype=model.dtype, page_tokens=options.get("page_tokens")
        )
        pages = sum(group.pages_for(tokens) for group in spec.groups)
        self._device = (pages + 4) * spec.slot_bytes
        self._fillers = 1000
        self.kv = self._attach()

    def travel(self, route: str) -> None:
        """Send all pages somewhere: ``device`` (they stay), ``host``, ``disk``, ``reopened``."""
        if route == "reopened":
            self.kv.close()
            self.kv = self._attach()
        if route == "disk":  # committed pages follow ours through host memory, until it is full
            self._fill(commit=True)
            self._fill(commit=True)
        if route in ("host", "disk"):
            self._fill()

    def __enter__(self) -> Traveller:
        return self

    def __exit__(self, *error: object) -> None:
        self.kv.close()

    def _attach(self) -> TierKV:
        return TierKV.attach(
            self._model,
            self._path,
            device=self._device,
            host=self._device,
            disk="256MiB",
            self_check=False,
            **self._options,
        )

    def _fill(self, *, commit: bool = False) -> None:
        """Hold the whole device pool for a moment, so that everything else must leave it."""
        running = []
        with contextlib.suppress(PoolExhaustedError):
            while True:
                self._fillers += 1
                running.append(self.kv.store.begin([self._fillers] * 16))
                self._write_zeros(running[-1])
        for sequence in running:
            if commit and sequence.length == 16:
                sequence.finish()
            sequence.abandon()

    def _write_zeros(self, sequence: Any) -> None:
        for group in self.kv.store.spec.groups:
            dtype = getattr(torch, group.dtype)
            states = [torch.zeros(c.heads, 16, c.dim, dtype=dtype) for c in group.components]
            for number in group.layers:
                with sequence.gate.layer(number) as layer:
                    layer.append(*states)


class Steps:
    """What the tests share: twins, forwards, random ids."""

    twin = staticmethod(Twin)
    traveller = staticmethod(Traveller)
    feed = staticmethod(feed)
    initialize = staticmethod(initialize)

    @staticmethod
    def ids(count: int, *, seed: int = 1, vocabulary: int = 97) -> list[int]:
        """Return random token ids."""
        chooser = torch.Generator().manual_seed(seed)
        return torch.randint(3, vocabulary, (count,), generator=chooser).tolist()

    @staticmethod
    def row(ids: list[int]) -> Any:
        """Return ids as a batch of one."""
        return torch.tensor(ids).unsqueeze(0)


@pytest.fixture
def steps() -> type[Steps]:
    """Return the shared helpers."""
    return Steps


@pytest.fixture(autouse=True)
def nothing_is_left_to_timing(monkeypatch):
    """Load what is found: whether computing a tiny model is quicker depends on the moment."""
    monkeypatch.setattr(
        "tierkv.integrations.transformers.attach.compute_cost", lambda model, spec: None
    )
