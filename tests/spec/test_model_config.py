"""Specs from configs: geometry, windows, position encoding, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tierkv.errors import SpecError
from tierkv.identity.keys import Namespace
from tierkv.identity.spec import CacheSpec, GroupKind


def config(**fields: Any) -> SimpleNamespace:
    """Return the least that a Llama config says."""
    given = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return SimpleNamespace(**{**given, **fields})


def spec_of(**fields: Any) -> CacheSpec:
    return CacheSpec.from_config(config(**fields), dtype="bfloat16")


def test_full_attention_is_one_group() -> None:
    (group,) = spec_of().groups
    assert (group.name, group.kind, group.layers) == ("full", GroupKind.FULL, (0, 1, 2, 3))
    assert [(c.name, c.heads, c.dim) for c in group.components] == [("k", 2, 16), ("v", 2, 16)]
    assert group.dtype == "bfloat16"


def test_head_dim_of_the_config_wins_over_the_quotient() -> None:
    assert spec_of(head_dim=64).groups[0].components[0].dim == 64
    assert spec_of(head_dim=None).groups[0].components[0].dim == 16


def test_missing_kv_heads_mean_as_many_as_attention_heads() -> None:
    assert spec_of(num_key_value_heads=None).groups[0].components[0].heads == 8


def test_layer_types_split_sliding_from_full() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    spec = spec_of(model_type="gemma3_text", layer_types=types, sliding_window=512)
    full, sliding = spec.groups
    assert (full.layers, full.window) == ((2,), None)
    assert (sliding.layers, sliding.window) == ((0, 1, 3), 512)
    assert full.page_bytes == sliding.page_bytes
    assert spec.anchor == 0


def test_a_window_without_layer_types_means_every_layer() -> None:
    (group,) = spec_of(model_type="mistral", sliding_window=4096).groups
    assert (group.kind, group.window) == (GroupKind.SLIDING, 4096)


def test_a_window_that_is_switched_off_does_not_count() -> None:
    spec = spec_of(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert spec.groups[0].kind is GroupKind.FULL


def test_the_text_part_of_a_multimodal_config_is_used() -> None:
    outer = SimpleNamespace(model_type="gemma3", get_text_config=lambda: config())
    assert CacheSpec.from_config(outer, dtype="float32").groups[0].layers == (0, 1, 2, 3)


def test_page_tokens_can_be_given() -> None:
    spec = CacheSpec.from_config(config(), dtype="float32", page_tokens=16)
    assert spec.groups[0].page_tokens == 16


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba.*MambaFor"),
        ({"model_type": None}, "None.*LlamaFor"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window"),
        ({"attention_chunk_size": 8192}, "chunked"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_known_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(SpecError, match=names):
        spec_of(**fields)


def test_an_unknown_architecture_says_what_to_do() -> None:
    with pytest.raises(SpecError, match=r"CacheSpec\(groups=\.\.\.\)"):
        spec_of(model_type="jamba")


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(SpecError, match="float32, bfloat16 or float16"):
        CacheSpec.from_config(config(), dtype=dtype)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_positions_that_depend_on_the_total_length_are_refused(kind: str, place: str) -> None:
    other = "rope_scaling" if place == "rope_parameters" else "rope_parameters"
    with pytest.raises(SpecError, match="total length"):
        spec_of(**{place: {"rope_type": kind, "factor": 2.0}, other: None})


def namespace(**fields: Any) -> bytes:
    return Namespace.build(spec_of(**fields), weights="w").digest


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"no_rope_layers": [1, 1, 1, 0]},
        {"head_dim": 32},
        {"num_hidden_layers": 5},
        {"model_type": "mistral", "sliding_window": 4096},
    ],
)
def test_whatever_changes_the_state_changes_the_namespace(fields: dict[str, Any]) -> None:
    assert namespace(**fields) != namespace()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"rope_parameters": None, "rope_theta": 10000.0},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000},
        {"_name_or_path": "elsewhere", "architectures": ["Renamed"]},
        {"max_position_embeddings": 99},
    ],
)
def test_another_way_to_write_the_same_does_not(fields: dict[str, Any]) -> None:
    assert namespace(**fields) == namespace()


def test_yarn_depends_on_the_original_length() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    short = namespace(rope_parameters=yarn, max_position_embeddings=4096)
    assert short != namespace(rope_parameters=yarn, max_position_embeddings=8192)
