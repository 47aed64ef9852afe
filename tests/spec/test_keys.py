"""Identity: what must differ differs, what must agree agrees, in every process."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from toy_model import FULL, LATENT, MIXED

from tierkv import InvalidInputError, Namespace
from tierkv.identity.keys import KeyChain, as_tokens

BASE = {"weights": "w", "adapter": "", "salt": "", "tp_rank": 0, "tp_size": 1}


def digest(spec=FULL, **changed):
    return Namespace.build(spec, **{**BASE, **changed}).digest


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "w2"},
        {"adapter": "lora"},
        {"salt": "tenant"},
        {"tp_size": 2},
        {"spec": MIXED},
        {"spec": LATENT},
    ],
)
def test_whatever_decides_the_bytes_decides_the_namespace(changed):
    assert digest(**changed) != digest()


def test_names_that_look_alike_do_not_collide():
    spellings = ["a/b", "a-b", "a_b", "a", "a\0b", "a b", 'a","b']
    made = {digest(weights=w) for w in spellings}
    made |= {digest(weights="a", adapter=x) for x in spellings}
    made |= {digest(weights="a", salt=x) for x in spellings}
    assert len(made) == 3 * len(spellings)


def test_a_tenant_s_salt_is_not_in_the_description():
    assert "s3cret" not in Namespace.build(FULL, weights="w", salt="s3cret").description


def test_ranks_are_told_apart():
    assert digest(tp_size=2, tp_rank=0) != digest(tp_size=2, tp_rank=1)
    with pytest.raises(InvalidInputError, match="tp_rank"):
        digest(tp_rank=1)


def test_a_model_without_an_identity_is_refused():
    with pytest.raises(InvalidInputError, match="weights"):
        digest(weights="")


SCRIPT = """
from tierkv import CacheSpec, GroupKind, LayerGroup, Namespace
from tierkv.identity.spec import kv_components
from tierkv.identity.keys import KeyChain, as_tokens
group = LayerGroup(name="full", kind=GroupKind.FULL, layers=(0, 1), dtype="float32",
                   components=kv_components(2, 32), page_tokens=4)
namespace = Namespace.build(CacheSpec(groups=(group,)), weights="w", salt="s")
chain = KeyChain(namespace.root(0), 4, [(5, b"image")])
tokens = as_tokens(range(11))
chain.extend(tokens)
print(chain.key(0).hex(), chain.key(1).hex(), chain.tail(tokens).hex())
"""


def test_keys_are_the_same_in_every_process():
    seen = set()
    for seed in ("0", "1", "random"):
        seen.add(
            subprocess.run(
                [sys.executable, "-c", SCRIPT],
                env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(seen) == 1
    # Written down once: a store of an earlier version must still be found.
    assert seen == {
        "1be649739582ac32abd286de7b8ef74f55806c0dbb2f91dcacc64917bbb9e1e4 "
        "bff1657e607b9e5a014e1a61a0eac0567a7e4426db9d0f7076399063e4f7c542 "
        "c8fb31c4741c17ee3e793277ba286539af142a36ebb3f46f1e1cb94b1a303ed9\n"
    }


def chain_of(tokens, extras=(), root=bytes(32), size=4):
    chain = KeyChain(root, size, extras)
    chain.extend(as_tokens(tokens))
    return chain


def test_a_key_depends_on_every_token_before():
    base = chain_of(range(16))
    for at in range(16):
        tokens = list(range(16))
        tokens[at] = 99
        other = chain_of(tokens)
        same = [base.key(page) == other.key(page) for page in range(4)]
        assert same == [page < at // 4 for page in range(4)]


def test_tail_keys_are_no_page_keys_and_depend_on_their_length():
    tokens = as_tokens(range(12))
    chain = chain_of(tokens)
    keys = {chain.tail(tokens[:n]) for n in range(1, 12) if n % 4}
    keys |= {chain.key(page) for page in range(3)}
    assert len(keys) == 9 + 3


def test_extras_count_where_they_stand():
    plain, here = chain_of(range(12)), chain_of(range(12), [(5, b"cat")])
    assert plain.key(0) == here.key(0)
    assert plain.key(1) != here.key(1)
    assert plain.key(2) != here.key(2)
    variants = [[(5, b"dog")], [(6, b"cat")], [(5, b"ca"), (5, b"t")], [(5, b"cat"), (6, b"")]]
    keys = {chain_of(range(12), extras).key(2) for extras in [[(5, b"cat")], *variants]}
    assert len(keys) == 5
    assert chain_of(range(12), [(5, b"a"), (6, b"b")]).key(2) == (
        chain_of(range(12), [(6, b"b"), (5, b"a")]).key(2)
    )


def test_groups_have_chains_of_their_own():
    namespace = Namespace.build(MIXED, weights="w")
    assert namespace.root(0) != namespace.root(1)


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint8),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
    ],
)
def test_token_ids_in_any_form_are_the_same_tokens(ids):
    assert as_tokens(ids).tolist() == [1, 2, 3]
    assert as_tokens(ids).dtype == np.uint32


def test_a_million_tokens_are_hashed_in_one_go():
    chain = chain_of(np.arange(1_000_000) % 50_000, size=64)
    assert len(chain) == 15625
