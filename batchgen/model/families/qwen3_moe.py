"""Qwen3 with a mixture of experts in every layer.

Facts of the architecture: arXiv:2505.09388 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import TENSOR_NAMES, published, read_dense

TITLE = "Qwen3 MoE"
_MLP = "model.layers.{layer}.mlp"
_TENSOR_NAMES = {
    **TENSOR_NAMES,
    "router": f"{_MLP}.gate",
    "expert_gate": f"{_MLP}.experts.{{expert}}.gate_proj",
    "expert_up": f"{_MLP}.experts.{{expert}}.up_proj",
    "expert_down": f"{_MLP}.experts.{{expert}}.down_proj",
    "experts_gate_up": f"{_MLP}.experts.gate_up_proj",
    "experts_down": f"{_MLP}.experts.down_proj",
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": published(
        *((2048, 128, 6144), (32, 4), 48),
        model_type="qwen3_moe",
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        eos_token_id=[151645, 151643],
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    )
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    values.expect("decoder_sparse_step", 1, "only models with experts in every layer are supported")
    values.expect("mlp_only_layers", [], "only models with experts in every layer are supported")
    dense, experts = read_dense(values, default_theta=1e4), values.experts("softmax", is_normalized=False)
    layers = tuple(replace(layer, ff_dim=0, experts=experts) for layer in dense.layers)
    return replace(dense, layers=layers, tensor_names=_TENSOR_NAMES)
