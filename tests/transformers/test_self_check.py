"""The check at attach finds models that would resume wrongly, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.errors import UnsupportedError  # noqa: E402
from tierkv.identity.spec import CacheSpec  # noqa: E402
from tierkv.integrations.transformers import TierKV  # noqa: E402
from tierkv.integrations.transformers.self_check import check_model  # noqa: E402


def spec_of(model: Any) -> CacheSpec:
    return CacheSpec.from_config(model.config, dtype=model.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_good_families_pass(family: str, dtype: str, tiny: Any) -> None:
    model = tiny(family, getattr(torch, dtype))
    check = check_model(model, spec_of(model))
    assert check.resumed_error == 0
    assert check.split_error <= check.limit


def test_a_wrong_continuation_is_refused_with_the_error_measured(tiny: Any) -> None:
    """Like a scan that starts from zero whenever several tokens continue a state."""
    model = tiny("llama")
    rotary = model.model.rotary_emb

    def from_zero(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden, positions = args[0], kwargs["position_ids"] if len(args) < 2 else args[1]
        if positions.shape[-1] > 1:
            positions = positions - positions[:, :1]
        return (hidden, positions), {}

    rotary.register_forward_pre_hook(from_zero, with_kwargs=True)
    with pytest.raises(UnsupportedError, match=r"llama.*off by 0\.\d+ of the largest logit"):
        TierKV.attach(model)
    TierKV.attach(model, self_check=False).close()


def test_state_outside_the_cache_is_refused(tiny: Any) -> None:
    """Like position offsets that a vision model keeps on the module between calls."""
    model = tiny("llama")
    seen = []

    def remember(module: Any, args: Any, output: Any) -> Any:
        seen.append(output)
        return output * (1 + 0.01 * len(seen))

    model.lm_head.register_forward_hook(remember)
    with pytest.raises(UnsupportedError, match=r"off by"):
        TierKV.attach(model)


def test_a_cache_of_another_shape_than_the_spec_says_is_refused(tiny: Any) -> None:
    model = tiny("llama")
    model.config.head_dim = 8
    with pytest.raises(UnsupportedError, match="resuming a short sequence failed"):
        TierKV.attach(model)


def test_training_flags_and_random_state_are_restored(tiny: Any) -> None:
    model = tiny("llama")
    model.train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check_model(model, spec_of(model))
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model._forward_pre_hooks
