"""Random conversations over small tiers: nothing wrong is ever served, every slot is counted."""

import shutil
import tempfile
from contextlib import suppress

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_model import SPECS, feed, namespace

from tierkv import InvalidInputError, PinError, PoolExhaustedError, Store

ALPHABET = st.integers(1, 2)
STEPS = st.lists(ALPHABET, min_size=1, max_size=9)


class StoreMachine(RuleBasedStateMachine):
    """Few token ids, so that prefixes are shared; few slots, so that everything is evicted."""

    def __init__(self):
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="store-machine-")
        self.store = None
        self.now = 0.0
        self.running = []
        self.ended = []

    @initialize(
        spec=st.sampled_from(sorted(SPECS)),
        device=st.integers(14, 30),
        host=st.sampled_from([None, 8, 12]),
        disk=st.sampled_from([None, 6, 40]),
        policy=st.sampled_from(["lru", "ageing"]),
        write_through=st.booleans(),
        torch_device=st.sampled_from(["cpu", "sim"]),
    )
    def start(self, spec, device, host, disk, policy, write_through, torch_device):
        self.spec = SPECS[spec]
        slot = self.spec.slot_bytes
        self.options = {
            "device": device * slot,
            "host": None if host is None else host * slot,
            "disk": None if disk is None else disk * (slot + 4096),
            "policy": policy,
            "write_through": write_through,
            "torch_device": torch_device,
            "boundary_pages": 2,
        }
        self.open()

    def open(self):
        self.store = Store.open(
            self.path if self.options["disk"] else None,
            self.spec,
            namespace(self.spec),
            clock=lambda: self.now,
            **self.options,
        )

    @precondition(lambda self: len(self.running) < 2)
    @rule(steps=STEPS, base=st.integers(0, 20), restartable=st.booleans())
    def begin(self, steps, base, restartable):
        tokens = [*(self.ended[base % len(self.ended)] if self.ended else []), *steps][:36]
        try:
            sequence = self.store.begin(tokens, restartable=restartable)
        except PoolExhaustedError:
            assert self.running or self.store.stats().tiers["device"].pinned
            return
        assert sequence.length == sequence.found.total < len(tokens)
        self.running.append((sequence, tokens))

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 20), what=st.sampled_from(["forget", "cancel", "wait"]))
    def announce(self, which, what):
        announcement = self.store.announce([*self.ended[which % len(self.ended)], 1])
        if what == "cancel":
            announcement.cancel()
        elif what == "wait":
            assert announcement.wait(30)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1), cut=st.integers(1, 12))
    def compute(self, which, cut):
        sequence, tokens = self.running[which % len(self.running)]
        stop = min(len(tokens), sequence.length + cut)
        if stop > sequence.length:
            try:
                feed(sequence, tokens, stop)
            except PoolExhaustedError:
                sequence.abandon()
                self.running.remove((sequence, tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1), turn_end=st.booleans())
    def commit(self, which, turn_end):
        sequence, tokens = self.running[which % len(self.running)]
        sequence.commit(tokens, turn_end=turn_end)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def finish(self, which):
        sequence, tokens = self.running.pop(which % len(self.running))
        length = sequence.length
        sequence.finish(tokens)
        if length:
            self.ended.append(tokens[:length])

    @precondition(lambda self: 0 < len(self.running) < 3)
    @rule(which=st.integers(0, 1), steps=STEPS)
    def fork(self, which, steps):
        sequence, tokens = self.running[which % len(self.running)]
        self.running.append((sequence.fork(), (tokens[: sequence.length] + steps)[:40]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), back=st.integers(0, 6), steps=STEPS)
    def crop(self, which, back, steps):
        at = which % len(self.running)
        sequence, tokens = self.running[at]
        length = max(0, sequence.length - back)
        try:
            sequence.crop(length)
        except InvalidInputError:
            assert any(group.window for group in self.spec.groups)
            return
        self.running[at] = (sequence, (tokens[:length] + steps)[:40])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), floor=st.one_of(st.none(), st.integers(0, 20)))
    def keep_from(self, which, floor):
        self.running[which % len(self.running)][0].keep_from(floor)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def abandon(self, which):
        self.running.pop(which % len(self.running))[0].abandon()

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 20), kind=st.sampled_from(["end", "ttl", "pin", "unpin"]))
    def hint(self, which, kind):
        tokens = self.ended[which % len(self.ended)]
        if kind == "end":
            self.store.hint(tokens, end_of_session=True)
        elif kind == "ttl":
            self.store.hint(tokens, ttl_s=10)
        elif kind == "unpin":
            self.store.unpin("somebody")
        else:
            with suppress(PinError):
                self.store.pin(tokens, owner="somebody", ttl_s=20)

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def flush(self):
        report = self.store.flush()
        if self.options["disk"] is None:
            return
        stats = self.store.stats()
        assert report.durable_pages == stats.tiers["disk"].pages or not report.ok

    @rule()
    def reopen(self):
        for sequence, _ in self.running:
            sequence.abandon()
        self.running.clear()
        self.store.close()
        self.open()

    @invariant()
    def everything_is_accounted_for(self):
        if self.store is not None:
            self.store.check()

    def teardown(self):
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.path)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
