"""LFM2 and LFM2.5 with a mixture of experts: LFM2's layers, of which all but the first have experts.

Facts of the architecture: arXiv:2511.23404 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.lfm2 import TENSOR_NAMES, published, read_lfm2

TITLE = "LFM2 MoE"
_FEED_FORWARD = "model.layers.{layer}.feed_forward"
_TENSOR_NAMES = {
    **TENSOR_NAMES,
    "router": f"{_FEED_FORWARD}.gate",
    "router_bias": f"{_FEED_FORWARD}.expert_bias",
    "expert_gate": f"{_FEED_FORWARD}.experts.{{expert}}.w1",
    "expert_up": f"{_FEED_FORWARD}.experts.{{expert}}.w3",
    "expert_down": f"{_FEED_FORWARD}.experts.{{expert}}.w2",
    "experts_gate_up": f"{_FEED_FORWARD}.experts.gate_up_proj",
    "experts_down": f"{_FEED_FORWARD}.experts.down_proj",
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "LFM2-8B-A1B": published(
        *(2048, 32, [2, 6, 10, 14, 18, 21]),
        model_type="lfm2_moe",
        num_hidden_layers=24,
        intermediate_size=7168,
        moe_intermediate_size=1792,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
    ),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    dense = read_lfm2(values, values.integer("intermediate_size"))
    experts = values.experts(
        "sigmoid",
        is_normalized=True,
        normalizer_eps=1e-6,
        has_bias=values.flag("use_expert_bias", default=True),
        scale=values.number("routed_scaling_factor", default=1.0),
    )
    first = values.integer("num_dense_layers", default=2, least=0)
    sparse = [replace(layer, ff_dim=0, experts=experts) for layer in dense.layers[first:]]
    return replace(dense, layers=(*dense.layers[:first], *sparse), tensor_names=_TENSOR_NAMES)
