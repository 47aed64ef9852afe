"""Keys from an engine's hashes: unique by namespace and group, parents that keep trees right."""

import hashlib

import pytest
from engine_pools import BY_NAME, Bench, full, sliding

from tierkv import CacheSpec, InvalidInputError, Namespace, NamespaceMismatchError
from tierkv.attached.keys import HashKeys, TokenKeys

SPEC = CacheSpec.opaque(
    "x", [sliding((0,), block_tokens=4), full((1,), block_tokens=4, blocks_per_page=4)]
)
SPACE = Namespace.build(SPEC, weights="w")


def hash_keys(count, space=SPACE, size=32, **options):
    keys = HashKeys(SPEC, space, hash_tokens=4, **options)
    keys.extend(hashlib.sha512(bytes([at])).digest()[:size] for at in range(count))
    return keys


def test_keys_depend_on_namespace_group_and_hash():
    other = Namespace.build(SPEC, weights="other")
    made = [hash_keys(8), hash_keys(8, other), hash_keys(8, size=16), hash_keys(8, size=64)]
    keys = [page.key for keys in made for g in (0, 1) for page in keys.pages(g)]
    assert len(keys) == 4 * (8 + 2)
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert hash_keys(8).pages(1) == hash_keys(8).pages(1)


def test_a_page_is_known_by_the_hash_at_its_last_token():
    keys = hash_keys(9)
    (first, second) = keys.pages(1)
    assert first.engine_hash == hashlib.sha512(bytes([3])).digest()[:32]
    assert (second.parent, second.parent_hash) == (first.key, first.engine_hash)
    assert (second.end_token, second.num_tokens) == (32, 16)
    assert first.parent == SPACE.root(1)
    assert keys.full_pages(0) == 9
    with pytest.raises(InvalidInputError, match="full pages"):
        keys.pages(1, 0, 3)


def test_window_pages_hang_below_the_boundary_they_serve():
    keys = hash_keys(9)
    boundaries = [page.key for page in keys.pages(1)]
    parents = [page.parent for page in keys.pages(0)]
    assert parents[:4] == [boundaries[0]] * 4
    assert parents[4:8] == [boundaries[1]] * 4
    assert parents[8] == boundaries[1]  # the next one is growing still
    early = hash_keys(2)
    assert [page.parent for page in early.pages(0)] == [SPACE.root(1)] * 2


def test_keys_grow_as_if_made_at_once():
    grown = hash_keys(3)
    grown.extend(hashlib.sha512(bytes([at])).digest()[:32] for at in range(3, 9))
    assert grown.tokens == 36
    assert [grown.pages(g) for g in (0, 1)] == [hash_keys(9).pages(g) for g in (0, 1)]
    tokens = TokenKeys(SPEC, SPACE)
    for part in (range(7), range(7, 20), range(20, 40)):
        tokens.extend(part)
    whole = TokenKeys(SPEC, SPACE)
    whole.extend(range(40))
    assert tokens.pages(1) == whole.pages(1)
    assert tokens.pages(1)[1].token_ids.tolist() == list(range(16, 32))


def test_hashes_may_begin_in_the_middle():
    whole = hash_keys(12)
    rest = HashKeys(
        SPEC, SPACE, hash_tokens=4, start_token=16, parent_hash=whole.pages(1)[0].engine_hash
    )
    rest.extend(hashlib.sha512(bytes([at])).digest()[:32] for at in range(4, 12))
    assert rest.pages(1, 1) == whole.pages(1, 1)
    assert rest.pages(0, 4) == whole.pages(0, 4)
    with pytest.raises(InvalidInputError, match="full pages"):
        rest.pages(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HashKeys(SPEC, SPACE, hash_tokens=3), "divide"),
        (lambda: HashKeys(SPEC, SPACE, hash_tokens=0), "divide"),
        (lambda: HashKeys(SPEC, SPACE, hash_tokens=4, start_token=4), "inside a page"),
        (lambda: hash_keys(1).extend(["text"]), "bytes"),
        (lambda: hash_keys(1).extend([b""]), "bytes"),
        (lambda: hash_keys(1).extend([b"x"], token_ids=range(5)), "5 token ids"),
        (lambda: hash_keys(1).pages(2), "no layer group"),
    ],
)
def test_what_cannot_be_a_key(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_keys_of_another_store_are_refused(benches, tmp_path):
    for weights in ("a", "b"):
        benches.append(Bench(BY_NAME["kv-apart"], tmp_path / weights, weights=weights))
    with pytest.raises(NamespaceMismatchError, match="another store"):
        benches[0].pool.match(benches[1].keys("talk", 1))
    with pytest.raises(InvalidInputError, match="computed"):
        benches[0].pool.match(benches[0].keys("talk", 1), computed=-1)
    with pytest.raises(InvalidInputError, match="wait_s"):
        benches[0].pool.match(benches[0].keys("talk", 1), wait_s=-1)
    with pytest.raises(InvalidInputError, match="ttl_s"):
        benches[0].pool.match(benches[0].keys("talk", 1), ttl_s=0)
