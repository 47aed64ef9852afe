"""The demo's conversations: a real model, budgets too small for them, a restart in between."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.cli.demo_report import (
    TurnResult,
    divider,
    header,
    line,
    show_summary,
    show_ways_on,
    summarise,
    write_json,
)
from tierkv.cli.demo_text import QUESTIONS, Dialogue, documents
from tierkv.cli.output import console, counted
from tierkv.cli.stat import collect, describe_owner, show
from tierkv.errors import InvalidInputError, StoreLockedError
from tierkv.units import parse_bytes

if TYPE_CHECKING:
    from tierkv.data_plane.arrivals import LoadTime
    from tierkv.integrations.transformers import TierKV
    from tierkv.stats import Found

DEFAULT_DIRECTORY = Path("demo-store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What the store may use."""

    device: str
    host: str
    disk: str


def run_demo(
    *,
    model: str = "smollm2",
    conversations: int = 3,
    turns: int = 3,
    doc_tokens: int = 768,
    new_tokens: int = 8,
    device: str = "56MiB",
    host: str = "32MiB",
    disk: str = "1GiB",
    directory: Path | None = None,
    json_path: Path | None = None,
    seed: int = 0,
) -> int:
    """Run the demo and return the exit status: 1 if any token differs.

    Args:
        model: ``"smollm2"``, ``"gemma3"``, a model directory or a hub name.
        conversations: how many, interleaved.
        turns: turns of each.
        doc_tokens: tokens of the document that each begins with.
        new_tokens: tokens generated in a turn.
        device: budget of the device pool.
        host: budget of host memory.
        disk: budget of the directory.
        directory: where the store lives; the default one is emptied first.
        json_path: where to write the result as JSON too.
        seed: chooses documents and questions.

    Raises:
        InvalidInputError: an option or model that cannot work.
        StoreError: the directory cannot be used.
    """
    budgets = Budgets(device=device, host=host, disk=disk)
    for name, budget in (("device", device), ("host", host), ("disk", disk)):
        parse_bytes(budget, name=name)
    place = _prepared(directory)
    out = console()
    with out.status(f"loading {model} (converted on first use, about a minute)"):
        network, tokenizer = _load(model)
    texts = documents(tokenizer, count=conversations, tokens=doc_tokens, seed=seed)
    run = _Run(network, [Dialogue(tokenizer, text) for text in texts], new_tokens)
    out.print(
        f"{model}, float32: {counted(conversations, 'conversation')} over documents of "
        f"{counted(doc_tokens, 'token')}, {counted(turns, 'turn')} each; "
        f"device {device}, host {host}, disk {disk} in {place}\n",
        soft_wrap=True,
        markup=False,
    )
    out.print(header(), soft_wrap=True)
    reopen_after = (turns + 1) // 2 if turns > 1 else 0
    sessions = [range(1, reopen_after + 1), range(reopen_after + 1, turns + 1)]
    status: dict[str, Any] = {}
    for number, session in enumerate(sessions):
        if not session:
            continue
        if number and reopen_after:
            out.print(divider("store closed and opened again"), style="dim", soft_wrap=True)
        with _attached(network, place, budgets, self_check=not run.results) as kv:
            for turn in session:
                # There and back, so that the nearer tiers have something to give as well.
                order = range(conversations)
                for which in order if turn % 2 else reversed(order):
                    with out.status(f"conversation {which + 1}, turn {turn}"):
                        run.turn(kv, which, turn)
                    out.print(line(run.results[-1]), soft_wrap=True, markup=False)
            kv.store.flush()
            kv.check()
            status = collect(place)
    summary = summarise(run.results, reopened=bool(reopen_after))
    show_summary(out, summary)
    since = "; its figures count since it was opened again" if reopen_after else ""
    out.print(f"\nThe store just before it was closed{since}:", soft_wrap=True)
    show(status)
    show_ways_on(out, place)
    if json_path is not None:
        extra = {"summary": summary, "model": model, "directory": str(place), "stat": status}
        write_json(json_path, run.results, extra)
    return 0 if summary["tokens_equal"] else 1


class _Run:
    """The conversations and what was measured."""

    def __init__(self, model: Any, dialogues: list[Dialogue], new_tokens: int) -> None:
        self.results: list[TurnResult] = []
        self._model = model
        self._dialogues = dialogues
        self._options = {"max_new_tokens": new_tokens, "do_sample": False}

    def turn(self, kv: TierKV, which: int, turn: int) -> None:
        """Ask one question and answer it twice: with what is stored, and all anew."""
        dialogue = self._dialogues[which]
        dialogue.ask(QUESTIONS[(which + turn - 1) % len(QUESTIONS)])
        prompt = list(dialogue.ids)
        # The order alternates, so that neither way always runs on a warm machine.
        if len(self.results) % 2:
            again, recompute_s = self._recomputed(prompt)
            ids, ttft_s, found, load = self._resumed(kv, prompt)
        else:
            ids, ttft_s, found, load = self._resumed(kv, prompt)
            again, recompute_s = self._recomputed(prompt)
        self.results.append(
            TurnResult(
                conversation=which + 1,
                turn=turn,
                prompt_tokens=len(prompt),
                found=found,
                computed=len(prompt) - found.total,
                hidden_load_s=load.hidden_s,
                exposed_load_s=load.exposed_s,
                ttft_s=ttft_s,
                recompute_s=recompute_s,
                tokens_equal=ids == again,
            )
        )
        dialogue.answered(ids)

    def _resumed(self, kv: TierKV, prompt: list[int]) -> tuple[list[int], float, Found, LoadTime]:
        """Generate with what is stored, its pages arriving while the first layers compute."""
        from tierkv.integrations.transformers.generating import Generation, attempts

        watch = _FirstToken()
        generation = Generation(kv, prompt, {**self._options, "streamer": watch})
        output, cache = attempts(generation)
        return output[0, len(prompt) :].tolist(), watch.seconds, cache.found, cache.load_time

    def _recomputed(self, prompt: list[int]) -> tuple[list[int], float]:
        import torch

        watch, row = _FirstToken(), torch.tensor([prompt], device=self._model.device)
        output = self._model.generate(
            row, attention_mask=torch.ones_like(row), streamer=watch, **self._options
        )
        return output[0, len(prompt) :].tolist(), watch.seconds


class _FirstToken:
    """A streamer that measures the time from its making to the first token."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._puts = 0
        self.seconds = 0.0

    def put(self, value: Any) -> None:
        """Note the second call: the first one brings the prompt."""
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._start

    def end(self) -> None:
        """Do nothing at the end."""


def _prepared(directory: Path | None) -> Path:
    """Return the store's directory; the demo's own default one is emptied.

    Raises:
        StoreError: the directory holds something else, or another process has it open.
    """
    from tierkv.cli.directory import owner_of
    from tierkv.storage.clearing import clear_directory

    place = directory or DEFAULT_DIRECTORY
    # Asked before anything is loaded.  An empty directory is not a store yet, but can be.
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        owner = owner_of(place)
        if owner is not None:
            raise StoreLockedError(
                f"{place}: open in {describe_owner(owner.as_dict())}; close that store first, "
                "or choose another --directory",
                **owner.as_dict(),
            )
        if directory is None:
            clear_directory(place)
    return place


def _load(model: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise InvalidInputError(
            "the demo needs Transformers: pip install 'tierkv-store[transformers]'"
        ) from error
    from tierkv.integrations.models import load_model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return load_model(model, dtype="float32")


@contextlib.contextmanager
def _attached(model: Any, place: Path, budgets: Budgets, *, self_check: bool) -> Iterator[TierKV]:
    from tierkv.integrations.transformers import TierKV

    with TierKV.attach(
        model,
        place,
        device=budgets.device,
        host=budgets.host,
        disk=budgets.disk,
        self_check=self_check,
    ) as kv:
        yield kv
