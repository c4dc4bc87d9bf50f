"""LFM2 and LFM2.5, dense and with experts: gated short convolutions and grouped-query attention in one stack.

Facts of the architecture: arXiv:2511.23404 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchgen.core.units import shown
from batchgen.model.config import ATTENTION, CONV, LayerShape, ModelConfig
from batchgen.model.config_values import MAX_LAYERS, ConfigValues, Family

CONV_BIASES = ("conv_in", "conv", "conv_out")
_LAYER = "model.layers.{layer}"
TENSOR_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.embedding_norm",
    "head": "lm_head",
    "mixer_norm": f"{_LAYER}.operator_norm",
    "feed_forward_norm": f"{_LAYER}.ffn_norm",
    "q": f"{_LAYER}.self_attn.q_proj",
    "k": f"{_LAYER}.self_attn.k_proj",
    "v": f"{_LAYER}.self_attn.v_proj",
    "attention_out": f"{_LAYER}.self_attn.out_proj",
    "q_norm": f"{_LAYER}.self_attn.q_layernorm",
    "k_norm": f"{_LAYER}.self_attn.k_layernorm",
    "conv_in": f"{_LAYER}.conv.in_proj",
    "conv": f"{_LAYER}.conv.conv",
    "conv_out": f"{_LAYER}.conv.out_proj",
    "gate": f"{_LAYER}.feed_forward.w1",
    "up": f"{_LAYER}.feed_forward.w3",
    "down": f"{_LAYER}.feed_forward.w2",
}
_FEED_FORWARD = "model.layers.{layer}.feed_forward"
_MOE_NAMES = {
    **TENSOR_NAMES,
    "router": f"{_FEED_FORWARD}.gate",
    "router_bias": f"{_FEED_FORWARD}.expert_bias",
    "expert_gate": f"{_FEED_FORWARD}.experts.{{expert}}.w1",
    "expert_up": f"{_FEED_FORWARD}.experts.{{expert}}.w3",
    "expert_down": f"{_FEED_FORWARD}.experts.{{expert}}.w2",
    "experts_gate_up": f"{_FEED_FORWARD}.experts.gate_up_proj",
    "experts_down": f"{_FEED_FORWARD}.experts.down_proj",
}


def _published(hidden_size: int, num_heads: int, attention: list[int], **more: Any) -> dict[str, Any]:
    """A published ``config.json`` without the values that are defaults."""
    return {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "full_attn_idxs": attention,
        "conv_L_cache": 3,
        "max_position_embeddings": 128_000,
        "bos_token_id": 1,
        "eos_token_id": 7,
        **more,
    }


_SIXTEEN: dict[str, Any] = {"attention": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16}
_THIRTY: dict[str, Any] = {"attention": [2, 5, 9, 13, 17, 21, 24, 27], "num_hidden_layers": 30}


def _read(values: ConfigValues, ff_dim: int) -> ModelConfig:
    rope = values.rope(default_theta=1e6)
    return values.model(
        [LayerShape(mixer, ff_dim, rope if mixer == ATTENTION else None) for mixer in _mixers(values)],
        TENSOR_NAMES,
        norm_eps=1e-5,
        is_tied=True,
        conv_l_cache=values.integer("conv_L_cache", minimum=2),
        biases=CONV_BIASES if values.flag("conv_bias", default=False) else (),
    )


def _mixers(values: ConfigValues) -> tuple[str, ...]:
    num_layers = values.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if values.get("layer_types", default=None) is None:
        attention = values.get("full_attn_idxs")
        if not isinstance(attention, list) or not all(type(i) is int and 0 <= i < num_layers for i in attention):
            raise values.error(f"full_attn_idxs must list layers from 0 to {num_layers - 1}, not {shown(attention)}")
        return tuple(ATTENTION if i in attention else CONV for i in range(num_layers))
    return values.layer_types(ATTENTION, CONV)


def _ff_dim(values: ConfigValues) -> int:
    """The feed-forward width of the weights, which by default is 2/3 of the stated one, rounded up."""
    width = values.integer("block_ff_dim", "intermediate_size")
    if not values.flag("block_auto_adjust_ff_dim", default=True):
        return width
    scaled = values.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3)
    if not 1 <= scaled < 2**31:
        raise values.error(f"block_ff_dim {width} makes feed-forward layers of width {scaled:g}")
    multiple = values.integer("block_multiple_of", default=256)
    return multiple * -(-int(scaled) // multiple)


def _read_moe(values: ConfigValues) -> ModelConfig:
    dense = _read(values, values.integer("intermediate_size"))
    experts = values.experts(
        "sigmoid",
        is_normalized=True,
        normalizer_eps=1e-6,
        has_bias=values.flag("use_expert_bias", default=True),
        scale=values.number("routed_scaling_factor", default=1.0),
    )
    first = values.integer("num_dense_layers", default=2, minimum=0)
    sparse = [replace(layer, ff_dim=0, experts=experts) for layer in dense.layers[first:]]
    return replace(dense, layers=(*dense.layers[:first], *sparse), tensor_names=_MOE_NAMES)


LFM2 = Family(
    "dense LFM2",
    {
        "LFM2-350M": _published(1024, 16, **_SIXTEEN, block_ff_dim=6656),
        "LFM2.5-Embedding-350M": _published(
            1024, 16, **_SIXTEEN, block_ff_dim=6656, architectures=["Lfm2BidirectionalModel"]
        ),
        "LFM2.5-Encoder-350M": _published(
            1024, 16, **_SIXTEEN, block_ff_dim=6656, architectures=["Lfm2BidirectionalForMaskedLM"]
        ),
        "LFM2-700M": _published(1536, 24, **_SIXTEEN, block_ff_dim=10240),
        "LFM2-1.2B": _published(2048, 32, **_SIXTEEN, block_ff_dim=12288),
        "LFM2-2.6B": _published(2048, 32, **_THIRTY, block_ff_dim=10752, block_auto_adjust_ff_dim=False),
    },
    lambda values: _read(values, _ff_dim(values)),
)
LFM2_MOE = Family(
    "LFM2 MoE",
    {
        "LFM2-8B-A1B": _published(
            *(2048, 32, [2, 6, 10, 14, 18, 21]),
            model_type="lfm2_moe",
            num_hidden_layers=24,
            intermediate_size=7168,
            moe_intermediate_size=1792,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
        ),
    },
    _read_moe,
)
