"""Serves the turns of a multi-turn workload with several methods, one after the other."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from multi_turn_schedule import Workload
from multi_turn_tiers import Served

Record = dict[str, Any]


class Loop:
    """Serves the turns of a workload with some methods and takes down what they did."""

    def __init__(self, workload: Workload, methods: list[Any], recorder: Any = None) -> None:
        """Prepare.

        Args:
            workload: the turns.
            methods: each with ``name``, ``begin_round``, ``serve`` and, with a recorder, ``adopt``;
                with ``clients``, it serves the turns of so many clients only.
            recorder: computes first prompts once for all methods; None for each on its own.
        """
        self.records: list[Record] = []
        self._workload = workload
        self._methods = methods
        self._recorder = recorder
        self._document: Any = None

    def run(self, progress: bool = False) -> None:
        """Serve every turn."""
        workload = self._workload
        prompts, questions = workload.first_prompts(), workload.questions()
        started, sent, newest = time.perf_counter(), 0.0, 0
        for number, turn in enumerate(turns := workload.turns()):
            _wait_until(sent + turn.gap_s if number else 0.0)
            sent = time.perf_counter()
            if turn.round > newest:
                newest = turn.round
                for method in self._methods:
                    method.begin_round(newest)
            prompt = prompts[turn.client]
            if turn.round == 1 and self._recorder is not None:
                answer = self._hand_over(turn, prompt)
            else:
                answer = self._serve(turn, prompt, number)
            if turn.round < workload.rounds:
                prompts[turn.client] = prompt + answer + next(questions)
            if progress:
                seconds = time.perf_counter() - started
                print(f"  turn {number + 1} of {len(turns)}, {seconds:.0f} s", end="\r", flush=True)
        if progress:
            print(" " * 60, end="\r")

    def _serve(self, turn: Any, prompt: list[int], number: int) -> list[int]:
        """Let every method serve a turn; return what the first of them generated."""
        methods = [m for m in self._methods if turn.client < getattr(m, "clients", turn.client + 1)]
        shift = number % len(methods)
        served = {
            method.name: method.serve(turn.client, prompt, self._workload.output_length)
            for method in methods[shift:] + methods[:shift]
        }
        right = served[methods[0].name].tokens
        for method in methods:
            self._note(method.name, turn, prompt, served[method.name], right)
        return right

    def _hand_over(self, turn: Any, prompt: list[int]) -> list[int]:
        """Compute a first prompt once and give its state to every method."""
        shared, count = self._workload.shared_document, self._workload.output_length
        known = self._document is not None
        cold, states = self._recorder.serve_and_record(prompt, count, held=self._document)
        if shared and not known:
            self._document = [
                (k[:, :, :shared].clone(), v[:, :, :shared].clone()) for k, v in states
            ]
        for method in self._methods:
            served = method.adopt(turn.client, prompt + cold.tokens[:-1], states)
            served.tokens = cold.tokens
            if method.name == "recompute" and not known:
                served.ttft_s, served.rest_s = cold.ttft_s, cold.rest_s
            self._note(method.name, turn, prompt, served, cold.tokens)
        return cold.tokens

    def _note(
        self, name: str, turn: Any, prompt: list[int], served: Served, right: list[int]
    ) -> None:
        self.records.append(
            {
                "method": name,
                "client": turn.client,
                "round": turn.round,
                "prompt_tokens": len(prompt),
                "ideal_tokens": turn.ideal_tokens,
                "equal": served.tokens == right,
                **{key: value for key, value in asdict(served).items() if key != "tokens"},
            }
        )


def _wait_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > 0:
        time.sleep(left)
