"""Granite 3 and 4 with attention and dense feed-forwards only (no Mamba, no experts): Llama's layers with multipliers.

Facts of the architecture: the published checkpoints' ``config.json`` and transformers' models of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from batchgen.core.units import shown
from batchgen.model.config import ATTENTION, NO_ROPE, LayerShape, ModelConfig
from batchgen.model.config_values import ConfigValues, Family
from batchgen.model.families.dense import published, read_dense

_LISTED = "attention"  # the word of the published files for a layer with attention
_MLP = "model.layers.{layer}.shared_mlp"
_TENSOR_NAMES_4 = {"gate_up": f"{_MLP}.input_linear", "down": f"{_MLP}.output_linear"}  # gates and ups in one tensor
_granite = partial(
    published,
    model_type="granite",
    vocab_size=49159,
    rms_norm_eps=1e-5,
    rope_theta=1e7,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    bos_token_id=0,
    eos_token_id=0,
)


def _granite4(widths: tuple[int, int, int], heads: tuple[int, int], num_layers: int, **more: Any) -> dict[str, Any]:
    values = _granite(widths, heads, num_layers, model_type="granitemoehybrid", vocab_size=100352)
    values |= {"layer_types": [_LISTED] * num_layers, "shared_intermediate_size": values.pop("intermediate_size")}
    values |= {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}
    return {**values, "bos_token_id": 100257, "eos_token_id": 100257, **more}


def _read_granite(values: ConfigValues) -> ModelConfig:
    values.refuse_window()
    dense = read_dense(values, default_theta=1e4, has_qk_norm=False)
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, logits = (_multiplier(values, name) for name in names)

    def scaled(layer: LayerShape) -> LayerShape:
        assert layer.rope, "all layers are attention"
        return replace(layer, rope=layer.rope.scaled(math.sqrt(attention * math.sqrt(dense.head_dim))))

    return replace(
        dense,
        layers=tuple(map(scaled, dense.layers)),
        # Outputs are not multiplied; the residual stream is divided by the multiplier instead. Norms with this epsilon
        # give the same numbers, so weights, kernels and adapters need not know the multiplier.
        norm_eps=dense.norm_eps / residual**2,
        embedding_scale=embedding / residual,
        logits_scale=1 / logits,
    )


def _multiplier(values: ConfigValues, name: str) -> float:
    if not 1e-3 <= (value := values.number(name, default=1.0)) <= 1e3:
        raise values.error(f"{name} must be from 0.001 to 1000, not {value:g}")
    return value


def _read_granite4(values: ConfigValues) -> ModelConfig:
    kinds = values.get("layer_types", default=["mamba"])  # transformers' default for a file without the list
    if not isinstance(kinds, list) or any(kind not in (_LISTED, ATTENTION) for kind in kinds):
        raise values.error("layers of Mamba are not computed here; granite-4.0-350m, -1b and -micro have none")
    if values.integer("num_local_experts", default=8, minimum=0):
        raise values.error("num_local_experts is not 0; experts next to a feed-forward are not computed here")
    position = values.get("position_embedding_type", default="nope")
    if position not in ("rope", "nope"):
        raise values.error(f"position_embedding_type is {shown(position)}; known are 'rope' and 'nope'")
    listed = {"layer_types": [ATTENTION] * len(kinds), "intermediate_size": values.integer("shared_intermediate_size")}
    dense = _read_granite(ConfigValues({**values.raw, **listed}, values.location))
    if position == "nope":
        scale = dense.ropes[0].scale
        dense = replace(dense, layers=tuple(replace(layer, rope=NO_ROPE.scaled(scale)) for layer in dense.layers))
    return replace(dense, tensor_names={**dense.tensor_names, **_TENSOR_NAMES_4})


_2B: dict[str, Any] = {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
_8B: dict[str, Any] = {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
_350M: dict[str, Any] = {"residual_multiplier": 0.263, "attention_multiplier": 0.015625, "logits_scaling": 4.0}
GRANITE = Family(
    "dense Granite",
    {
        "Granite-3.3-2B": _granite((2048, 64, 8192), (32, 8), 40, **_2B),
        "Granite-3.3-8B": _granite((4096, 128, 12800), (32, 8), 40, **_8B),
    },
    _read_granite,
)
GRANITE4 = Family(
    "Granite 4 without Mamba",
    {
        "Granite-4.0-350M": _granite4((1024, 64, 2048), (16, 4), 28, **_350M, max_position_embeddings=32768),
        "Granite-4.0-1B": _granite4((2048, 128, 4096), (16, 4), 40, **{**_8B, "logits_scaling": 8.0}),
        "Granite-4.0-Micro": _granite4((2560, 64, 8192), (40, 8), 40, **{**_2B, "logits_scaling": 10.0}),
    },
    _read_granite4,
)
