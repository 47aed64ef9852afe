"""What every attached pool must do, whatever its layout: a class of tests to inherit.

A subclass (or its module) gives a fixture ``open_bench``: a function that takes options of
``engine_pools.Bench`` and returns one over a fresh pool; called again with the same ``path``
after ``close`` it reopens the store.  An adapter runs the suite by handing in an
``EngineCase`` of its own, whose ``make`` returns the tensors that its engine registers.
"""

from __future__ import annotations

import pytest

from tierkv import (
    InvalidInputError,
    LoadResult,
    NamespaceMismatchError,
    SaveResult,
    StoreClosedError,
)
from tierkv.storage.testing import ManualClock


class PoolConformance:
    """The contract of ``docs/engines.md``, one test a promise."""

    def test_pages_come_back_byte_for_byte(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 3)
        assert set(bench.save(keys)) == {SaveResult.STORED}
        assert bench.resume(keys) == 3 * bench.unit
        assert bench.resume(bench.keys("b", 3)) == 0

    def test_layers_come_back_behind_the_gate(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        bench.save(keys)
        with bench.pool.match(keys) as lease:
            blocks = bench.take_lease(lease)
            ticket = bench.pool.load(lease, blocks, layerwise=True)
            for layer in sorted(bench.spec.layer_to_group):
                with ticket.layer(layer) as arrived:
                    assert arrived
                    bench.expect_loaded(lease, keys, blocks, layers={layer})
            assert all(r is LoadResult.LOADED for group in ticket.wait() for r in group)
        bench.store.check()

    def test_layers_are_saved_behind_computation(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        pages = bench.all_pages(keys)
        blocks = bench.take_for(pages)
        save = bench.pool.begin_save(pages, blocks)
        for layer in sorted(bench.spec.layer_to_group):
            assert not save.blocks_free.is_set()
            bench.compute(pages, blocks, layers={layer})
            save.layer(layer)
            bench.store.check()
            assert bench.pool.match(keys, wait_s=0).tokens == 0, "visible before it was whole"
        assert set(save.commit().wait()) == {SaveResult.STORED}
        assert save.blocks_free.wait(5)
        bench.wipe()
        assert bench.resume(keys) == 2 * bench.unit

    def test_only_the_blocks_named_change(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        bench.save(keys)
        with bench.pool.match(keys) as lease:
            blocks = bench.take_lease(lease, adjacent=True)
            kept = [ids[0] for ids in blocks if ids]  # as if the engine held these itself
            named = [[None, *ids[1:]] if ids else [] for ids in blocks]
            before = bench.image()
            bench.pool.load(lease, named).wait()
            after = bench.image()
            bench.expect_loaded(lease, keys, named)
        loaded = {block for ids in named for block in ids}
        assert {b for (_, b), data in after.items() if data != before[_, b]} <= loaded
        assert not loaded & set(kept)

    def test_saving_leaves_the_blocks_alone(self, open_bench):
        bench = open_bench()
        pages = bench.all_pages(bench.keys("a", 2))
        blocks = bench.take_for(pages, adjacent=True)
        bench.compute(pages, blocks)
        before = bench.image()
        bench.pool.save(pages, blocks).wait()
        assert bench.image() == before

    def test_the_longest_common_prefix_is_found(self, open_bench):
        bench = open_bench()
        bench.save(bench.keys("a", 4, shared=2))
        assert bench.resume(bench.keys("b", 4, shared=2)) == 2 * bench.unit
        assert bench.resume(bench.keys("a", 4, shared=2), limit=3 * bench.unit + 1) == (
            3 * bench.unit
        )

    def test_what_the_engine_holds_itself_is_not_leased(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 3)
        bench.save(keys)
        with bench.pool.match(keys, computed=bench.unit) as lease:
            assert lease.tokens == 3 * bench.unit
            assert lease.found.total == 2 * bench.unit
            for group, numbers in zip(bench.spec.groups, lease.groups, strict=True):
                assert numbers.start * group.page_tokens >= bench.unit
                assert numbers.stop * group.page_tokens == 3 * bench.unit
        with bench.pool.match(keys, computed=3 * bench.unit) as lease:
            assert lease.tokens == 3 * bench.unit
            assert lease.found.total == 0

    def test_what_the_engine_holds_itself_need_not_be_there(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 3)
        bench.save(keys, [p for p in bench.all_pages(keys) if p.end_token > bench.unit])
        assert bench.resume(keys, computed=bench.unit) == 3 * bench.unit
        if bench.spec.groups[bench.spec.anchor].kind.needs_every_page:
            assert bench.resume(keys) == 0

    def test_pages_held_already_are_not_copied_again(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        bench.save(keys)
        pages = bench.all_pages(keys)
        bench.wipe()
        blocks = bench.take_for(pages)  # whatever these hold must not be looked at
        assert set(bench.pool.save(pages, blocks).wait()) == {SaveResult.DUPLICATE}
        assert bench.resume(keys) == 2 * bench.unit

    def test_pages_being_saved_are_not_copied_again(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 1)
        pages = bench.all_pages(keys)
        blocks = bench.take_for(pages)
        bench.compute(pages, blocks)
        first = bench.pool.begin_save(pages, blocks)
        held = bench.store.stats().tiers["host"].held
        assert held == len(pages)
        second = bench.pool.begin_save(pages, bench.take_for(pages))
        assert bench.store.stats().tiers["host"].held == held
        assert set(second.commit().wait()) == {SaveResult.DUPLICATE}
        for layer in bench.spec.layer_to_group:
            first.layer(layer)
        assert set(first.commit().wait()) == {SaveResult.STORED}
        assert bench.resume(keys) == bench.unit

    def test_pages_survive_a_restart(self, open_bench, tmp_path):
        bench = open_bench(path=tmp_path / "s")
        bench.save(bench.keys("a", 3))
        assert bench.store.flush().ok
        bench.close()
        bench = open_bench(path=tmp_path / "s")
        keys = bench.keys("a", 3)
        with bench.pool.match(keys, wait_s=0) as lease:
            assert lease.tokens == 0, "counted before it was read and verified"
        with bench.pool.match(keys) as lease:
            assert lease.tokens == lease.found.disk == 3 * bench.unit
        assert bench.resume(keys, wait_s=0) == 3 * bench.unit

    def test_closing_the_store_keeps_what_was_saved(self, open_bench, tmp_path):
        bench = open_bench(path=tmp_path / "s")
        pages = bench.all_pages(bench.keys("a", 2))
        blocks = bench.take_for(pages)
        bench.compute(pages, blocks)
        bench.pool.save(pages, blocks)  # nobody waits for it
        bench.close()
        bench = open_bench(path=tmp_path / "s")
        assert bench.resume(bench.keys("a", 2)) == 2 * bench.unit

    def test_other_weights_or_another_layout_share_nothing(self, open_bench, tmp_path):
        bench = open_bench(path=tmp_path / "s")
        bench.save(bench.keys("a", 2))
        bench.close()
        bench = open_bench(path=tmp_path / "s", weights="others")
        assert bench.resume(bench.keys("a", 2)) == 0
        with pytest.raises(NamespaceMismatchError, match="layout"):
            bench.store.attach_pool(bench.tensors, layout=bench.spec.layout + "/amx")

    def test_a_lease_that_ends_gives_misses(self, open_bench):
        clock = ManualClock()
        bench = open_bench(clock=clock.monotonic)
        keys = bench.keys("a", 2)
        bench.save(keys)
        lease = bench.pool.match(keys, ttl_s=10)
        clock.advance(9)
        assert lease.renew(10)
        clock.advance(9)
        assert lease.held
        clock.advance(2)
        before = bench.image()
        ticket = bench.pool.load(lease, bench.take_lease(lease))
        assert all(r is LoadResult.MISSED for group in ticket.wait() for r in group)
        with ticket.layer(0) as arrived:
            assert not arrived
        assert bench.image() == before
        assert not lease.renew(10)
        assert bench.pool.stats().leases == 0
        assert bench.pool.stats().leases_expired == 1
        bench.store.check()

    def test_a_load_goes_on_when_its_lease_ends(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        bench.save(keys)
        lease = bench.pool.match(keys)
        blocks = bench.take_lease(lease)
        ticket = bench.pool.load(lease, blocks)
        lease.release()
        lease.release()
        assert all(r is LoadResult.LOADED for group in ticket.wait() for r in group)
        bench.expect_loaded(lease, keys, blocks)
        bench.store.check()

    def test_wrong_block_ids_move_nothing(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        bench.save(keys)
        lease = bench.pool.match(keys)
        right = bench.take_lease(lease)
        pages = bench.all_pages(bench.keys("b", 2))
        fresh = bench.take_for(pages)
        first, *rest = right
        before = bench.image()
        for wrong, message in [
            ([[bench.blocks, *first[1:]], *rest], "not in"),
            ([[-1, *first[1:]], *rest], "not in"),
            ([["1", *first[1:]], *rest], "integer"),
            ([first[1:], *rest], "block ids"),
            (rest, "layer groups"),
        ]:
            with pytest.raises(InvalidInputError, match=message):
                bench.pool.load(lease, wrong)
        if len(first) > 1:
            with pytest.raises(InvalidInputError, match="twice"):
                bench.pool.load(lease, [[first[1], *first[1:]], *rest])
        with pytest.raises(InvalidInputError, match="twice"):
            bench.pool.save(pages, [fresh[1], *fresh[1:]])
        with pytest.raises(InvalidInputError, match="not in"):
            bench.pool.save(pages, [[bench.blocks] * len(fresh[0]), *fresh[1:]])
        with pytest.raises(InvalidInputError, match="blocks"):
            bench.pool.save(pages, [[*fresh[0], 0], *fresh[1:]])
        with pytest.raises(InvalidInputError, match="blocks of"):
            bench.pool.save(pages, fresh[1:])
        with pytest.raises(InvalidInputError, match="named twice"):
            bench.pool.save([pages[0], pages[0]], fresh[:2])
        assert bench.image() == before
        bench.store.check()
        lease.release()
        assert bench.resume(bench.keys("b", 2)) == 0

    def test_blocks_of_a_running_save_cannot_be_used(self, open_bench):
        bench = open_bench()
        keys, other = bench.keys("a", 2), bench.keys("b", 2)
        bench.save(keys)
        pages = bench.all_pages(other)
        blocks = bench.take_for(pages)
        save = bench.pool.begin_save(pages, blocks)
        with bench.pool.match(keys) as lease:
            own = bench.take_lease(lease)
            last = next(page.group for page in pages)
            own[last][0] = blocks[0][0]
            with pytest.raises(InvalidInputError, match="still used"):
                bench.pool.load(lease, own)
        third = bench.all_pages(bench.keys("c", 1))[:1]
        with pytest.raises(InvalidInputError, match="still used"):
            bench.pool.save(third, blocks[:1])
        bench.store.check()
        save.cancel()
        assert save.blocks_free.wait(5)
        bench.compute(third, blocks[:1])
        assert bench.pool.save(third, blocks[:1]).wait() == (SaveResult.STORED,)

    def test_a_save_cancelled_midway_leaves_nothing(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        pages = bench.all_pages(keys)
        blocks = bench.take_for(pages)
        bench.compute(pages, blocks)
        save = bench.pool.begin_save(pages, blocks)
        save.layer(min(bench.spec.layer_to_group))
        save.cancel()
        assert save.blocks_free.wait(5)
        assert set(save.results()) == {SaveResult.FAILED}
        for late in (lambda: save.layer(max(bench.spec.layer_to_group)), save.commit):
            with pytest.raises(StoreClosedError):
                late()
        bench.store.check()
        assert bench.store.stats().tiers["host"].held == 0
        assert bench.resume(keys) == 0
        assert set(bench.save(keys)) == {SaveResult.STORED}

    def test_a_save_is_committed_with_every_layer_or_not(self, open_bench):
        bench = open_bench()
        pages = bench.all_pages(bench.keys("a", 1))
        save = bench.pool.begin_save(pages, bench.take_for(pages))
        first = min(bench.spec.layer_to_group)
        save.layer(first)
        with pytest.raises(InvalidInputError, match="before"):
            save.layer(first)
        with pytest.raises(InvalidInputError, match="holds layers"):
            save.layer(99)
        if len(bench.spec.layer_to_group) > 1:
            with pytest.raises(InvalidInputError, match="not been saved"):
                save.commit()
        save.cancel()

    def test_a_closed_pool_gives_everything_back(self, open_bench):
        bench = open_bench()
        keys = bench.keys("a", 2)
        bench.save(keys)
        lease = bench.pool.match(keys)
        blocks = bench.take_lease(lease)
        assert bench.pool.pin(keys, owner="me") > 0
        pages = bench.all_pages(bench.keys("b", 1))
        save = bench.pool.begin_save(pages, bench.take_for(pages))
        bench.pool.close()
        bench.pool.close()
        assert set(save.results()) == {SaveResult.FAILED}
        tier = bench.store.stats().tiers["host"]
        assert (tier.held, tier.pinned) == (0, 0)
        assert not lease.held
        for call in (
            lambda: bench.pool.match(keys),
            lambda: bench.pool.load(lease, blocks),
            lambda: bench.pool.save([], []),
            lambda: bench.pool.pin(keys, owner="me"),
        ):
            with pytest.raises(StoreClosedError, match="closed"):
                call()
        bench.store.check()
        bench.pool = bench.store.attach_pool(bench.tensors, layout=bench.spec.layout)
        assert bench.resume(bench.keys("a", 2)) == 2 * bench.unit
