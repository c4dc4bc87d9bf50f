"""SmolLM3: Llama's layers, every fourth without a rotary embedding.

Facts of the architecture: arXiv:2501.18795 (layers without rotation), the published checkpoint's ``config.json`` and
transformers' model of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.core.units import shown
from batchgen.model.config import NO_ROPE, ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families.dense import published, read_dense

TITLE = "SmolLM3"
SHAPES: Mapping[str, Mapping[str, Any]] = {
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
}


def read_config(values: ConfigValues) -> ModelConfig:
    """The shape of the model that has this ``config.json``. Raises ModelError."""
    dense = read_dense(values, default_theta=2e6, is_tied=True, has_qk_norm=False)
    layers = [
        layer if is_rotated else replace(layer, rope=NO_ROPE)
        for layer, is_rotated in zip(dense.layers, _rotated(values, dense.num_layers), strict=False)
    ]
    return replace(dense, layers=tuple(layers))


def _rotated(values: ConfigValues, num_layers: int) -> list[int]:
    """1 for each layer with a rotary embedding, 0 for each without, which is what ``no_rope_layers`` lists."""
    interval = values.integer("no_rope_layer_interval", default=4)
    listed = values.get("no_rope_layers", default=[int((i + 1) % interval > 0) for i in range(num_layers)])
    if not isinstance(listed, list) or len(listed) < num_layers or any(x not in (0, 1) for x in listed):
        raise values.error(f"no_rope_layers must have 1 or 0 for each of {num_layers} layers, not {shown(listed)}")
    return listed
