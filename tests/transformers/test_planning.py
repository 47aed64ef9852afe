"""The planner's decisions in `kv.generate`: the same tokens whichever way is taken."""

import pytest
import torch

from tierkv.control_plane.costs import ComputeCost, Link
from tierkv.integrations.transformers import TierKV
from tierkv.integrations.transformers.timing import compute_cost
from tierkv.tiers import Tier


@pytest.fixture
def kv(tiny, tmp_path):
    budgets = {"device": "192KiB", "host": "1MiB"}
    with TierKV.attach(tiny("llama"), tmp_path, page_tokens=16, **budgets) as kv:
        yield kv


def weigh(kv, page_s, token_s):
    """Expect so many seconds a page from below the device, and a token of the forward pass."""
    kv.store._loader._planning.observe()
    size = kv.store.spec.slot_bytes
    for tier in (Tier.HOST, Tier.DISK):
        kv.store.costs.links[tier] = Link(0.0, size / page_s)
    kv.store.costs.compute = ComputeCost.from_model(10**6, 1, 1, 1, flops_per_s=2e6 / token_s)


def generate(kv, ids):
    output = kv.generate(ids, max_new_tokens=6, do_sample=False)
    kv.check()
    return output


@pytest.mark.parametrize(
    ("page_s", "token_s", "decision"),
    [(1e-2, 1.0, "load"), (1e-2, 1e-3, "split"), (1.0, 1e-9, "compute")],
)
def test_the_same_tokens_whatever_was_decided(kv, page_s, token_s, decision):
    torch.manual_seed(0)
    ids = torch.randint(3, 90, (1, 100))
    right = kv.model.generate(ids, max_new_tokens=6, do_sample=False)
    kv.store.costs.compute = None
    assert torch.equal(generate(kv, ids), right)
    fill(kv)
    weigh(kv, page_s, token_s)
    before = kv.stats().counters["plans"][decision]
    assert torch.equal(generate(kv, ids), right)
    assert kv.stats().counters["plans"][decision] == before + 1


def fill(kv):
    """Push what was there off the device."""
    pages = kv.stats().tiers["device"].capacity_pages
    generate(kv, torch.full((1, (pages - 1) * 16), 5))


def test_attaching_lets_the_planner_weigh_and_forwards_are_measured(tiny):
    model = tiny("llama")
    with TierKV.attach(model, device="1MiB", page_tokens=16) as kv:
        kv.store.costs.compute = compute_cost(model, kv.store.spec)
        assert not kv.store.costs.compute.known
        generate(kv, torch.randint(3, 90, (1, 64)))
        assert kv.store.costs.compute.known
        kv.store.costs.check()
