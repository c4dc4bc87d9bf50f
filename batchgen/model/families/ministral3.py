"""Ministral 3: Mistral's layers with YaRN, for contexts in which its queries are not scaled.

Facts of the architecture: the published checkpoints' ``config.json`` and transformers' model of it. Queries beyond the
original context are multiplied by a number that grows with the position. This is not supported: the context ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import published, read_dense

TITLE = "Ministral 3"


def _ministral(*sizes: Any, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    values = {
        "model_type": "ministral3",
        "vocab_size": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "max_position_embeddings": 262144,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return published(*sizes, **{**values, **more})


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Ministral-3-3B": _ministral((3072, 128, 9216), (32, 8), 26, tie_word_embeddings=True),
    "Ministral-3-8B": _ministral((4096, 128, 14336), (32, 8), 34),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    values.refuse_window()
    values.refuse("attention_bias")
    rope = values.section("rope_parameters")
    dense = read_dense(values, default_theta=1e6, has_qk_norm=False, head_dim=128)
    if not rope.get("llama_4_scaling_beta", default=0):
        return dense
    unscaled = rope.integer("original_max_position_embeddings")
    return replace(dense, max_position_embeddings=min(unscaled, dense.max_position_embeddings))
