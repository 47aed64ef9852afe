"""Tensors that do not fit the spec are refused when the pool is attached."""

import pytest
import torch
from engine_pools import BY_NAME, Bench, full, sliding
from toy_model import FULL, namespace, states, turn

from tierkv import CacheSpec, GroupKind, InvalidInputError, OpaqueGroup, SpecError, Store
from tierkv.attached.views import domains, group_views

SPEC = CacheSpec.opaque("x", [full((0, 1))])
TWO = CacheSpec.opaque("x", [full((0,)), sliding((1,))])


def blocks(count=10, size=512):
    return torch.zeros(count, size, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({0: blocks()}, "layers"),
        ({0: blocks(), 1: blocks(), 2: blocks()}, "layers"),
        ({0: blocks(), 1: blocks(size=500)}, "500 bytes.*512"),
        ({0: blocks(), 1: (blocks(size=256), blocks(size=128))}, "256 \\+ 128 bytes"),
        ({0: blocks(), 1: blocks(count=11)}, "number of blocks"),
        ({0: blocks(), 1: ()}, "0 bytes"),
        ({0: blocks(), 1: "tensor"}, "expected tensors"),
        ({0: blocks(), 1: torch.zeros((), dtype=torch.uint8)}, "expected tensors"),
        ({0: blocks(), 1: blocks(1).expand(10, 512)}, "overlap"),
        ({0: blocks(), 1: blocks(1, 900).as_strided((10, 512), (32, 1))}, "overlap"),
        ({0: blocks(), 1: torch.zeros(10, 512, device="meta")}, "lies on meta"),
    ],
)
def test_tensors_that_do_not_fit(tensors, message):
    with pytest.raises(InvalidInputError, match=message):
        group_views(SPEC, tensors, "cpu")


def test_layers_of_one_group_share_no_bytes():
    same = blocks()
    with pytest.raises(InvalidInputError, match="share"):
        group_views(SPEC, {0: same, 1: same}, "cpu")


def test_groups_may_lie_over_each_other_block_by_block():
    same = blocks()
    assert len(set(domains(group_views(TWO, {0: same, 1: same}, "cpu")))) == 1
    assert len(set(domains(group_views(TWO, {0: same, 1: blocks()}, "cpu")))) == 2
    beside = torch.zeros(10, 2, 512, dtype=torch.uint8)  # between each other, but apart
    assert len(set(domains(group_views(TWO, {0: beside[:, 0], 1: beside[:, 1]}, "cpu")))) == 2


def test_groups_shifted_against_each_other_are_refused():
    memory = blocks(11)
    views = group_views(TWO, {0: memory[:10], 1: memory[1:]}, "cpu")
    with pytest.raises(InvalidInputError, match="block by block"):
        domains(views)


@pytest.mark.parametrize("name", ["kv-in-one", "block-first", "padded"])
def test_evenly_spaced_layers_move_in_one_copy_a_run(benches, tmp_path, name):
    bench = Bench(BY_NAME[name], tmp_path / "s")
    benches.append(bench)
    planes = bench.pool.blocks.views[0].planes
    assert len(planes) == {"kv-in-one": 2, "block-first": 1, "padded": 3}[name]
    pages = bench.all_pages(bench.keys("a", 4))
    ids = bench.take_for(pages, adjacent=True)
    bench.compute(pages, ids)
    before = bench.store._core.device.stats().copies
    bench.pool.save(pages, ids).wait()
    assert bench.store._core.device.stats().copies - before == len(planes)
    assert bench.resume(bench.keys("a", 4)) == 4 * bench.unit


def test_specs_that_cannot_be():
    with pytest.raises(SpecError, match="multiple"):
        full((0,), block_bytes=510)
    with pytest.raises(SpecError, match="positive"):
        full((0,), blocks_per_page=0)
    with pytest.raises(SpecError, match="window"):
        CacheSpec.opaque("x", [sliding((0,), window=None)])
    with pytest.raises(SpecError, match="one block"):
        OpaqueGroup(
            name="s",
            kind=GroupKind.SNAPSHOT,
            layers=(0,),
            block_bytes=8,
            block_tokens=8,
            blocks_per_page=2,
        )
    with pytest.raises(SpecError, match="layout"):
        CacheSpec.opaque(" ", [full((0,))])


def test_the_block_size_is_part_of_the_identity():
    pages = [
        CacheSpec.opaque("x", [full((0,), block_bytes=b, block_tokens=t, blocks_per_page=n)])
        for b, t, n in [(512, 4, 2), (1024, 8, 1)]
    ]
    assert pages[0].groups[0].page_bytes == pages[1].groups[0].page_bytes
    assert pages[0].identity() != pages[1].identity()


def test_a_store_without_a_device_pool_runs_no_sequences(benches, tmp_path):
    bench = Bench(BY_NAME["kv-apart"], tmp_path / "s")
    benches.append(bench)
    with pytest.raises(InvalidInputError, match="attach"):
        bench.store.begin([1, 2, 3])
    assert bench.store.stats().tiers["device"].capacity_pages == 0


def test_an_engine_resumes_what_a_sequence_computed(tmp_path):
    """Blocks that are pages in tierkv's own order need no opaque spec, and share its keys."""
    tokens, slot = list(range(14)), FULL.slot_bytes
    tensors = {layer: (torch.zeros(8, 4, 2, 32), torch.zeros(8, 4, 2, 32)) for layer in (0, 1)}
    with (
        Store.open(
            tmp_path / "s", FULL, namespace(FULL), device=8 * slot, host="1MiB", disk="1MiB"
        ) as store,
        store.attach_pool(tensors, layout=FULL.layout) as pool,
    ):
        turn(store, tokens)
        assert store.flush().ok
        keys = pool.keys_from_tokens(tokens)
        with pool.match(keys) as lease:
            assert lease.tokens == 12  # whole pages
            pool.load(lease, [[5, 2, 7]]).wait()
        for layer, parts in tensors.items():
            for part, right in zip(parts, states(FULL, layer, tokens, 0, 12), strict=True):
                assert torch.equal(part[[5, 2, 7]].flatten(0, 1).transpose(0, 1), right)
        more = pool.keys_from_tokens([*tokens, 14, 15])
        for layer, parts in tensors.items():
            for part, new in zip(
                parts, states(FULL, layer, [*tokens, 14, 15], 12, 16), strict=True
            ):
                part[1] = new.transpose(0, 1)
        pool.save(more.pages(0), [[5], [2], [7], [1]]).wait()
        assert turn(store, [*tokens, 14, 15, 16]).total == 16
        store.check()


def test_pages_in_a_device_pool_beside_are_brought_to_host_memory(tmp_path):
    tensors = {layer: (torch.zeros(8, 4, 2, 32), torch.zeros(8, 4, 2, 32)) for layer in (0, 1)}
    slot = FULL.slot_bytes
    with (
        Store.open(
            tmp_path / "s", FULL, namespace(FULL), device=40 * slot, host=8 * slot, disk="1MiB"
        ) as store,
        store.attach_pool(tensors, layout=FULL.layout) as pool,
    ):
        for talk in range(4):  # all stay on the device; the first ones have left host memory
            turn(store, [100 * talk + at for at in range(16)])
            store.flush()
        tokens = list(range(16))
        keys = pool.keys_from_tokens(tokens)
        with pool.match(keys, wait_s=0) as lease:
            assert lease.tokens == 0
        with pool.match(keys) as lease:
            assert lease.found.disk == 16
            pool.load(lease, [[3, 1, 2, 0]]).wait()
        for layer, parts in tensors.items():
            for part, right in zip(parts, states(FULL, layer, tokens, 0, 16), strict=True):
                assert torch.equal(part[[3, 1, 2, 0]].flatten(0, 1).transpose(0, 1), right)
        store.check()
