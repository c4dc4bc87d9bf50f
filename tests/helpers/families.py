"""A tiny ``config.json`` of every model family, and transformers' own model of it with random weights.

Every test that holds for all families is parametrized over ``RAW``: a new family is an entry here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EOS = 7
_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
_DENSE = {
    **_COMMON,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RAW: dict[str, dict[str, Any]] = {
    "lfm2": {  # 2 conv and 2 attention layers, 4 heads of 16 on 2 KV heads
        **_COMMON,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "full_attn_idxs": [1, 3],
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "lfm2_moe": {  # its first layer is dense
        **_COMMON,
        **_EXPERTS,
        "model_type": "lfm2_moe",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "intermediate_size": 96,
        "num_dense_layers": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "lfm3": {  # windows that prompts of 50 tokens cross; half of the head is rotated in full attention
        **_COMMON,
        "model_type": "lfm3",
        "num_hidden_layers": 6,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "sliding_attention", "conv"],
        "intermediate_size": 96,
        "head_dim": 16,
        "sliding_window": 20,
        "conv_L_cache": 7,
        "norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": 0,
    },
    "gemma3_text": {  # windows that prompts of 50 tokens cross; scaled full attention in layers 1 and 3
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 31,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": 0,
    },
    "granite": {
        **_DENSE,
        "model_type": "granite",
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.22},
        **{"attention_multiplier": 0.1, "logits_scaling": 6.0},
    },
    "granitemoehybrid": {
        **_DENSE,
        "model_type": "granitemoehybrid",
        **{"layer_types": ["attention"] * 3, "shared_intermediate_size": 96, "intermediate_size": 4},
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope", "mamba_n_heads": 8},
        **{"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    },
    # 64 positions of old context: wavelengths on both sides of the bounds and between them
    "llama": {**_DENSE, "model_type": "llama", "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 64}},
    "ministral3": {
        **_DENSE,
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        "pad_token_id": 0,
    },
    "mistral": {**_DENSE, "model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "qwen2": {**_DENSE, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 20},
    "qwen3": {**_DENSE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "qwen3_moe": {**_DENSE, **_EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
    # layers 1 and 3 of 4 without rotary embedding
    "smollm3": {
        **_DENSE,
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
    },
}


def raw_config(model_type: str = "lfm2", **changes: Any) -> dict[str, Any]:
    """A ``config.json`` as the Hub has it."""
    return {**RAW[model_type], **changes}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights wide enough that layers matter, norms near one but all different: a swapped norm must show."""
    generator = torch.Generator().manual_seed(seed)
    of_routers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias"))
    for name, parameter in [*model.named_parameters(), *of_routers]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else 0.5 * noise if "conv.conv" in name else 0.15 * noise


def reference_model(raw: dict[str, Any], seed: int = 0) -> Any:
    """Transformers' model of a ``config.json``, in float32 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**raw)
    make: Any = AutoModelForCausalLM.from_config  # has no annotations
    model = make(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, seed)
    return model


def saved_by_transformers(raw: dict[str, Any], folder: Path, seed: int = 0) -> Any:
    """The reference model, saved to ``folder`` as transformers saves it."""
    model = reference_model(raw, seed)
    model.save_pretrained(folder)
    return model
