"""What the demo talks about: long documents of the standard library, and short questions.

Everything is token ids from the start: a conversation keeps the ids that were generated,
since decoding and encoding again may give others.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from typing import Any

QUESTIONS = (
    "Summarise the text in one sentence.",
    "Which term is explained first?",
    "Give one short example from the text.",
    "What should a beginner remember?",
    "Name one exception to the rules above.",
    "Which part is the most technical?",
    "What is the last section about?",
    "Rewrite the main rule in your own words.",
)
_CHAT_START = "<|im_start|>"


class Dialogue:
    """One conversation: a document, then questions and what the model answered.

    Attributes:
        ids: token ids of everything said so far.
    """

    def __init__(self, tokenizer: Any, document: list[int]) -> None:
        self._tokenizer = tokenizer
        self._chat = _CHAT_START in tokenizer.get_vocab()
        start = [] if tokenizer.bos_token_id is None or self._chat else [tokenizer.bos_token_id]
        opening = self._encode(f"{_CHAT_START}user\n" if self._chat else "")
        self.ids: list[int] = start + opening + document
        self._turns = 0

    def ask(self, question: str) -> None:
        """Add a question, up to where the answer begins."""
        if self._chat:
            before = f"<|im_end|>\n{_CHAT_START}user\n" if self._turns else "\n\n"
            text = f"{before}{question}<|im_end|>\n{_CHAT_START}assistant\n"
        else:
            text = f"\n\nQuestion: {question}\nAnswer:"
        self.ids += self._encode(text)
        self._turns += 1

    def answered(self, ids: list[int]) -> None:
        """Add the ids that the model generated."""
        self.ids += ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def documents(tokenizer: Any, *, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return ``count`` documents of ``tokens`` ids each, no two beginning alike."""
    names = sorted(pydoc_data.topics.topics)
    random.Random(seed).shuffle(names)
    found = []
    for number in range(count):
        ids: list[int] = []
        at = number * len(names) // count
        while len(ids) < tokens:
            text = pydoc_data.topics.topics[names[at % len(names)]]
            ids += tokenizer.encode(text, add_special_tokens=False, verbose=False)
            at += 1
        found.append(ids[:tokens])
    return found
