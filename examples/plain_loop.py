"""A decoder loop written by hand: device pool, layer gate and kernels, no `generate`.

    python examples/plain_loop.py

Answers two questions about one document; the second turn finds the first one's state.  Uses
the Triton kernels on a GPU and their PyTorch references elsewhere.  The weights are those of
SmolLM2-135M (a Llama); needs what `make demo` installs.
"""

import tempfile
import time

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

import tierkv
from tierkv.identity.weights import weights_digest
from tierkv.integrations.models import load_model
from tierkv.kernels.paged_decode import paged_decode
from tierkv.kernels.paged_prefill import paged_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENT = "The lighthouse keeper wrote down every ship that passed, and every storm. " * 24
QUESTIONS = ["\nQ: What did the keeper write down?\nA:", "\nQ: Where did the keeper live?\nA:"]


class Llama:
    """The forward pass; K and V live in the pages of a sequence and nowhere else."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: w.to(DEVICE) for name, w in model.state_dict().items()}
        self.heads, self.kv_heads = (
            model.config.num_attention_heads,
            model.config.num_key_value_heads,
        )
        self.dim = model.config.hidden_size // self.heads
        rope = model.config.rope_parameters["rope_theta"]
        self.frequencies = rope ** -(torch.arange(0, self.dim, 2, device=DEVICE) / self.dim)

    @torch.no_grad()
    def forward(self, ids, sequence):
        """Return the logits after `ids`, which continue what `sequence` holds."""
        positions = torch.arange(sequence.length, sequence.length + len(ids), device=DEVICE)
        angles = torch.outer(positions, self.frequencies).repeat(1, 2)
        turn = angles.cos()[:, None], angles.sin()[:, None]
        x = embedding(torch.tensor(ids, device=DEVICE), self.weights["model.embed_tokens.weight"])
        for layer in range(self.config.num_hidden_layers):
            x = x + self.attention(layer, self.norm(layer, "input", x), turn, sequence)
            x = x + self.mlp(layer, self.norm(layer, "post_attention", x))
        last = self.rms(x[-1:], self.weights["model.norm.weight"])
        return linear(last, self.weights["model.embed_tokens.weight"])[0]

    def attention(self, number, x, turn, sequence):
        """Project, write K and V into pages, attend to the pages where they lie."""
        q, k, v = (
            linear(x, self.weight(number, f"self_attn.{name}_proj")).unflatten(-1, (-1, self.dim))
            for name in "qkv"
        )
        q, k = rotate(q, *turn), rotate(k, *turn)
        with sequence.gate.layer(number) as layer:  # waits for this layer's pages, no others'
            layer.append(k.transpose(0, 1), v.transpose(0, 1))
            place = {
                "memory": layer.memory,
                "page_table": layer.page_table()[None],
                "lengths": torch.tensor([layer.length], device=DEVICE),
                "v_offset": layer.component_offsets[1],
                "page_tokens": layer.group.page_tokens,
                "kv_heads": self.kv_heads,
                "scale": self.dim**-0.5,
            }
            out = paged_decode(q, **place) if len(x) == 1 else paged_prefill(q[None], **place)[0]
        return linear(out.flatten(-2), self.weight(number, "self_attn.o_proj"))

    def mlp(self, number, x):
        gate = silu(linear(x, self.weight(number, "mlp.gate_proj")))
        up = linear(x, self.weight(number, "mlp.up_proj"))
        return linear(gate * up, self.weight(number, "mlp.down_proj"))

    def norm(self, number, which, x):
        return self.rms(x, self.weight(number, f"{which}_layernorm"))

    def rms(self, x, weight):
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def weight(self, number, name):
        return self.weights[f"model.layers.{number}.{name}.weight"]


def rotate(x, cos, sin):
    """Turn each pair (i, i + dim/2) by its position's angle."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def answer(llama, store, ids, count=16):
    """Return `count` greedy tokens after `ids`; keep the state for whoever continues them."""
    started = time.perf_counter()
    sequence = store.begin(ids, max_new_tokens=count)
    with sequence:
        fed = list(ids)
        logits = llama.forward(fed[sequence.length :], sequence)
        first_s = time.perf_counter() - started
        for _ in range(count - 1):
            fed.append(int(logits.argmax()))
            logits = llama.forward(fed[-1:], sequence)
        sequence.finish(fed)
    print(f"{len(ids):5} tokens, {sequence.found.total:5} found: first token in {first_s:5.2f} s")
    return [*fed[len(ids) :], int(logits.argmax())]


def main():
    """Answer both questions, the second with the first one's document in the store."""
    model, tokenizer = load_model("smollm2")
    spec = tierkv.CacheSpec.from_config(model.config, dtype="float32")
    namespace = tierkv.Namespace.build(spec, weights=weights_digest(model))
    llama = Llama(model)
    with tempfile.TemporaryDirectory() as directory:
        budgets = {"device": "128MiB", "host": "256MiB", "disk": "1GiB"}
        with tierkv.Store.open(directory, spec, namespace, torch_device=DEVICE, **budgets) as store:
            for question in QUESTIONS:
                ids = tokenizer(DOCUMENT + question).input_ids
                print(repr(tokenizer.decode(answer(llama, store, ids))))
            store.check()


if __name__ == "__main__":
    main()
