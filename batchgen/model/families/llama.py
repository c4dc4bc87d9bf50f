"""Llama 3, and SmolLM2, which has the same layers.

Facts of the architecture: arXiv:2407.21783, arXiv:2502.02737 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import published, read_dense

TITLE = "Llama 3, SmolLM2"


def _llama(factor: float, *sizes: Any, **more: Any) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = {
        "model_type": "llama",
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192},
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    }
    return published(*sizes, **{**values, **more})


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": _llama(32.0, (2048, 64, 8192), (32, 8), 16),
    "Llama-3.2-3B": _llama(32.0, (3072, 128, 8192), (24, 8), 28),
    "Llama-3.1-8B": _llama(8.0, (4096, 128, 14336), (32, 8), 32, tie_word_embeddings=False),
    "SmolLM2-135M": published(
        *((576, 64, 1536), (9, 3), 30),
        model_type="llama",
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    ),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    values.refuse_window()
    return read_dense(values, default_theta=1e4, has_qk_norm=False)
