"""LFM3: LFM2's layers with gated attention, partly over a sliding window, and norms on mixer and feed-forward outputs.

Facts of the architecture: the published checkpoint's ``config.json`` and transformers' model of it.
"""

from __future__ import annotations

from typing import Any

from batchgen.model.config import ATTENTION, CONV, LayerShape, ModelConfig, Rope
from batchgen.model.config_values import ConfigValues, Family
from batchgen.model.families import lfm2

_LAYER = "model.layers.{layer}"
_TENSOR_NAMES = {
    **lfm2.TENSOR_NAMES,
    "mixer_post_norm": f"{_LAYER}.post_operator_norm",
    "feed_forward_post_norm": f"{_LAYER}.post_ffn_norm",
    "attention_out": f"{_LAYER}.self_attn.o_proj",
    "q_norm": f"{_LAYER}.self_attn.q_norm",
    "k_norm": f"{_LAYER}.self_attn.k_norm",
    "attention_gate": f"{_LAYER}.self_attn.gate_proj",
}
_SLIDING = "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    ATTENTION: {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_KINDS = {2: ATTENTION, 0: _SLIDING}


def _read(values: ConfigValues) -> ModelConfig:
    values.refuse("attention_bias")
    kinds, ff_dim = values.layer_types(ATTENTION, _SLIDING, CONV), values.integer("intermediate_size")
    shapes = {kind: _layer(values, kind, ff_dim) for kind in dict.fromkeys(kinds)}
    return values.model(
        [shapes[kind] for kind in kinds],
        _TENSOR_NAMES,
        norm_eps=1e-5,
        is_tied=True,
        head_dim=128,
        module_names={"self_attn.g_proj": "self_attn.gate_proj"},
        has_attention_gate=values.flag("use_attention_gate", default=True),
        has_post_norms=values.flag("use_sandwich_norm", default=True),
        conv_l_cache=values.integer("conv_L_cache", default=7, minimum=2),
        biases=lfm2.CONV_BIASES if values.flag("conv_bias", default=False) else (),
    )


def _layer(values: ConfigValues, kind: str, ff_dim: int) -> LayerShape:
    if kind == CONV:
        return LayerShape(CONV, ff_dim)
    window = values.integer("sliding_window") if kind == _SLIDING else 0
    return LayerShape(ATTENTION, ff_dim, _rope(values, kind), window)


def _rope(values: ConfigValues, kind: str) -> Rope:
    """The rotary embedding of one kind of attention; for full attention "proportional", as the publisher computes it.

    The released config says "default" with a ``partial_rotary_factor`` of 0.5: transformers rotates all pairs for that,
    which is not how the model was trained.
    """
    ropes = values.section("rope_parameters", is_needed=False)
    part = dict(ConfigValues(ropes.raw or _ROPES, ropes.location).section(kind).raw)
    if part.get("partial_rotary_factor") is not None and part.get("rope_type", "default") == "default":
        part["rope_type"] = "proportional"
    return ConfigValues({"rope_parameters": part}, f"{values.location}: {kind}").rope(_ROPES[kind]["rope_theta"])


LFM3 = Family(
    "LFM3",
    {
        "LFM3-1.7B": {
            "model_type": "lfm3",
            "vocab_size": 128_000,
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "layer_types": [_KINDS.get(i % 4, CONV) if i else CONV for i in range(24)],
            "sliding_window": 256,
            "conv_L_cache": 7,
            "rope_parameters": _ROPES,
            "max_position_embeddings": 262_144,
            "bos_token_id": 124_894,
            "eos_token_id": 124_900,
        }
    },
    _read,
)
