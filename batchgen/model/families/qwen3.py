"""Dense Qwen3: Llama's layers with a norm per head on queries and keys.

Facts of the architecture: arXiv:2505.09388 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import published, read_dense

TITLE = "dense Qwen3"


def _qwen(*sizes: Any, **more: Any) -> dict[str, Any]:
    values = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "eos_token_id": [151645, 151643],
    }
    return published(*sizes, **{**values, **more})


_4B = ((2560, 128, 9728), (32, 8), 36)
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": _qwen((1024, 128, 3072), (16, 8), 28),
    "Qwen3-Embedding-0.6B": _qwen(
        (1024, 128, 3072), (16, 8), 28, vocab_size=151669, max_position_embeddings=32768, architectures=["Qwen3Model"]
    ),
    "Qwen3-1.7B": _qwen((2048, 128, 6144), (16, 8), 28),
    "Qwen3-4B": _qwen(*_4B),
    "Qwen3-4B-Instruct-2507": _qwen(*_4B, rope_theta=5e6, max_position_embeddings=262144),
    "Qwen3-8B": _qwen((4096, 128, 12288), (32, 8), 36, tie_word_embeddings=False),
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    return read_dense(values, default_theta=1e4)
