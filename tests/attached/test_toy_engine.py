"""The example engine: its pool keeps the contract, its answers are those without reuse."""

import importlib.util
from pathlib import Path

import pytest
from engine_pools import Bench, EngineCase
from pool_conformance import PoolConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_engine.py"


@pytest.fixture(scope="module")
def toy_engine():
    spec = importlib.util.spec_from_file_location("toy_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPool(PoolConformance):
    @pytest.fixture
    def open_bench(self, toy_engine, benches, tmp_path):
        case = EngineCase("toy-engine", toy_engine.GROUPS, toy_engine.make_pool)

        def make(path=tmp_path / "store", **options):
            benches.append(Bench(case, path, **options))
            return benches[-1]

        return make


def test_answers_are_those_without_reuse(toy_engine, tmp_path, capsys):
    toy_engine.main(tmp_path / "store")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("first opening, request 0: 640 tokens, 0 from host memory, 0 from")
    assert "592 from host memory" in lines[1]  # the document, whole pages of it
    assert "624 from disk, 16 computed" in lines[3]  # after a restart


def test_an_engine_that_is_given_wrong_state_answers_otherwise(toy_engine, tmp_path):
    """The check above can fail: states that are not what was saved change the answer."""
    prompt = list(range(100, 300))
    with toy_engine.open_store(tmp_path / "store") as store:
        engine = toy_engine.Engine(store)
        right, _ = engine.generate(prompt, 24)
        core = store._core
        core.host_memory.zero_()
        wrong, found = engine.generate(prompt, 24)
    assert found.total > 0
    assert wrong != right
