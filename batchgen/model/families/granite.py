"""Dense Granite 3 and later: Llama's layers with four multipliers.

Facts of the architecture: the published checkpoints' ``config.json`` and transformers' model of it.

The reference multiplies the outputs of mixers and feed-forwards by ``residual_multiplier``. Here the residual stream is
divided by it instead, from the embedding on: norms give the same result if their epsilon is divided by its square. So
weights and kernels need not know it, and adapters and quantized weights stay as they were saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.model.config import LayerShape, ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import published, read_dense

TITLE = "dense Granite"


def granite(*sizes: Any, **more: Any) -> dict[str, Any]:
    """A published ``config.json``, of the sizes of ``published``."""
    values = {
        "model_type": "granite",
        "vocab_size": 49159,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return published(*sizes, **{**values, **more})


_2B = {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
_8B = {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Granite-3.3-2B": granite((2048, 64, 8192), (32, 8), 40, **_2B),
    "Granite-3.3-8B": granite((4096, 128, 12800), (32, 8), 40, **_8B),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
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
        norm_eps=dense.norm_eps / residual**2,
        embedding_scale=embedding / residual,
        logits_scale=1 / logits,
    )


def _multiplier(values: ConfigValues, name: str) -> float:
    if not 1e-3 <= (value := values.number(name, default=1.0)) <= 1e3:
        raise values.error(f"{name} must be from 0.001 to 1000, not {value:g}")
    return value
