"""Config parser of families whose layers are attention and a feed-forward, with Llama's keys and tensor names."""

from __future__ import annotations

from typing import Any

from batchgen.model.config import ATTENTION, LayerShape, ModelConfig
from batchgen.model.config_values import MAX_LAYERS, ConfigValues

QKV = ("q", "k", "v")
_LAYER = "model.layers.{layer}"
TENSOR_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "mixer_norm": f"{_LAYER}.input_layernorm",
    "feed_forward_norm": f"{_LAYER}.post_attention_layernorm",
    "q": f"{_LAYER}.self_attn.q_proj",
    "k": f"{_LAYER}.self_attn.k_proj",
    "v": f"{_LAYER}.self_attn.v_proj",
    "q_norm": f"{_LAYER}.self_attn.q_norm",
    "k_norm": f"{_LAYER}.self_attn.k_norm",
    "attention_out": f"{_LAYER}.self_attn.o_proj",
    "gate": f"{_LAYER}.mlp.gate_proj",
    "up": f"{_LAYER}.mlp.up_proj",
    "down": f"{_LAYER}.mlp.down_proj",
}


def published(widths: tuple[int, int, int], heads: tuple[int, int], num_layers: int, **more: Any) -> dict[str, Any]:
    """A published ``config.json``.

    ``widths`` are the widths of the residual stream, a head and the feed-forward; ``heads`` are the numbers of query
    and key heads.
    """
    return {
        "hidden_size": widths[0],
        "head_dim": widths[1],
        "intermediate_size": widths[2],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_hidden_layers": num_layers,
        **more,
    }


def read_dense(
    values: ConfigValues, default_theta: float, *, is_tied: bool = False, has_qk_norm: bool = True, **more: Any
) -> ModelConfig:
    """The shape of the model that has this ``config.json``; ``more`` are further fields.

    Raises ModelError, for biases of feed-forwards, sliding windows and other activations too.
    """
    values.refuse("mlp_bias", "use_sliding_window")
    values.expect("hidden_act", "silu", "only 'silu' is supported")
    if values.get("layer_types", default=None) is not None:
        values.layer_types(ATTENTION)
    layer = LayerShape(ATTENTION, values.integer("intermediate_size"), values.rope(default_theta))
    layers = (layer,) * values.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if values.flag("attention_bias", default=False):
        more = {"biases": (*QKV, "attention_out"), **more}
    return values.model(layers, TENSOR_NAMES, norm_eps=1e-6, is_tied=is_tied, has_qk_norm=has_qk_norm, **more)
