"""Qwen2 and Qwen2.5, whose queries, keys and values have biases, and Qwen3, with norms per head, dense or of experts.

Facts of the architecture: arXiv:2407.10671, arXiv:2505.09388 and the published checkpoints' ``config.json``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues, Family
from batchgen.model.families.dense import QKV, TENSOR_NAMES, published, read_dense

_MLP = "model.layers.{layer}.mlp"
_MOE_NAMES = {
    **TENSOR_NAMES,
    "router": f"{_MLP}.gate",
    "expert_gate": f"{_MLP}.experts.{{expert}}.gate_proj",
    "expert_up": f"{_MLP}.experts.{{expert}}.up_proj",
    "expert_down": f"{_MLP}.experts.{{expert}}.down_proj",
    "experts_gate_up": f"{_MLP}.experts.gate_up_proj",
    "experts_down": f"{_MLP}.experts.down_proj",
}
_qwen = partial(published, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6, eos_token_id=[151645, 151643])
_qwen2 = partial(_qwen, model_type="qwen2", max_position_embeddings=32768, tie_word_embeddings=True)
_qwen3 = partial(_qwen, model_type="qwen3", max_position_embeddings=40960, tie_word_embeddings=True)
_4B = ((2560, 128, 9728), (32, 8), 36)
_read_qwen2 = partial(read_dense, default_theta=1e4, has_qk_norm=False, biases=QKV)
_read_qwen3 = partial(read_dense, default_theta=1e4)


def _read_qwen3_moe(values: ConfigValues) -> ModelConfig:
    values.expect("decoder_sparse_step", 1, "only models with experts in every layer are supported")
    values.expect("mlp_only_layers", [], "only models with experts in every layer are supported")
    dense, experts = read_dense(values, default_theta=1e4), values.experts("softmax", is_normalized=False)
    layers = tuple(replace(layer, ff_dim=0, experts=experts) for layer in dense.layers)
    return replace(dense, layers=layers, tensor_names=_MOE_NAMES)


QWEN2 = Family(
    "Qwen2.5",
    {
        "Qwen2.5-0.5B": _qwen2((896, 64, 4864), (14, 2), 24),
        "Qwen2.5-1.5B": _qwen2((1536, 128, 8960), (12, 2), 28),
        "Qwen2.5-3B": _qwen2((2048, 128, 11008), (16, 2), 36),
        "Qwen2.5-7B": _qwen2((3584, 128, 18944), (28, 4), 28, vocab_size=152064, tie_word_embeddings=False),
    },
    _read_qwen2,
)
QWEN3 = Family(
    "dense Qwen3",
    {
        "Qwen3-0.6B": _qwen3((1024, 128, 3072), (16, 8), 28),
        "Qwen3-Embedding-0.6B": _qwen3(
            *((1024, 128, 3072), (16, 8), 28),
            vocab_size=151669,
            max_position_embeddings=32768,
            architectures=["Qwen3Model"],
        ),
        "Qwen3-1.7B": _qwen3((2048, 128, 6144), (16, 8), 28),
        "Qwen3-4B": _qwen3(*_4B),
        "Qwen3-4B-Instruct-2507": _qwen3(*_4B, rope_theta=5e6, max_position_embeddings=262144),
        "Qwen3-8B": _qwen3((4096, 128, 12288), (32, 8), 36, tie_word_embeddings=False),
    },
    _read_qwen3,
)
QWEN3_MOE = Family(
    "Qwen3 MoE",
    {
        "Qwen3-30B-A3B": _qwen(
            *((2048, 128, 6144), (32, 4), 48),
            model_type="qwen3_moe",
            max_position_embeddings=40960,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        )
    },
    _read_qwen3_moe,
)
