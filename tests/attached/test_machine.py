"""Random histories of an attached pool against a model that only remembers what was stored."""

import tempfile
from pathlib import Path

from engine_pools import BY_NAME, Bench
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv import LoadResult, SaveResult
from tierkv.storage.testing import ManualClock

TALKS, UNITS, HOST = 3, 4, 20
talks = st.integers(0, TALKS - 1)
units = st.integers(1, UNITS)


class PoolMachine(RuleBasedStateMachine):
    """The disk never fills, so nothing that was stored may ever be missed."""

    CASE = "hybrid"

    def __init__(self):
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.stored = set()
        self.leases, self.saves = [], []
        self.open()

    def open(self):
        self.clock = ManualClock()
        self.bench = Bench(
            BY_NAME[self.CASE],
            Path(self.directory.name) / "store",
            host=HOST,
            disk=400,
            blocks=400,
            clock=self.clock.monotonic,
        )

    def keys(self, talk, count):
        return self.bench.keys(talk, count, shared=1)

    def expected(self, keys, computed=0):
        """Return the longest prefix by trying every length."""
        bench = self.bench
        for length in range(keys.tokens, computed, -bench.unit):
            pages = [
                page
                for number, group in enumerate(bench.spec.groups)
                for page in keys.pages(number, 0, length // group.page_tokens)
                if page.number in group.needed_pages(length) and page.end_token > computed
            ]
            if all(page.key in self.stored for page in pages):
                return length
        return computed

    @rule(talk=talks, count=units, data=st.data())
    def save(self, talk, count, data):
        keys = self.keys(talk, count)
        pages = self.bench.all_pages(keys)
        chosen = data.draw(st.sets(st.sampled_from(range(len(pages)))) | st.none())
        pages = pages if chosen is None else [pages[at] for at in sorted(chosen)]
        results = self.bench.save(keys, pages)
        saving = {page.key for save, _ in self.saves for page in save.pages}
        for page, result in zip(pages, results, strict=True):
            if result is SaveResult.STORED:
                assert page.key not in self.stored
                self.stored.add(page.key)
            elif result is SaveResult.DUPLICATE:
                assert page.key in self.stored | saving
            else:
                assert result is SaveResult.NO_ROOM
                assert self.leases or self.saves

    @rule(talk=talks, count=units)
    def begin_save(self, talk, count):
        if len(self.saves) < 2:
            pages = self.bench.all_pages(self.keys(talk, count))
            blocks = self.bench.take_for(pages)
            self.saves.append((self.bench.pool.begin_save(pages, blocks), blocks))

    @precondition(lambda self: self.saves)
    @rule(commit=st.booleans())
    def end_save(self, commit):
        save, blocks = self.saves.pop()
        layers = sorted(self.bench.spec.layer_to_group)
        for layer in layers if commit else layers[:2]:
            self.bench.compute(save.pages, blocks, layers={layer})
            save.layer(layer)
        if commit:
            save.commit()
        else:
            save.cancel()
        assert save.blocks_free.wait(10)
        for page, result in zip(save.pages, save.wait(), strict=True):
            if result is SaveResult.STORED:
                assert commit
                self.stored.add(page.key)
        self.bench.give(blocks)

    @rule(talk=talks, count=units, computed=st.integers(0, 40), layerwise=st.booleans())
    def resume(self, talk, count, computed, layerwise):
        keys = self.keys(talk, count)
        computed = min(4 * computed, keys.tokens)  # any number of blocks of four tokens
        tokens = self.bench.resume(keys, computed=computed, layerwise=layerwise)
        if self.leases or self.saves:  # they may hold what reading would need
            assert tokens <= self.expected(keys, computed)
        else:
            assert tokens == self.expected(keys, computed)

    @rule(talk=talks, count=units)
    def look(self, talk, count):
        keys = self.keys(talk, count)
        assert self.bench.resume_tokens(keys, wait_s=0) <= self.expected(keys)

    @rule(talk=talks, count=units, ttl_s=st.integers(1, 20))
    def lease(self, talk, count, ttl_s):
        if len(self.leases) < 2:
            keys = self.keys(talk, count)
            self.leases.append((self.bench.pool.match(keys, ttl_s=ttl_s), keys))

    @precondition(lambda self: self.leases)
    @rule(release=st.booleans())
    def use_lease(self, release):
        lease, keys = self.leases[0]
        held = lease.held
        blocks = self.bench.take_lease(lease)
        results = {r for group in self.bench.pool.load(lease, blocks).wait() for r in group}
        if held:
            assert results <= {LoadResult.LOADED}
            self.bench.expect_loaded(lease, keys, blocks)
        else:
            assert results <= {LoadResult.MISSED}
        self.bench.give(blocks)
        if release or not held:
            lease.release()
            self.leases.pop(0)

    @rule(seconds=st.integers(1, 15))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.bench.pool.poll()
        self.leases = [(lease, keys) for lease, keys in self.leases if lease.held]

    @rule()
    def flush(self):
        assert self.bench.store.flush().ok

    @rule()
    def reopen(self):
        self.leases, self.saves = [], []
        self.bench.close()
        self.open()

    @invariant()
    def everything_is_accounted_for(self):
        self.bench.store.check()

    def teardown(self):
        self.bench.close()
        self.directory.cleanup()


class OverlaidMachine(PoolMachine):
    CASE = "overlaid"


TestHybrid, TestOverlaid = PoolMachine.TestCase, OverlaidMachine.TestCase
TestHybrid.settings = TestOverlaid.settings = settings(
    max_examples=8,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
