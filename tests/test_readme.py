"""What the README shows works as it stands there."""

import re
from pathlib import Path

import torch
from toy_model import FULL, states

import tierkv

README = Path(__file__).parent.parent / "README.md"


def snippets():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_nothing_is_left_to_fill_in():
    assert "<!--" not in README.read_text()


def test_the_loop_of_your_own_runs(tmp_path, monkeypatch):
    (loop,) = [code for code in snippets() if "sequence.gate.layer" in code]
    assert len(loop.splitlines()) < 20
    monkeypatch.setattr(tierkv.CacheSpec, "from_config", lambda config, dtype: FULL)
    code = loop.replace('"kv-store"', repr(str(tmp_path / "kv-store")))
    code = code.replace('"20GiB"', '"16MiB"').replace("2GiB", "4MiB").replace("8GiB", "4MiB")
    assert "GiB" not in code
    code = code.replace("state.append(k, v)", "state.append(*new(layer, sequence))")
    token_ids = list(range(30))

    def new(layer, sequence):
        return states(FULL, layer, token_ids, sequence.length, len(token_ids))

    names = {
        "config": None,
        "digest": "d",
        "num_layers": 2,
        "token_ids": token_ids,
        "new": new,
        "torch": torch,
    }
    for found in (0, 29):  # a reused sequence leaves its last token to compute
        scope = dict(names)
        exec(code, scope)
        assert scope["sequence"].found.total == found
        assert torch.equal(scope["keys"], states(FULL, 1, token_ids, 0, 30)[0])
