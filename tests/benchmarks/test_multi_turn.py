"""The multi-turn benchmark: its workload, a run without a model, a run with a tiny one."""

import json

import multi_turn
import pytest
from multi_turn_loop import Loop
from multi_turn_report import percentile, verdicts
from multi_turn_schedule import Workload, WorkloadError
from multi_turn_synthetic import Geometry, Synthetic
from multi_turn_tiers import TIER_METHODS, Budgets, Served

from tierkv import CommitReport

ROW = {
    "method": str,
    "tier": str,
    "ttft_p50_s": float,
    "ttft_p90_s": float,
    "ttft_p99_s": float,
    "found_ratio": float,
    "ideal_ratio": float,
    "bytes_written": int,
    "bytes_held": int,
    "peak_rss": int,
}

# Settings published for the original, and what they imply: requests, sum of prompts, unique
# tokens, ideal hit ratio, last prompt.
PUBLISHED = [
    ((256, 5, 512, 64), (1280, 2.13e6, 0.74e6, 0.692, 2816)),
    ((80, 10, 2048, 1), (800, 9.01e6, 1.64e6, 0.818, 20489)),
    ((20, 10, 2048, 16), (200, 2.27e6, 0.41e6, 0.819, 20624)),
    ((48, 60, 4096, 16), (2880, 361e6, 11.8e6, 0.967, 246704)),
    ((64, 30, 1216, 64), (1920, 38.0e6, 2.46e6, 0.939, 38336)),
]


def small(**given):
    return Workload(
        **{"clients": 5, "rounds": 3, "request_length": 96, "output_length": 8, **given}
    )


@pytest.mark.parametrize(("parameters", "implied"), PUBLISHED)
def test_sums_are_those_of_the_published_settings(parameters, implied):
    clients, rounds, length, output = parameters
    workload = Workload(clients=clients, rounds=rounds, request_length=length, output_length=output)
    requests, prompts, unique, ideal, last = implied
    assert workload.clients * workload.rounds == requests
    assert workload.sum_of_prompts == pytest.approx(prompts, rel=0.005)
    assert workload.unique_tokens == pytest.approx(unique, rel=0.01)
    assert workload.ideal_ratio == pytest.approx(ideal, abs=0.0005)
    assert workload.prompt_tokens(rounds) == last


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"barrier": True},
        {"order": "fifo"},
        {"max_parallel": 2, "question_length": 10},
        {"shared_document": 50, "rate": 100.0},
    ],
)
def test_every_turn_is_served_once_in_the_order_of_its_conversation(given):
    workload = small(**given)
    turns = workload.turns()
    for client in range(workload.clients):
        assert [t.round for t in turns if t.client == client] == [1, 2, 3]
    assert sum(t.ideal_tokens for t in turns) == workload.ideal_tokens
    assert (sum(t.gap_s for t in turns) > 0) == bool(workload.rate)
    assert turns == workload.turns()


def test_barrier_order_and_seed_decide_who_is_next():
    barrier = [t.round for t in small(barrier=True).turns()]
    assert barrier == sorted(barrier)
    one = [t.round for t in small(max_parallel=1).turns()]
    assert one != sorted(one)  # without a barrier, a client may run ahead of the others
    fifo = [t.client for t in small(order="fifo").turns()]
    assert fifo == [0, 1, 2, 3, 4] * 3
    drawn = [[t.client for t in small(seed=seed).turns()] for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    assert drawn[0] != fifo


def test_prompts_follow_from_the_seed_and_share_the_document():
    workload = small(shared_document=60, vocabulary=1000)
    prompts = workload.first_prompts()
    assert prompts == small(shared_document=60, vocabulary=1000).first_prompts()
    assert prompts != small(shared_document=60, vocabulary=1000, seed=2).first_prompts()
    assert len({tuple(p[:60]) for p in prompts}) == 1
    assert len({tuple(p[60:]) for p in prompts}) == workload.clients
    assert {len(p) for p in prompts} == {96}
    assert all((b - a) % 1000 == 1 for a, b in zip(prompts[0][60:], prompts[0][61:], strict=False))
    questions = list(workload.questions())
    assert len(questions) == 5 * 2
    assert {len(q) for q in questions} == {96}


@pytest.mark.parametrize(
    "given", [{"clients": 0}, {"order": "lifo"}, {"shared_document": 96}, {"rate": -1.0}]
)
def test_nonsense_is_refused(given):
    with pytest.raises(WorkloadError):
        small(**given)


def test_percentiles_are_those_of_the_original():
    values = [float(n) for n in range(10)]
    assert [percentile(values, q) for q in (0.5, 0.9, 0.99)] == [5.0, 9.0, 9.0]
    assert percentile([3.0], 0.99) == 3.0


def test_a_rival_that_is_as_good_is_said_to_be():
    def records(name, times):
        return [
            {"method": name, "client": n, "round": 2, "ttft_s": time}
            for n, time in enumerate(times)
        ]

    same = records("dynamic", [1.0, 1.0, 1.1]) + records("tierkv_ssd", [0.9, 1.0, 1.2])
    (found,) = verdicts(same, ["dynamic", "tierkv_ssd"])
    assert found["words"] == "as quick, within the spread"
    slow = records("dynamic", [1.0, 1.0, 1.1]) + records("tierkv_ssd", [1.9, 2.0, 2.2])
    (found,) = verdicts(slow, ["dynamic", "tierkv_ssd"])
    assert found["words"] == "slower, 2.00 times the time"


def synthetic(name, workload, path, **options):
    spec = Geometry.parse("2,2,32,float32").spec(page_tokens=16)
    budgets = Budgets(**options).options(name, spec, workload)
    return Synthetic(
        name, spec, workload, None if name == "tierkv_host" else path, verify_layers=2, **budgets
    )


@pytest.mark.parametrize("name", TIER_METHODS)
def test_without_a_model_nearly_everything_is_found_and_written_once(name, tmp_path):
    workload = small(request_length=400, question_length=40, shared_document=200, barrier=True)
    method = synthetic(name, workload, tmp_path / "store")
    loop = Loop(workload, [method])
    loop.run()
    records, side = loop.records, method.side
    found = sum(sum(r["found"].values()) for r in records)
    assert found >= 0.99 * workload.ideal_tokens - 16 * workload.clients  # the shared part page
    for number in (2, 3):
        later = [r for r in records if r["round"] == number]
        ideal = sum(r["ideal_tokens"] for r in later)
        got = sum(sum(r["found"].values()) for r in later)
        assert 0.99 * ideal <= got <= ideal
    near = "host" if name == "tierkv_host" else "disk"
    assert sum(r["found"][near] for r in records) > 0.3 * found  # the document stays nearer
    assert method.verified_bytes >= found * 2 * 2 * 2 * 32 * 4 * 0.99
    assert 0 < side.payload <= side.allowed
    assert len(side.reopen_s) == (2 if name == "tierkv_restart" else 0)
    slot = side.store.spec.slot_bytes + 4096
    held = method.held()[near] / slot
    alone = workload.clients * (workload.longest // 16 + 1)
    assert held <= alone - (workload.clients - 1) * (200 // 16)  # the document is there once
    method.close()


def test_too_small_tiers_find_less_and_stay_whole(tmp_path):
    workload = small(request_length=400, question_length=40, barrier=True, order="fifo")
    spec = Geometry.parse("2,2,32,float32").spec(page_tokens=16)
    method = synthetic("tierkv_host", workload, tmp_path, host=40 * spec.slot_bytes)
    loop = Loop(workload, [method])
    loop.run()
    assert sum(sum(r["found"].values()) for r in loop.records) < 0.7 * workload.ideal_tokens
    method.close()


def test_writing_too_much_is_noticed(tmp_path):
    workload = small()
    side = synthetic("tierkv_host", workload, tmp_path).side
    page = side.store.spec.groups[0].page_bytes
    right = CommitReport(pages=1, tail_pages=1, bytes=2 * page)
    assert side.check_bound(right, 20, 40) == 2 * page
    for report, before in (
        (CommitReport(pages=2, bytes=2 * page), 20),
        (CommitReport(pages=1, tail_pages=2, bytes=3 * page), 20),
        (CommitReport(pages=1, bytes=5 * page), 20),
    ):
        with pytest.raises(AssertionError):
            side.check_bound(report, before, 40)
    side.close()


def test_the_loop_reports_tokens_that_differ():
    class Fake:
        def __init__(self, name, tokens):
            self.name, self._tokens = name, tokens

        def begin_round(self, number):
            pass

        def serve(self, client, prompt, count):
            return Served(tokens=self._tokens, ttft_s=1.0)

    loop = Loop(small(clients=1, rounds=1), [Fake("recompute", [1, 2]), Fake("dynamic", [1, 3])])
    loop.run()
    assert {r["method"]: r["equal"] for r in loop.records} == {"recompute": True, "dynamic": False}


def test_a_method_may_serve_some_clients_only():
    class Fake:
        def __init__(self, name):
            self.name = name

        def begin_round(self, number):
            pass

        def serve(self, client, prompt, count):
            return Served(tokens=[client], ttft_s=1.0)

    some, every = Fake("recompute"), Fake("tierkv_ssd")
    some.clients = 2
    workload = small()
    loop = Loop(workload, [some, every])
    loop.run()
    counts = {name: [r["client"] for r in loop.records if r["method"] == name] for name in
              ("recompute", "tierkv_ssd")}  # fmt: skip
    assert sorted(counts["recompute"]) == [0] * 3 + [1] * 3
    assert len(counts["tierkv_ssd"]) == 15
    assert all(r["equal"] for r in loop.records)
    (found,) = verdicts(loop.records, ["recompute", "tierkv_ssd"])
    assert found["ratio"] == 1.0


def run_script(tmp_path, capsys, *arguments):
    out = tmp_path / "out.json"
    status = multi_turn.main(
        [*arguments, "--json", str(out), "--directory", str(tmp_path / "work")]
    )
    assert status == 0
    assert list((tmp_path / "work").iterdir()) == []
    return json.loads(out.read_text()), capsys.readouterr().out


def check_rows(rows, names, *, memory):
    assert [row["method"] for row in rows] == names
    for row in rows:
        assert set(row) == set(ROW)
        for key, kind in ROW.items():
            if key == "peak_rss" and not memory:
                assert row[key] is None
            else:
                assert isinstance(row[key], kind), key
        assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"]


def test_the_script_runs_without_a_model(tmp_path, capsys):
    arguments = ("--model", "none", "--quick", "--page-tokens", "16")
    result, printed = run_script(tmp_path, capsys, *arguments)
    check_rows(result["rows"], [*TIER_METHODS], memory=True)
    for row in result["rows"]:
        assert row["found_ratio"] >= 0.99 * row["ideal_ratio"]
    assert {"cpu", "versions", "commit", "command"} <= set(result["machine"])
    assert result["parameters"]["clients"] == 2
    assert "prompt tokens/s" in printed


def test_the_script_runs_with_a_model(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    names = ["recompute", "dynamic", "torch_save", *TIER_METHODS]
    arguments = ("--model", str(tmp_path / "model"), "--quick", "--no-memory")
    result, printed = run_script(tmp_path, capsys, *arguments, "--shared-document", "64")
    check_rows(result["rows"], names, memory=False)
    for row in result["rows"][1:3]:
        assert row["found_ratio"] >= 0.85 * row["ideal_ratio"]  # they cannot share the document
    for row in result["rows"][3:]:
        assert row["bytes_written"] > 0
    assert all(more["turns"] == 4 for more in result["details"])
    assert "24 of 24 turns gave the same 4 tokens" in printed
    assert {line["method"] for line in result["rounds"]} == set(names)
    assert {(v["method"], v["rival"]) for v in result["verdicts"]} == {
        (ours, rival) for ours in TIER_METHODS for rival in names[:3]
    }


def test_what_cannot_run_says_so(tmp_path, capsys, monkeypatch):
    assert multi_turn.main(["--model", "none", "--methods", "dynamic"]) == 2
    assert "choose from tierkv_host" in capsys.readouterr().err
    assert multi_turn.main(["--model", str(tmp_path / "nothing")]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert multi_turn.main(["--model", "none", "--geometry", "3,4", "--clients", "1"]) == 2
    assert "layers,heads,dim,dtype" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert multi_turn.main(["--model", "none", "--quick", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'tierkv-store[plots]'" in capsys.readouterr().err


def test_draws_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from multi_turn_plot import draw

    row = {"ttft_p50_s": 1.0, "ttft_p99_s": 2.0, "bytes_written": 5 << 20}
    rows = [{**row, "method": "recompute", "ttft_p99_s": 20.0}, {**row, "method": "tierkv_ssd"}]
    draw(tmp_path / "plot.png", rows, "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
