"""A toy paged engine over tierkv: the smallest consumer of attached pools (docs/engines.md).

    python examples/toy_engine.py [DIRECTORY]

The engine owns block tensors, block tables and a tiny model in plain torch; tierkv keeps its
pages in host memory and on disk.  Several requests share a document, the store is closed and
opened again in between, and every answer is compared with one computed without any reuse.
Needs neither a GPU nor a model; takes a few seconds.
"""

import hashlib
import sys
import tempfile
from contextlib import nullcontext
from itertools import chain

import torch

from tierkv import CacheSpec, GroupKind, Namespace, OpaqueGroup, Store

VOCAB, DIM, HEADS, BLOCK, BLOCKS, WINDOW = 512, 64, 4, 8, 512, 20
WINDOWS = (None, WINDOW, None, WINDOW)  # of each layer; None attends to everything
GROUPS = (
    OpaqueGroup(
        name="full",
        kind=GroupKind.FULL,
        layers=(0, 2),
        block_bytes=2 * BLOCK * DIM * 4,  # K and V, float32
        block_tokens=BLOCK,
        blocks_per_page=2,
    ),
    OpaqueGroup(
        name="sliding",
        kind=GroupKind.SLIDING,
        layers=(1, 3),
        block_bytes=2 * BLOCK * DIM * 4,
        block_tokens=BLOCK,
        window=WINDOW,
    ),
)
SPEC = CacheSpec.opaque("toy engine/K and V apart [block, token, dim]/float32", GROUPS)
GROUP_OF = {layer: number for number, group in enumerate(GROUPS) for layer in group.layers}


def make_pool(blocks):
    """Return the engine's memory: for each layer a tensor for K and one for V."""
    return {
        layer: tuple(torch.zeros(blocks, BLOCK, DIM) for _ in "kv") for layer in sorted(GROUP_OF)
    }


class Model:
    """A few attention layers with fixed random weights; position is added to the embedding."""

    def __init__(self):
        rng = torch.Generator().manual_seed(0)
        # Apart from each other: a model with tied embeddings would only echo its last token.
        self.embed, self.head = (torch.randn(VOCAB, DIM, generator=rng) for _ in range(2))
        scale = DIM**-0.5
        self.weights = [
            [torch.randn(DIM, DIM, generator=rng) * scale for _ in "qkvo"] for _ in WINDOWS
        ]

    def forward(self, tokens, start, layer_state):
        """Return the next token after ``tokens`` at [start, ...); state goes through the caller."""
        at = torch.arange(start, start + len(tokens))
        angle = at[:, None] / 50 ** (torch.arange(DIM) / DIM)
        x = self.embed[torch.tensor(tokens)] + torch.sin(angle)
        for layer, (wq, wk, wv, wo) in enumerate(self.weights):
            k, v, first = layer_state(layer, x @ wk, x @ wv)
            keys_at = torch.arange(first, first + len(k))
            seen = keys_at[None, :] <= at[:, None]
            if WINDOWS[layer] is not None:
                seen &= keys_at[None, :] > at[:, None] - WINDOWS[layer]
            q, k, v = (t.view(len(t), HEADS, -1).transpose(0, 1) for t in (x @ wq, k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + mixed.transpose(0, 1).reshape(len(tokens), DIM) @ wo
            x = x / x.norm(dim=-1, keepdim=True) * DIM**0.5
        return int((self.head @ x[-1]).argmax())


class Engine:
    """Requests over a pool of blocks; with a store behind it, or without any reuse."""

    def __init__(self, store=None):
        self.model, self.tensors = Model(), make_pool(BLOCKS)
        self.free = list(range(BLOCKS))
        self.pool = store.attach_pool(self.tensors, layout=SPEC.layout) if store else None

    def generate(self, prompt, count):
        """Return ``count`` greedy tokens after ``prompt``, and the tokens found by tier."""
        tokens, total = list(prompt), len(prompt) + count
        tables = [[self.free.pop() for _ in range(-(-total // BLOCK))] for _ in GROUPS]
        if self.pool is None:
            tokens.append(self.step(tokens, 0, tables))
            found = None
        else:
            keys = self.pool.keys_from_hashes(hashes(tokens), hash_tokens=BLOCK)
            with self.pool.match(keys, limit=len(prompt) - 1, owner="toy") as lease:
                blocks = [list(chain(*pages)) for pages in blocks_of(tables, lease.groups)]
                load = self.pool.load(lease, blocks, layerwise=True)
                tokens.append(self.step(tokens, lease.tokens, tables, keys, load))
                # Had a copy failed, the request would be computed again without it.
                assert all(result == "loaded" for group in load.wait() for result in group)
            found = lease.found
        while len(tokens) < total:
            if self.pool is not None:
                keys.extend(hashes(tokens, keys.tokens))
            tokens.append(self.step(tokens, len(tokens) - 1, tables, self.pool and keys))
        for table in tables:
            self.free += table
        return tokens[len(prompt) :], found

    def step(self, tokens, start, tables, keys=None, load=None):
        """Compute the tokens from ``start`` on; save the pages that they fill."""
        save = self.begin_save(keys, tokens, start, tables) if keys else None
        blocks = torch.tensor(tables)

        def layer_state(layer, k_new, v_new):
            with load.layer(layer) if load else nullcontext():  # the layer's pages have arrived
                k, v = self.tensors[layer]
                at = torch.arange(start, len(tokens))
                table = blocks[GROUP_OF[layer]]
                k[table[at // BLOCK], at % BLOCK] = k_new
                v[table[at // BLOCK], at % BLOCK] = v_new
                first = max(0, start - WINDOW) // BLOCK if WINDOWS[layer] else 0
                used = table[first : -(-len(tokens) // BLOCK)]
                span = len(tokens) - first * BLOCK
                state = (k[used].flatten(0, 1)[:span], v[used].flatten(0, 1)[:span], first * BLOCK)
            if save:
                save.layer(layer)  # copied behind what has been computed so far
            return state

        token = self.model.forward(tokens[start:], start, layer_state)
        if save:
            save.commit().blocks_free.wait(10)
        return token

    def begin_save(self, keys, tokens, start, tables):
        """Begin to save the pages that end in (start, len(tokens)]; None if there are none."""
        ends = [range(start // g.page_tokens, len(tokens) // g.page_tokens) for g in SPEC.groups]
        pages = [page for g, e in enumerate(ends) for page in keys.pages(g, e.start, e.stop)]
        return self.pool.begin_save(pages, list(chain(*blocks_of(tables, ends)))) if pages else None


def hashes(tokens, start=0):
    """Return the engine's own hash of each block from ``start`` on, over all tokens up to it."""
    ends = range(start + BLOCK, len(tokens) + 1, BLOCK)
    return [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in ends]


def blocks_of(tables, pages):
    """Return the block ids of numbered pages, by group and page."""
    sizes = [group.blocks_per_page for group in SPEC.groups]
    return [
        [table[number * size : (number + 1) * size] for number in numbers]
        for table, numbers, size in zip(tables, pages, sizes, strict=True)
    ]


def main(directory=None):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    text = torch.randint(VOCAB, (900,)).tolist()
    document, questions = text[:600], [text[600:640], text[640:700], text[700:]]
    plain, chat = Engine(), []
    with tempfile.TemporaryDirectory() as scratch:
        for opening in ("first", "second"):
            with open_store(directory or f"{scratch}/store") as store:
                engine = Engine(store)
                for number, question in enumerate(questions):
                    prompt = document + question + chat * (number == 2)
                    answer, found = engine.generate(prompt, 24)
                    assert answer == plain.generate(prompt, 24)[0], "an answer differs"
                    chat = answer
                    print(
                        f"{opening} opening, request {number}: {len(prompt)} tokens, "
                        f"{found.host} from host memory, {found.disk} from disk, "
                        f"{len(prompt) - found.total} computed; same answer as without reuse"
                    )
                store.check()


def open_store(directory):
    namespace = Namespace.build(SPEC, weights="toy weights, seed 0")
    return Store.open(directory, SPEC, namespace, device=None, host="64MiB", disk="256MiB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
