"""Gemma 3 as a model of text, and EmbeddingGemma, whose tokens see later ones too: two kinds of attention, more norms.

Facts of the architecture: arXiv:2503.19786, the published checkpoints' ``config.json`` and transformers' model of it.
"""

from __future__ import annotations

import math
from functools import partial

from batchgen.model.config import ATTENTION, LayerShape, ModelConfig, Rope
from batchgen.model.config_values import MAX_LAYERS, ConfigValues, Family
from batchgen.model.families import dense

_LAYER = "model.layers.{layer}"
_TENSOR_NAMES = {
    **dense.TENSOR_NAMES,
    "mixer_post_norm": f"{_LAYER}.post_attention_layernorm",
    "feed_forward_norm": f"{_LAYER}.pre_feedforward_layernorm",
    "feed_forward_post_norm": f"{_LAYER}.post_feedforward_layernorm",
}
_SLIDING = "sliding_attention"
_gemma = partial(
    dense.published,
    model_type="gemma3_text",
    vocab_size=262144,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    sliding_window=512,
    sliding_window_pattern=6,
    query_pre_attn_scalar=256,
    max_position_embeddings=32768,
    bos_token_id=2,
    eos_token_id=[1, 106],
)


def _read(values: ConfigValues) -> ModelConfig:
    values.refuse("attention_bias")
    looks_ahead = values.flag("use_bidirectional_attention", default=False)
    values.expect("hidden_activation", "gelu_pytorch_tanh", "only 'gelu_pytorch_tanh' is supported in this family")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values.expect(name, None, "it is not computed here")
    kinds, ff_dim = _kinds(values), values.integer("intermediate_size")
    head_dim = values.integer("head_dim", default=256)
    scale = (head_dim / values.number("query_pre_attn_scalar", default=256)) ** 0.25  # of queries and of keys
    shapes = {
        kind: LayerShape(
            ATTENTION,
            ff_dim,
            _rope(values, kind).scaled(scale),
            _window(values, looks_ahead=looks_ahead) if kind == _SLIDING else 0,
        )
        for kind in dict.fromkeys(kinds)
    }
    return values.model(
        [shapes[kind] for kind in kinds],
        _TENSOR_NAMES,
        norm_eps=1e-6,
        is_tied=True,
        head_dim=head_dim,
        has_post_norms=True,
        # The reference adds it in float32; here the sum is rounded once, to the model's dtype.
        norm_offset=1.0,
        has_gelu=True,
        embedding_scale=math.sqrt(values.integer("hidden_size")),
        rounds_embedding_scale=True,
    )


def _window(values: ConfigValues, *, looks_ahead: bool) -> int:
    """Positions that a token sees to one side, including its own; with ``looks_ahead`` the file counts both sides."""
    window = values.integer("sliding_window")
    return window // 2 + 1 if looks_ahead else window


def _kinds(values: ConfigValues) -> tuple[str, ...]:
    """The kind of each layer: as listed, or every sixth with full attention."""
    if values.get("layer_types", default=None) is not None:
        return values.layer_types(_SLIDING, ATTENTION)
    pattern = values.integer("sliding_window_pattern", default=6)
    num_layers = values.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return tuple(_SLIDING if (i + 1) % pattern else ATTENTION for i in range(num_layers))


def _rope(values: ConfigValues, kind: str) -> Rope:
    """The rotary embedding of one kind of attention; older files have a key for the base of each kind."""
    base, default = ("rope_local_base_freq", 1e4) if kind == _SLIDING else ("rope_theta", 1e6)
    ropes = values.section("rope_parameters", is_needed=False)
    if ropes.raw:
        if values.section("rope_scaling", is_needed=False).raw:
            raise values.error("rope_parameters and rope_scaling are both given; keep only one of them")
        return ConfigValues({"rope_parameters": ropes.section(kind).raw}, f"{values.location}: {kind}").rope(default)
    scaling = {} if kind == _SLIDING else values.section("rope_scaling", is_needed=False).raw
    part = {"rope_theta": values.number(base, default=default), "rope_scaling": scaling}
    return ConfigValues(part, f"{values.location}: {kind}").rope(default)


GEMMA3 = Family(
    "Gemma 3, text only",
    {
        "Gemma-3-270M": _gemma((640, 256, 2048), (4, 1), 18),
        "EmbeddingGemma-300M": _gemma(
            *((768, 256, 1152), (3, 1), 24),
            architectures=["Gemma3TextModel"],
            use_bidirectional_attention=True,
            max_position_embeddings=2048,
        ),
        "Gemma-3-4B": _gemma(
            *((2560, 256, 10240), (8, 4), 34),
            vocab_size=262208,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            sliding_window=1024,
            max_position_embeddings=131072,
        ),
        "Gemma-3-1B": _gemma((1152, 256, 6912), (4, 1), 26),
    },
    _read,
)
