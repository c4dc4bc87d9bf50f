"""Mistral from 7B-v0.2 on, without a sliding window: Llama's layers, with rotary embeddings as they are.

Facts of the architecture: arXiv:2310.06825 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import published, read_dense

TITLE = "Mistral"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Mistral-7B-v0.3": published(
        *((4096, 128, 14336), (32, 8), 32),
        model_type="mistral",
        vocab_size=32768,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=32768,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Mistral-Small-3.1-24B": published(
        *((5120, 128, 32768), (32, 8), 40),
        model_type="mistral",
        vocab_size=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e9,
        max_position_embeddings=131072,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    values.refuse_window(default=4096)
    values.refuse("attention_bias")
    return read_dense(values, default_theta=1e4, has_qk_norm=False)
