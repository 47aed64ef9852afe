"""A chat with a Transformers model that keeps its state.  Run: python examples/transformers_chat.py

Every turn feeds the whole conversation to `generate`; what earlier turns computed is found.
Leave with an empty line, start again, and the conversation goes on where it was.  Needs what
`make demo` installs; another chat model can be named as the first argument.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import TextStreamer

from tierkv.integrations.models import load_model
from tierkv.integrations.transformers import TierKV


def read_turns(file: Path) -> list[dict[str, str]]:
    """Return the conversation so far."""
    return json.loads(file.read_text()) if file.exists() else []


def main() -> None:
    """Talk until an empty line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2", help="smollm2, or a model's name")
    parser.add_argument("--dir", type=Path, default=Path("chat-store"), help="where it is kept")
    parser.add_argument("--tokens", type=int, default=60, help="longest answer")
    parser.add_argument("--say", nargs="*", help="say these lines instead of reading them")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_model(options.model)
    options.dir.mkdir(parents=True, exist_ok=True)
    file = options.dir / "turns.json"
    turns, said = read_turns(file), iter(options.say or [])
    with TierKV.attach(model, options.dir / "kv", device="256MiB", host="512MiB") as kv:
        for turn in turns:
            print(f"{turn['role']}: {turn['content']}")
        while text := next(said, "") if options.say is not None else input("you: ").strip():
            turns.append({"role": "user", "content": text})
            prompt = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            before = kv.stats().counters["found_tokens"]
            output = kv.generate(
                **prompt,
                max_new_tokens=options.tokens,
                do_sample=False,
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
            length = prompt["input_ids"].shape[1]
            reply = tokenizer.decode(output[0, length:], skip_special_tokens=True)
            turns.append({"role": "assistant", "content": reply.strip()})
            file.write_text(json.dumps(turns, indent=1))
            after = kv.stats().counters["found_tokens"]
            found = {
                tier: after[tier] - before[tier] for tier in after if after[tier] > before[tier]
            }
            print(f"[{length} tokens, of which found: {found or 'none'}]")


if __name__ == "__main__":
    main()
