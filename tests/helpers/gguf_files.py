"""GGUF files of tiny models, written by the ``gguf`` package as llama.cpp's converters write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from batchgen.model.config import ModelConfig, Rope
from batchgen.model.rope import frequencies

Kinds = Callable[[str], gguf.GGMLQuantizationType]
_ADDERS: dict[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    str: gguf.GGUFWriter.add_string,
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}


def gguf_name(name: str, layers: int, architecture: str = "lfm2") -> str:
    """What the package calls a tensor of that name."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    merged = name.removeprefix("model.") if "feed_forward.experts" in name else name  # as LFM2's converter has it
    found = names.get_name(merged, (".weight", ".bias"))
    assert found is not None, name
    return found


def architecture_of(config: ModelConfig) -> str:
    """The architecture of a model of one of the families that GGUF files hold."""
    has_experts = config.feed_forward == "experts"
    if config.num_conv_layers:
        return "lfm2moe" if has_experts else "lfm2"
    if config.has_gelu:
        return "gemma3"
    if config.logits_scale != 1:
        return "granite"
    if config.biases:
        return "qwen2"
    return ("qwen3moe" if has_experts else "qwen3") if config.has_qk_norm else "llama"


def add_experts(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    experts = config.layers[-1].experts
    assert experts
    writer.add_expert_count(experts.num_experts)
    writer.add_expert_used_count(experts.num_active)
    writer.add_expert_feed_forward_length(experts.ff_dim)
    if config.num_conv_layers:
        writer.add_leading_dense_block_count(sum(layer.experts is None for layer in config.layers))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def merged_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, those of all experts of a layer in one, and the bias of a router by its own name."""
    merged: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        merged.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
    named = {name.replace(".expert_bias", ".expert_bias.bias"): found for name, found in merged.items()}
    return {name: torch.stack(found) if "experts." in name else found[0] for name, found in named.items()}


def rotated_side_by_side(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of a query or key as Llama's converter has them: of each head i, then i + head_dim / 2."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def rope_factors(rope: Rope, head_dim: int) -> Tensor:
    """What Llama's converter writes of Llama 3's scaling: by how much each frequency is divided."""
    plain = frequencies(Rope(rope.theta), head_dim)
    return plain / frequencies(rope, head_dim)


def add_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    heads: Any = [config.num_kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    if not config.num_conv_layers:
        heads = config.num_kv_heads
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.layers[0].ff_dim or config.ff_dim)
    if config.feed_forward == "experts":
        add_experts(writer, config)
    if config.window:
        writer.add_sliding_window(config.window)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(heads)
    rope = max(config.ropes, key=lambda rope: rope.theta, default=None)  # of Gemma's layers with full attention
    writer.add_rope_freq_base(rope.theta if rope else 1e6)
    if rope and rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.num_conv_layers:
        writer.add_shortconv_l_cache(config.conv_l_cache)
    writer.add_bos_token_id(config.bos_token_id or 0)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {n}" for n in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)


def as_saved(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A value by the names that the checkpoint has, expert by expert."""
    if "experts." in name:
        return {name.replace("experts.", f"experts.{n}."): part for n, part in enumerate(value)}
    return {name.replace(".expert_bias.bias", ".expert_bias"): value}


def write_gguf(
    path: Path, config: ModelConfig, tensors: dict[str, Tensor], kind_of: Kinds, metadata: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write the tensors of a checkpoint, each of the type that ``kind_of`` says; their values as the package has them.

    ``metadata`` is added: texts, numbers, lists, and None for a key that is left out.
    """
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, config)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            _ADDERS[type(value)](writer, key, value)
    values: dict[str, np.ndarray] = {}
    rope = config.ropes[0]
    if rope.kind == "llama3":
        factors = rope_factors(rope, config.head_dim).numpy()
        writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in merged_experts(tensors).items():
        kind = kind_of(name)
        offset = architecture == "gemma3" and "norm" in name  # which its converter adds
        wide = tensor.float().numpy() + offset
        data = gguf.quantize(wide.squeeze(1) if wide.ndim == 3 and wide.shape[1] == 1 else wide, kind)
        values |= as_saved(name, gguf.dequantize(data, kind).reshape(wide.shape) - offset)
        if architecture in ("llama", "granite") and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = gguf.quantize(rotated_side_by_side(tensor.float(), config.head_dim).numpy(), kind)
        raw_type = None if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16) else kind
        writer.add_tensor(gguf_name(name, config.num_layers, architecture), data, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values
