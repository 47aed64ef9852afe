"""The ways to serve a turn with a real model: recompute, the rivals, and tierkv's tiers.

All generate greedily and ignore the end-of-sequence token; all get the same ids.  The time to
the first token begins when a method is handed the prompt's ids, so it includes finding and
loading state, and it ends when the first token is known as a number.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from multi_turn_schedule import Workload
from multi_turn_tiers import TIER_METHODS, Budgets, Served, TierSide, found_by_tier
from transformers import DynamicCache

from tierkv import CacheSpec
from tierkv.integrations.models import PACKAGED, converted
from tierkv.integrations.transformers import TierKV
from tierkv.integrations.transformers.versions import cache_keyword

States = list[tuple[torch.Tensor, torch.Tensor]]  # by layer, [1, heads, tokens, dim]


@torch.no_grad()
def generate(model: Any, cache: Any, new: list[int], count: int, started: float) -> Served:
    """Feed ``new`` after what ``cache`` holds and generate ``count`` tokens."""
    served, row = Served(), torch.tensor([new])
    given = {cache_keyword(model): cache, "use_cache": True, "logits_to_keep": 1}
    for _ in range(count):
        output = model(input_ids=row, **given)
        served.tokens.append(int(output.logits[0, -1].argmax()))
        if served.ttft_s is None:
            served.ttft_s = time.perf_counter() - started
        row = torch.tensor([served.tokens[-1:]])
    served.rest_s = time.perf_counter() - started - served.ttft_s
    return served


class Recompute:
    """No cache between turns."""

    name, tier = "recompute", "none"

    def __init__(self, model: Any) -> None:
        self._model = model

    def begin_round(self, number: int) -> None:
        """Do nothing."""

    def adopt(self, client: int, ids: list[int], states: States) -> Served:
        """Keep nothing."""
        return Served()

    def serve(self, client: int, prompt: list[int], count: int) -> Served:
        """Compute the whole prompt."""
        started = time.perf_counter()
        cache = DynamicCache(config=self._model.config)
        return generate(self._model, cache, prompt, count, started)

    def held(self) -> dict[str, int]:
        """Return the bytes held, by where they are."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Recorder(Recompute):
    """Computes a cold prompt once and keeps every layer's K and V, for all methods to adopt.

    Recorded as they are made, because a stock cache drops what has left a sliding window.
    """

    def serve_and_record(
        self, prompt: list[int], count: int, held: States | None = None
    ) -> tuple[Served, States]:
        """Return what was generated and all K and V, those of ``held`` included.

        Args:
            prompt: the ids.
            count: tokens to generate.
            held: states of the first tokens, which are not computed again.
        """
        started = time.perf_counter()
        cache = DynamicCache(config=self._model.config)
        parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in cache.layers]
        start = 0
        for number, layer in enumerate(cache.layers):
            if held is not None:
                layer.update(*held[number])
                parts[number].append(held[number])
                start = held[number][0].shape[-2]
            _record(layer, parts[number])
        served = generate(self._model, cache, prompt[start:], count, started)
        return served, [
            tuple(torch.cat([part[i] for part in layer], dim=-2) for i in (0, 1)) for layer in parts
        ]


def _record(layer: Any, parts: list) -> None:
    update = layer.update

    def recording(keys, values, *args, **kwargs):
        parts.append((keys, values))
        return update(keys, values, *args, **kwargs)

    layer.update = recording


def cache_of(model: Any, states: States) -> DynamicCache:
    """Return a stock cache of its own that holds ``states``."""
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        layer.update(keys, values)
    compact(cache)
    return cache


def compact(cache: DynamicCache) -> None:
    """Replace views of larger tensors, which sliding layers keep, by copies of what they show."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            tensor = getattr(layer, name)
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                setattr(layer, name, tensor.clone())


class Dynamic(Recompute):
    """Transformers' DynamicCache, kept in memory for each conversation and continued."""

    name, tier = "dynamic", "memory"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._caches: dict[int, DynamicCache] = {}

    def adopt(self, client: int, ids: list[int], states: States) -> Served:
        """Keep a stock cache of the states."""
        self._caches[client] = cache_of(self._model, states)
        return Served()

    def serve(self, client: int, prompt: list[int], count: int) -> Served:
        """Continue the conversation's cache."""
        started = time.perf_counter()
        cache = self._caches.get(client)
        if cache is None:
            cache = self._caches[client] = DynamicCache(config=self._model.config)
        start = cache.get_seq_length()
        served = generate(self._model, cache, prompt[start:], count, started)
        served.found = {"memory": start}
        return served

    def held(self) -> dict[str, int]:
        """Return the bytes of all tensors' storages."""
        storages = [
            tensor.untyped_storage()
            for cache in self._caches.values()
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        ]
        return {"memory": sum({s.data_ptr(): s.nbytes() for s in storages}.values())}


class TorchSave(Recompute):
    """A DynamicCache saved after each turn with ``torch.save``, loaded before the next.

    As durable as tierkv on disk: written beside, fsynced, renamed, the folder fsynced.
    """

    name, tier = "torch_save", "disk"

    def __init__(self, model: Any, folder: Path, *, cold: bool) -> None:
        super().__init__(model)
        self._folder = folder
        self._cold = cold
        folder.mkdir()

    def adopt(self, client: int, ids: list[int], states: States) -> Served:
        """Save a stock cache of the states."""
        return self._save(client, cache_of(self._model, states), Served())

    def serve(self, client: int, prompt: list[int], count: int) -> Served:
        """Load, continue, save."""
        path = self._path(client)
        started = time.perf_counter()
        if path.exists():
            cache = torch.load(path, weights_only=False)
        else:
            cache = DynamicCache(config=self._model.config)
        start = cache.get_seq_length()
        served = generate(self._model, cache, prompt[start:], count, started)
        served.found = {"disk": start}
        return self._save(client, cache, served)

    def held(self) -> dict[str, int]:
        """Return the bytes of all files."""
        return {"disk": sum(path.stat().st_size for path in self._folder.iterdir())}

    def _path(self, client: int) -> Path:
        return self._folder / f"{client}.pt"

    def _save(self, client: int, cache: DynamicCache, served: Served) -> Served:
        started = time.perf_counter()
        compact(cache)
        path = self._path(client)
        scratch = path.with_suffix(".new")
        with scratch.open("wb") as file:
            torch.save(cache, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        served.keep_s = time.perf_counter() - started
        served.written = path.stat().st_size
        if self._cold:  # the next load is from disk, as tierkv's are, not from the page cache
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return served


class Tiers(Recompute):
    """tierkv; with a disk it flushes after each turn, so that a turn that ended is durable."""

    def __init__(
        self, name: str, model: Any, path: Path | None, *, shared: int, **options: Any
    ) -> None:
        super().__init__(model)
        self.name, self.tier = name, TIER_METHODS[name]
        self.side = TierSide(
            name,
            path,
            lambda: TierKV.attach(
                model,
                path,
                weights_id="benchmark",
                prefault=True,
                self_check=False,
                **options,
            ),
        )
        self._shared = shared  # tokens that every first prompt begins with
        self._ends: dict[int, int] = {}

    def begin_round(self, number: int) -> None:
        """Restart, where the method is about that."""
        self.side.begin_round(number)

    def adopt(self, client: int, ids: list[int], states: States) -> Served:
        """Write the states into the pages of a sequence, as the model's layers would."""
        with self.side.store.begin(ids) as sequence:
            start = sequence.length
            for number, (keys, values) in enumerate(states):
                with sequence.gate.layer(number) as layer:
                    layer.append(keys[0, :, start:], values[0, :, start:])
            report = sequence.finish(ids)
        served = Served(found=found_by_tier(sequence))
        return self._keep(client, served, report, len(ids))

    def serve(self, client: int, prompt: list[int], count: int) -> Served:
        """Find, load, continue, commit."""
        started = time.perf_counter()
        with self.side.handle.cache(prompt, max_new_tokens=count) as cache:
            new = prompt[cache.found.total :]
            served = generate(self._model, cache, new, count, started)
            ended = time.perf_counter()
            report = cache.commit()
        served.keep_s = time.perf_counter() - ended
        served.found = found_by_tier(cache)
        return self._keep(client, served, report, len(prompt) + count - 1)

    def held(self) -> dict[str, int]:
        """Return the bytes in use in each tier."""
        return self.side.held()

    def close(self) -> None:
        """Check and close the store."""
        self.side.close()

    def _keep(self, client: int, served: Served, report: Any, end: int) -> Served:
        started = time.perf_counter()
        # What should be there; pages that a tier too small has lost are new once more.
        known = self._ends.get(client, self._shared if self._ends else 0)
        before = min(known, sum(served.found.values()))
        served.written = self.side.keep(report, before, end)
        served.keep_s += time.perf_counter() - started
        self._ends[client] = end
        return served


METHODS = ("recompute", "dynamic", "torch_save", *TIER_METHODS)


def make_method(
    name: str,
    model: Any,
    spec: CacheSpec,
    workload: Workload,
    budgets: Budgets,
    folder: Path,
    *,
    cold_files: bool,
) -> Any:
    """Return one of ``METHODS``, which keeps its files in a new folder below ``folder``."""
    if name in TIER_METHODS:
        path = None if name == "tierkv_host" else folder / name
        options = budgets.options(name, spec, workload)
        return Tiers(name, model, path, shared=workload.shared_document, **options)
    if name == "torch_save":
        return TorchSave(model, folder / name, cold=cold_files)
    return {"recompute": Recompute, "dynamic": Dynamic}[name](model)


def load(name: str, dtype: str) -> Any:
    """Return a model in evaluation mode: a packaged one by name, or from a directory."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = converted(name) if name in PACKAGED else name
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    return model.eval()
