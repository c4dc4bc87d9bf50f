"""Qwen2 and Qwen2.5, and models distilled into them: Llama's layers with biases of queries, keys and values.

Facts of the architecture: arXiv:2407.10671 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import QKV, published, read_dense

TITLE = "Qwen2.5"


def _qwen(*sizes: Any, **more: Any) -> dict[str, Any]:
    values = {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": [151645, 151643],
    }
    return published(*sizes, **{**values, **more})


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _qwen((896, 64, 4864), (14, 2), 24),
    "Qwen2.5-1.5B": _qwen((1536, 128, 8960), (12, 2), 28),
    "Qwen2.5-3B": _qwen((2048, 128, 11008), (16, 2), 36),
    "Qwen2.5-7B": _qwen((3584, 128, 18944), (28, 4), 28, vocab_size=152064, tie_word_embeddings=False),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    return read_dense(values, default_theta=1e4, has_qk_norm=False, biases=QKV)
