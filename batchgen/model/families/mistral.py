"""Mistral from 7B-v0.2 on, without a sliding window, and Ministral 3, with YaRN: Llama's layers.

Facts of the architecture: arXiv:2310.06825, the published ``config.json`` and transformers' models of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues, Family
from batchgen.model.families.dense import published, read_dense

_shape = partial(published, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)
_mistral = partial(_shape, model_type="mistral", sliding_window=None)
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_ministral = partial(
    _shape, model_type="ministral3", vocab_size=131072, rope_parameters=_YARN, max_position_embeddings=262144
)


def _read_mistral(values: ConfigValues) -> ModelConfig:
    values.refuse_window(default=4096)
    values.refuse("attention_bias")
    return read_dense(values, default_theta=1e4, has_qk_norm=False)


def _read_ministral(values: ConfigValues) -> ModelConfig:
    values.refuse_window()
    values.refuse("attention_bias")
    rope = values.section("rope_parameters")
    dense = read_dense(values, default_theta=1e6, has_qk_norm=False, head_dim=128)
    if not rope.get("llama_4_scaling_beta", default=0):
        return dense
    # Beyond the original context, queries are multiplied by a number that grows with the position: not supported.
    unscaled = rope.integer("original_max_position_embeddings")
    return replace(dense, max_position_embeddings=min(unscaled, dense.max_position_embeddings))


MISTRAL = Family(
    "Mistral",
    {
        "Mistral-7B-v0.3": _mistral(
            *((4096, 128, 14336), (32, 8), 32), vocab_size=32768, rope_theta=1e6, max_position_embeddings=32768
        ),
        "Mistral-Small-3.1-24B": _mistral(
            *((5120, 128, 32768), (32, 8), 40), vocab_size=131072, rope_theta=1e9, max_position_embeddings=131072
        ),
    },
    _read_mistral,
)
MINISTRAL3 = Family(
    "Ministral 3",
    {
        "Ministral-3-3B": _ministral((3072, 128, 9216), (32, 8), 26, tie_word_embeddings=True),
        "Ministral-3-8B": _ministral((4096, 128, 14336), (32, 8), 34),
    },
    _read_ministral,
)
