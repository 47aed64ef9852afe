"""Pools in the layouts that engines use pass the whole contract."""

import pytest
from engine_pools import CASES, Bench
from pool_conformance import PoolConformance


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def open_bench(request, benches, tmp_path):
    def make(path=tmp_path / "store", **options):
        benches.append(Bench(request.param, path, **options))
        return benches[-1]

    return make


class TestLayouts(PoolConformance):
    pass
