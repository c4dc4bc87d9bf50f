"""Llama 3; SmolLM2, with the same layers; SmolLM3, in which every fourth layer lacks a rotary embedding.

Facts: arXiv:2407.21783, arXiv:2502.02737, arXiv:2501.18795 (layers without rotation), transformers' model of SmolLM3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchgen.core.units import shown
from batchgen.model.config import NO_ROPE, ModelConfig
from batchgen.model.config_values import ConfigValues, Family
from batchgen.model.families.dense import published, read_dense


def _llama(factor: float, *sizes: Any, is_tied: bool = True) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return published(
        *sizes,
        model_type="llama",
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling={**scaling, "original_max_position_embeddings": 8192},
        max_position_embeddings=131072,
        tie_word_embeddings=is_tied,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
    )


def _read_llama(values: ConfigValues) -> ModelConfig:
    values.refuse_window()
    return read_dense(values, default_theta=1e4, has_qk_norm=False)


def _read_smollm3(values: ConfigValues) -> ModelConfig:
    dense = read_dense(values, default_theta=2e6, is_tied=True, has_qk_norm=False)
    layers = [
        layer if is_rotated else replace(layer, rope=NO_ROPE)
        for layer, is_rotated in zip(dense.layers, _rotated(values, dense.num_layers), strict=False)
    ]
    return replace(dense, layers=tuple(layers))


def _rotated(values: ConfigValues, num_layers: int) -> list[int]:
    """1 for each layer with a rotary embedding, 0 for each without one, as in ``no_rope_layers``."""
    interval = values.integer("no_rope_layer_interval", default=4)
    listed = values.get("no_rope_layers", default=[int((i + 1) % interval > 0) for i in range(num_layers)])
    if not isinstance(listed, list) or len(listed) < num_layers or any(x not in (0, 1) for x in listed):
        raise values.error(f"no_rope_layers must have 1 or 0 for each of {num_layers} layers, not {shown(listed)}")
    return listed


LLAMA = Family(
    "Llama 3, SmolLM2",
    {
        "Llama-3.2-1B": _llama(32.0, (2048, 64, 8192), (32, 8), 16),
        "Llama-3.2-3B": _llama(32.0, (3072, 128, 8192), (24, 8), 28),
        "Llama-3.1-8B": _llama(8.0, (4096, 128, 14336), (32, 8), 32, is_tied=False),
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
    },
    _read_llama,
)
SMOLLM3 = Family(
    "SmolLM3",
    {
        "SmolLM3-3B": published(
            *((2048, 128, 11008), (16, 4), 36),
            model_type="smollm3",
            vocab_size=128256,
            rms_norm_eps=1e-6,
            rope_theta=5e6,
            max_position_embeddings=65536,
            no_rope_layer_interval=4,
            eos_token_id=128012,
        )
    },
    _read_smollm3,
)
