"""What a ``config.json`` may say: every alias a release has used, and a clear refusal of all else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.core.errors import ModelError
from batchgen.model.config import ModelConfig
from batchgen.model.registry import dummy_config, is_dummy, load_config, parse_config, read_config

RAW: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "full_attn_idxs": [1, 3],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "conv_L_cache": 3,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}
# What the published files of the dense models say alike, aliases and all, and in what they differ.
COMMON: dict[str, Any] = {
    **{"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0},
    **{"block_multiple_of": 256, "block_norm_eps": 1e-5, "block_use_swiglu": True, "bos_token_id": 1},
    **{"conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7, "initializer_range": 0.02},
    **{"max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-5, "num_key_value_heads": 8},
    **{"pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True},
    **{"use_pos_enc": True, "vocab_size": 65536},
}
SIXTEEN = {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
THIRTY = {"num_hidden_layers": 30, "full_attn_idxs": [2, 5, 9, 13, 17, 21, 24, 27]}


def published(width: int, num_heads: int, ff_dim: int, layers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    widths = dict.fromkeys(("hidden_size", "block_dim", "conv_dim", "conv_dim_out"), width)
    heads = dict.fromkeys(("num_attention_heads", "num_heads"), num_heads)
    return {**COMMON, **widths, **heads, "block_ff_dim": ff_dim, **layers, **changes}


PUBLISHED = {
    "LFM2-350M": published(1024, 16, 6656, SIXTEEN),
    "LFM2-700M": published(1536, 24, 10240, SIXTEEN),
    "LFM2-1.2B": published(2048, 32, 12288, SIXTEEN),
    "LFM2-2.6B": published(2048, 32, 10752, THIRTY, block_auto_adjust_ff_dim=False),
}
# Of the mixture of experts: what tells it from the dense models.
PUBLISHED["LFM2-8B-A1B"] = {
    **{key: value for key, value in COMMON.items() if not key.startswith("block_")},
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}


def parsed(**changes: Any) -> ModelConfig:
    """``RAW`` with changes; a value of ... takes the key away."""
    raw = {key: value for key, value in {**RAW, **changes}.items() if value is not ...}
    return parse_config(raw, "config.json")


def refusal(**changes: Any) -> str:
    """The one line with which such a config is refused."""
    with pytest.raises(ModelError) as caught:
        parsed(**changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"block_ff_dim": 96}, {"block_ff_dim": ..., "intermediate_size": 96}),
        ({"rope_theta": 5e5}, {"theta": 5e5}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ({"rope_theta": 1e6}, {}),
        ({"full_attn_idxs": [1, 3]}, {"full_attn_idxs": ..., "layer_types": ["conv", "full_attention"] * 2}),
        ({"tie_embedding": False}, {"tie_word_embeddings": False}),
        ({"tie_embedding": True}, {}),
        ({"norm_eps": 1e-3}, {"block_norm_eps": 1e-3}),
        ({"norm_eps": 1e-5}, {}),
        ({"num_attention_heads": 4}, {"num_attention_heads": ..., "num_heads": 4}),
        ({"torch_dtype": "float32"}, {"dtype": "float32"}),
        ({"torch_dtype": "float32"}, {"dtype": "float32", "torch_dtype": "bfloat16"}),  # as in transformers
        ({"hidden_size": 64}, {"hidden_size": ..., "block_dim": 64}),
        ({"num_key_value_heads": 4}, {"num_key_value_heads": ...}),
        ({"head_dim": 16}, {}),
        ({"eos_token_id": 7}, {"eos_token_id": [7]}),
        ({}, {"rope_scaling": None}),
        ({}, {"rope_scaling": {"rope_type": "default"}}),
        ({}, {"conv_bias": False, "block_use_swiglu": True, "use_pos_enc": True, "use_cache": True}),
    ],
    ids=lambda changes: ",".join(changes) or "default",
)
def test_aliases_mean_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert parsed(**one) == parsed(**other)


WRONG: dict[str, tuple[Any, ...]] = {  # values of a type or size that the key does not have
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers"), ("128", True, 0, -1, 64.5)),
    **dict.fromkeys(("norm_eps", "rope_theta", "block_ffn_dim_multiplier"), ("1", [1], 0, True)),
    **dict.fromkeys(("conv_bias", "tie_embedding", "block_auto_adjust_ff_dim", "tie_word_embeddings"), ("false", 1)),
    **{"bos_token_id": ("1",), "eos_token_id": ("7", [7, None]), "rope_parameters": ("default",)},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma4"}, ["'gemma4'", "'lfm2'", "'llama'", "the text part of 'gemma3'"]),
        ({"model_type": ...}, ["model_type"]),
        ({"hidden_size": 65, "head_dim": 16}, ["hidden_size 65 is odd", "in pairs"]),
        ({"model_type": "llama", "intermediate_size": 97}, ["a feed-forward's width 97 is odd"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["rope", "'longrope'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope", "'dynamic'"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, ["rope_parameters", "low_freq_factor"]),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "su"}}, ["rope", "'su'"]),
        ({"norm_eps": 1e-5, "rms_norm_eps": 1e-6}, ["norm_eps is 1e-05 and rms_norm_eps 1e-06; keep the one"]),
        ({"tie_embedding": True, "tie_word_embeddings": False}, ["tie_embedding is True and tie_word_embeddings"]),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ["rope_parameters and rope_scaling disagree; keep only one of them"],
        ),
        *(
            ({"model_type": family, "intermediate_size": 96, **rope}, ["partial_rotary_factor 0.5", "'default'"])
            for family in ("lfm2", "llama", "mistral", "qwen3")
            for rope in (
                {"partial_rotary_factor": 0.5},
                {"rope_parameters": {"partial_rotary_factor": 0.5}},
                {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            )
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, ["hqq", "bfloat16"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "5", "2"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"layer_types": ["conv"]}, ["layer_types", "4"]),
        ({"layer_types": ["conv", "conv", "conv", "sliding_attention"]}, ["layer_types"]),
        ({"full_attn_idxs": ...}, ["full_attn_idxs"]),
        ({"full_attn_idxs": [1, 4]}, ["full_attn_idxs", "4"]),
        *(({key: value}, [key]) for key, values in WRONG.items() for value in values),
        ({"conv_L_cache": ...}, ["conv_L_cache"]),
        ({"conv_L_cache": 1}, ["conv_L_cache must be an integer from 2 up, not 1"]),
        (
            {"model_type": "lfm3", "layer_types": ["conv"] * 4, "intermediate_size": 96, "conv_L_cache": 1},
            ["conv_L_cache must be an integer from 2 up, not 1"],
        ),
        ({"hidden_size": ..., "block_dim": 0}, ["block_dim", "0"]),
        ({"block_ff_dim": 1}, ["block_ff_dim 1"]),
        *(
            ({key: ...}, [f"'{key}'"])
            for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "block_ff_dim")
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_run_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(**changes)
    assert all(word in message for word in words), message


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(2, 10_000).map(lambda half: 2 * half),
    multiplier=st.sampled_from([0.5, 1.0, 1.3, 2]),
    multiple=st.integers(1, 150).map(lambda half: 2 * half),  # odd widths are refused
    adjust=st.booleans(),
)
def test_the_feed_forward_width_is_the_one_transformers_builds(
    width: int, multiplier: float, multiple: int, adjust: bool
) -> None:
    import torch
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    raw = {
        "block_ff_dim": width,
        "block_ffn_dim_multiplier": multiplier,
        "block_multiple_of": multiple,
        "block_auto_adjust_ff_dim": adjust,
    }
    with torch.device("meta"):
        expected = Lfm2MLP(Lfm2Config(**{**RAW, **raw})).w1.out_features
    assert parsed(**raw).ff_dim == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_agree_with_the_dummies(name: str, tmp_path: Path) -> None:
    write(tmp_path, "config.json", json.dumps(PUBLISHED[name]))
    assert read_config(tmp_path) == dummy_config(f"dummy:{name}")


@pytest.mark.parametrize(
    ("name", "billions", "per_token"), [("LFM2-8B-A1B", 8.34, 1.56), ("Qwen3-30B-A3B", 30.53, 3.35)]
)
def test_mixtures_of_experts_have_the_published_size_of_which_a_token_meets_a_part(
    name: str, billions: float, per_token: float
) -> None:
    config = dummy_config(f"dummy:{name}")
    tables = config.logits_params_per_token * (1 if config.tie_embedding else 2)
    assert (config.linear_params + tables) / 1e9 == pytest.approx(billions, abs=0.005)
    assert (config.linear_params_per_token + tables) / 1e9 == pytest.approx(per_token, abs=0.005)


def test_an_unknown_dummy_names_the_known_ones() -> None:
    assert is_dummy("dummy:LFM2-13B")
    with pytest.raises(ModelError, match=r"LFM2-13B.*LFM2-350M, .*LFM2-700M, LFM2-1.2B, LFM2-2.6B"):
        load_config("dummy:LFM2-13B")


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    write(tmp_path, "config.json", json.dumps(RAW))
    assert read_config(tmp_path).eos_token_ids == (7,)
    write(tmp_path, "generation_config.json", json.dumps({"eos_token_id": [7, 2]}))
    assert read_config(tmp_path).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"lfm2"', "\ufeff{}".encode(), b"null", b"\xff\xfe\x00model", None]
)
def test_a_config_file_that_is_broken_or_missing_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json.*needs this file" if content is None else r"config\.json"):
        read_config(tmp_path)


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, batchgen.model.registry as m; m.load_config('dummy:LFM2-350M'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


QUANTIZED: list[tuple[str, Any, str]] = [
    ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": {}}, "by 'compressed-tensors'"),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "by 'fp8'"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}, "by 'gptq'"),
    ("quantization_config", {"quant_method": ["awq"]}, "by ['awq']"),
    ("quantization_config", {}, "by None"),
    ("compression_config", {"quant_method": "compressed-tensors"}, "compression_config by 'compressed-tensors'"),
    ("quantization", {"group_size": 64, "bits": 4}, "quantization by MLX"),
    ("quantization_config", [], "quantization_config must be an object"),
]


@pytest.mark.parametrize(("key", "settings_", "words"), QUANTIZED)
def test_a_quantized_checkpoint_is_refused_with_what_to_give_instead(key: str, settings_: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(RAW | {key: settings_}, "here/config.json")
    message = str(caught.value)
    assert message.startswith("here/config.json: ") and words in message
    if isinstance(settings_, dict):
        assert (
            "is not supported; give the bfloat16 release of the model" in message
            and 'quantization = "w8a16"' in message
        )
    assert parse_config(RAW | {key: None}, "here") == parse_config(RAW, "here")
