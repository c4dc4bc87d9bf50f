"""Rotary embeddings and windows that a ``config.json`` says in several places, or not at all: those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import RAW, raw_config

from batchgen.core.errors import ModelError
from batchgen.model.registry import parse_config
from batchgen.model.rope import frequencies

DENSE = ["granite", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3"]
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
GIVEN: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "a kind alone": {"rope_parameters": {"rope_type": "default"}},
    "a base alone": {"rope_theta": 300.0},
    "a base beside parameters without one": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 300.0},
    "a base in both": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 300.0},
    "a base in both, in older words": {
        "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 77.0},
        "rope_theta": 300.0,
    },
    "positions beside": {"rope_parameters": {**LLAMA3, "rope_theta": 77.0}, "original_max_position_embeddings": 512},
    "yarn": {"rope_scaling": {**YARN, "rope_theta": 1e6}},
    "yarn that weighs attention": {
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        "rope_theta": 5e4,
    },
    "yarn of one scale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn with a factor of attention": {"rope_parameters": {**YARN, "attention_factor": 0.8}},
    "yarn with other bounds": {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "factor": 1.5}},
    "yarn of one bound": {
        "rope_scaling": {**YARN, "beta_fast": 2, "beta_slow": 2},
        "original_max_position_embeddings": 90,
    },
    "positions beside alone": {
        "rope_scaling": {name: value for name, value in LLAMA3.items() if not name.startswith("orig")},
        "original_max_position_embeddings": 32,
    },
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config of the family without a rotary embedding of its own."""
    raw = raw_config(family)
    return {key: value for key, value in raw.items() if not key.startswith("rope")} | changes


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("family", DENSE)
def test_a_rotary_embedding_is_that_of_transformers_wherever_it_is_said(family: str, given: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = parse_config(config_of(family, **given), "config.json").layers[0].rope
    assert rope is not None
    plain = parse_config(config_of(family), "config.json")
    head_dim = plain.head_dim
    wanted: Any = AutoConfig.for_model(**config_of(family, **given))
    wanted.head_dim = head_dim
    reference = LlamaRotaryEmbedding(wanted)
    assert torch.equal(frequencies(rope, head_dim), reference.inv_freq)
    assert rope.scale == plain.ropes[0].scale * reference.attention_scaling


@pytest.mark.parametrize(("given", "wanted"), [(1024, 2048), (4096, 4096)])
def test_yarn_stretches_the_context_by_its_factor(given: int, wanted: int) -> None:
    raw = config_of("qwen3", rope_scaling=YARN, max_position_embeddings=given)
    assert parse_config(raw, "config.json").max_position_embeddings == wanted


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"truncate": False}, "truncate is False; it is not computed here"),
        ({"factor": 0.5}, "no context can be stretched"),
        ({"factor": 1e300}, "factor must be"),
        ({"factor": 1e30}, "no context can be stretched"),
        ({"beta_fast": 0.5}, "no context can be stretched"),
        ({"original_max_position_embeddings": None}, "has no 'original_max_position_embeddings'"),
    ],
)
def test_yarn_that_cannot_be_computed_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        parse_config(config_of("qwen3", rope_scaling={**YARN, **changes}), "config.json")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_values_for_some_layers_are_refused_where_all_have_the_same(family: str, key: str) -> None:
    raw = config_of(family, **{key: {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}}})
    with pytest.raises(ModelError, match=f"{key}: 'full_attention': values for some of the layers"):
        parse_config(raw, "config.json")


def test_parameters_for_each_layer_beside_a_scaling_of_all_are_refused() -> None:
    raw = raw_config("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ModelError, match="rope_parameters and rope_scaling are both given; keep only one of them"):
        parse_config(raw, "config.json")


@pytest.mark.parametrize("family", ["granite", "llama", "mistral"])
def test_a_window_that_a_text_could_exceed_is_refused(family: str) -> None:
    raw = raw_config(family, sliding_window=4095, max_position_embeddings=4096)
    with pytest.raises(ModelError, match="sliding_window is 4095, which is not supported in this family; write null"):
        parse_config(raw, "config.json")
    for window in (None, 4096, 5000):
        assert not parse_config(raw | {"sliding_window": window}, "config.json").window


def test_a_mistral_that_says_nothing_of_a_window_has_that_of_transformers() -> None:
    raw = {key: value for key, value in RAW["mistral"].items() if key != "sliding_window"}
    assert not parse_config(raw | {"max_position_embeddings": 4096}, "config.json").window
    with pytest.raises(ModelError, match="sliding_window is missing, which means 4096, which is not supported"):
        parse_config(raw | {"max_position_embeddings": 4097}, "config.json")


def test_the_other_families_have_no_window_unless_a_switch_turns_it_on() -> None:
    for family in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        raw = raw_config(family, sliding_window=20)
        assert parse_config(raw, "config.json") == parse_config(raw_config(family), "config.json")
        with pytest.raises(ModelError, match="use_sliding_window true"):
            parse_config(raw | {"use_sliding_window": True}, "config.json")
