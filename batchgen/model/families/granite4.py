"""Granite 4 with attention and dense feed-forwards only: Granite 3 with gates and ups in one tensor.

Facts of the architecture: the published checkpoints' ``config.json`` and transformers' model of it. Layers of Mamba and
mixtures of experts, which the other models of this ``model_type`` have, are not computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.core.units import shown
from batchgen.model.config import ATTENTION, NO_ROPE, ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families import granite

TITLE = "Granite 4 without Mamba"
_LISTED = "attention"  # the word of the published files for a layer with attention
_MLP = "model.layers.{layer}.shared_mlp"
_TENSOR_NAMES = {"gate_up": f"{_MLP}.input_linear", "down": f"{_MLP}.output_linear"}


def _granite4(widths: tuple[int, int, int], heads: tuple[int, int], num_layers: int, **more: Any) -> dict[str, Any]:
    values = granite.granite(widths, heads, num_layers, model_type="granitemoehybrid", vocab_size=100352)
    values |= {"layer_types": [_LISTED] * num_layers, "shared_intermediate_size": values.pop("intermediate_size")}
    values |= {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}
    return {**values, "bos_token_id": 100257, "eos_token_id": 100257, **more}


_350M = {"residual_multiplier": 0.263, "attention_multiplier": 0.015625, "logits_scaling": 4.0}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Granite-4.0-350M": _granite4((1024, 64, 2048), (16, 4), 28, **_350M, max_position_embeddings=32768),
    "Granite-4.0-1B": _granite4((2048, 128, 4096), (16, 4), 40, attention_multiplier=0.0078125, logits_scaling=8.0),
    "Granite-4.0-Micro": _granite4((2560, 64, 8192), (40, 8), 40, attention_multiplier=0.015625, logits_scaling=10.0),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    kinds = values.get("layer_types", default=["mamba"])  # as transformers has it for a file that lists none
    if not isinstance(kinds, list) or any(kind not in (_LISTED, ATTENTION) for kind in kinds):
        raise values.error("layers of Mamba are not computed here; granite-4.0-350m, -1b and -micro have none")
    if values.integer("num_local_experts", default=8, least=0):
        raise values.error("num_local_experts is not 0; experts next to a feed-forward are not computed here")
    position = values.get("position_embedding_type", default="nope")
    if position not in ("rope", "nope"):
        raise values.error(f"position_embedding_type is {shown(position)}; known are 'rope' and 'nope'")
    listed = {"layer_types": [ATTENTION] * len(kinds), "intermediate_size": values.integer("shared_intermediate_size")}
    dense = granite.read_config(ConfigValues({**values.raw, **listed}, values.where))
    if position == "nope":
        scale = dense.ropes[0].scale
        dense = replace(dense, layers=tuple(replace(layer, rope=NO_ROPE.scaled(scale)) for layer in dense.layers))
    return replace(dense, tensor_names={**dense.tensor_names, **_TENSOR_NAMES})
