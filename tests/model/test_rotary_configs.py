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
    head_dim = parse_config(config_of(family), "config.json").head_dim
    wanted: Any = AutoConfig.for_model(**config_of(family, **given))
    wanted.head_dim = head_dim
    assert torch.equal(frequencies(rope, head_dim), LlamaRotaryEmbedding(wanted).inv_freq)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_values_for_some_layers_are_refused_where_all_have_the_same(family: str, key: str) -> None:
    raw = config_of(family, **{key: {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}}})
    with pytest.raises(ModelError, match=f"{key}: 'full_attention': values for some of the layers"):
        parse_config(raw, "config.json")


def test_parameters_for_each_layer_beside_a_scaling_of_all_are_refused() -> None:
    raw = raw_config("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ModelError, match="rope_parameters and rope_scaling are both given; keep the one that is meant"):
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
