"""Config of the model in a GGUF file: maps metadata to keys of ``config.json``; without torch, for plans.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, as llama.cpp's ``convert_hf_to_gguf.py`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.core.errors import ModelError
from batchgen.core.gguf import GgufHeader, read_header
from batchgen.core.model_files import is_gguf
from batchgen.core.units import shown

ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3 divides its frequencies by
_LAYER = "blk.{layer}"
_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "mixer_norm": f"{_LAYER}.attn_norm",
    "feed_forward_norm": f"{_LAYER}.ffn_norm",
    "q": f"{_LAYER}.attn_q",
    "k": f"{_LAYER}.attn_k",
    "v": f"{_LAYER}.attn_v",
    "q_norm": f"{_LAYER}.attn_q_norm",
    "k_norm": f"{_LAYER}.attn_k_norm",
    "attention_out": f"{_LAYER}.attn_output",
    "gate": f"{_LAYER}.ffn_gate",
    "up": f"{_LAYER}.ffn_up",
    "down": f"{_LAYER}.ffn_down",
    "conv_in": f"{_LAYER}.shortconv.in_proj",
    "conv": f"{_LAYER}.shortconv.conv",
    "conv_out": f"{_LAYER}.shortconv.out_proj",
}
_OLD_FINAL_NORM = "token_embd_norm"  # of LFM2, in older files
_KEYS = {  # key of config.json -> key of the metadata, after the architecture
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_EXPERT_NAMES = {
    "router": f"{_LAYER}.ffn_gate_inp",
    "router_bias": f"{_LAYER}.exp_probs_b.bias",
    **{f"expert_{part}": f"{_LAYER}.ffn_{part}_exps.{{expert}}" for part in ("gate", "up", "down")},
}
_GEMMA_NAMES = {
    "mixer_post_norm": f"{_LAYER}.post_attention_norm",
    "feed_forward_post_norm": f"{_LAYER}.post_ffw_norm",
}


class _Architecture(NamedTuple):
    """A model_type, the required and optional metadata keys of its files, fixed values, and further tensors."""

    model_type: str
    keys: Mapping[str, str]
    optional: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}
    names: Mapping[str, str] = {}

    @property
    def all_keys(self) -> Mapping[str, str]:
        return {**self.keys, **self.optional}


_CONV_KEYS = _KEYS | {"conv_L_cache": "shortconv.l_cache"}
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_ARCHITECTURES = {
    "lfm2": _Architecture("lfm2", _CONV_KEYS),
    "lfm2moe": _Architecture(
        "lfm2_moe",
        _CONV_KEYS | _EXPERT_KEYS | {"num_dense_layers": "leading_dense_block_count"},
        {"routed_scaling_factor": "expert_weights_scale"},
        names=_EXPERT_NAMES,
    ),
    "llama": _Architecture("llama", _KEYS),
    "granite": _Architecture("granite", _KEYS, _GRANITE_KEYS),
    "qwen2": _Architecture("qwen2", _KEYS),
    "qwen3": _Architecture("qwen3", _KEYS),
    "qwen3moe": _Architecture("qwen3_moe", _KEYS | _EXPERT_KEYS, fixed={"norm_topk_prob": True}, names=_EXPERT_NAMES),
    "gemma3": _Architecture(
        "gemma3_text",
        _KEYS | {"sliding_window": "attention.sliding_window"},
        {"rope_local_base_freq": "rope.freq_base_swa"},
        names=_GEMMA_NAMES,
    ),
}
ROTATED = ("llama", "granite")  # architectures whose converters reorder queries and keys
_NOT_COMPUTED = (  # unsupported additions in some models of these architectures
    *("expert_count", "expert_shared_count", "expert_weights_scale", "attention.sliding_window", "attention.scale"),
    *("embedding_scale", "residual_scale", "logit_scale", "attn_logit_softcapping", "final_logit_softcapping"),
)
_GATINGS = {"lfm2moe": 2, "qwen3moe": 1}  # sigmoid and softmax
_GEMMA_27B_LAYERS = 62
_F16 = 1  # a type of tensors
_POOLINGS: Mapping[object, str] = {0: "tokens", 1: "mean", 2: "cls", 3: "last"}  # by llama.cpp's numbers; 4 ranks texts
_LOW, _HIGH = 1.0, 4.0  # factors of Llama 3's scaling, in all releases
_LLAMA3_POSITIONS = 8192


def read_gguf_config(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The ``config.json`` of the model in a GGUF file, and names of tensors by role.

    Raises ModelError for an unusable file, another architecture, or missing or unsupported metadata.
    """
    header = read_header(path, [f"{name}.attention.head_count_kv" for name in _ARCHITECTURES])
    metadata, tensors = header
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        names = ", ".join(map(repr, _ARCHITECTURES))
        raise ModelError(
            f"{path}: general.architecture is {shown(name)}; GGUF files of {names} are read: use safetensors"
        )
    architecture = _ARCHITECTURES[name]
    raw: dict[str, Any] = {"model_type": architecture.model_type, **architecture.fixed}
    raw |= {key: metadata.get(f"{name}.{suffix}") for key, suffix in architecture.all_keys.items()}
    for key, suffix in architecture.keys.items():
        if raw[key] is None and key != "num_key_value_heads":  # by default the number of query heads
            raise ModelError(f"{path}: the metadata has no '{name}.{suffix}'; convert the model again")
    _refuse_others(path, name, metadata)
    if name in ("lfm2", "lfm2moe"):
        raw |= _lfm2_layers(path, name, raw)
    if metadata.get(f"{name}.attention.causal") is False:
        raw["architectures"] = ["BidirectionalModel"]  # its convolutions are centred, as in llama.cpp
    head_dim, rotated = (metadata.get(f"{name}.{key}") for key in ("attention.key_length", "rope.dimension_count"))
    if None not in (head_dim, rotated) and head_dim != rotated:
        raise ModelError(f"{path}: {name}.rope.dimension_count {shown(rotated)} of {shown(head_dim)} is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelError(f"{path}: has no tensor 'token_embd.weight'; convert the model again")
    raw |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "head_dim": rotated if head_dim is None else head_dim,
        "rope_scaling": _rope_scaling(path, name, header, raw),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
    }
    quotient = _quotient(raw["hidden_size"], raw["num_attention_heads"])
    width = raw["head_dim"] or quotient
    if name == "gemma3":  # the largest divides scores by another width
        is_largest = raw["num_hidden_layers"] == _GEMMA_27B_LAYERS
        raw["query_pre_attn_scalar"] = quotient if is_largest else width
    if name == "granite" and raw["attention_multiplier"] is None and width:
        raw["attention_multiplier"] = width**-0.5
    is_old = f"{_OLD_FINAL_NORM}.weight" in tensors
    return raw, {**_NAMES, **architecture.names} | ({"final_norm": _OLD_FINAL_NORM} if is_old else {})


def _quotient(total: Any, parts: Any) -> int | None:
    return total // parts if type(total) is int and type(parts) is int and parts else None


def _refuse_others(path: Path, name: str, metadata: Mapping[str, Any]) -> None:
    """Raises ModelError for unsupported metadata."""
    taken = _ARCHITECTURES[name].all_keys.values()
    wrong = {suffix: metadata.get(f"{name}.{suffix}") for suffix in _NOT_COMPUTED if suffix not in taken}
    wrong = {suffix: value for suffix, value in wrong.items() if value}
    if name == "granite" and metadata.get("granite.rope.scaling.finetuned") is False:  # then nothing is rotated
        wrong["rope.scaling.finetuned"] = False
    gating = metadata.get(f"{name}.expert_gating_func")
    if gating is not None and gating != _GATINGS.get(name):
        wrong["expert_gating_func"] = gating
    for suffix, value in wrong.items():
        raise ModelError(f"{path}: {name}.{suffix} is {shown(value)}, which is not computed here; use safetensors")


def _lfm2_layers(path: Path, name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """LFM2's keys that follow from the number of KV heads of each layer, which is 0 for a convolution."""
    kv_heads = raw["num_key_value_heads"]
    if not isinstance(kv_heads, list):
        raise ModelError(f"{path}: {name}.attention.head_count_kv must be a list, not {shown(kv_heads)}")
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "num_key_value_heads": max(kv_heads, default=0),
        "block_auto_adjust_ff_dim": False,
    }


def _rope_scaling(path: Path, name: str, header: GgufHeader, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The value of ``rope_scaling``. A factor without a kind is linear, as in llama.cpp. Raises ModelError."""
    metadata = header.metadata
    factor = metadata.get(f"{name}.rope.scaling.factor", metadata.get(f"{name}.rope.scale_linear", 1))
    rope_type = metadata.get(f"{name}.rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if name == "gemma3" and rope_type == "linear":  # only its layers with full attention are scaled
        return {"rope_type": rope_type, "factor": factor}
    if rope_type != "none":
        raise ModelError(f"{path}: rope scaling {shown(rope_type)} is not supported in GGUF files; use safetensors")
    if name != "llama" or ROPE_FACTORS not in header.tensors:  # for other models it is an unknown tensor
        return None
    return _llama3_scaling(path, header, raw)


def _llama3_scaling(path: Path, header: GgufHeader, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Llama 3's scaling that gives the file's divisors of frequencies. Raises ModelError if there is none.

    The formula is the same as in ``model.rope``.
    """
    number_type, shape, offset = header.tensors[ROPE_FACTORS]
    problem = f"{path}: {ROPE_FACTORS} has not the factors of Llama 3's rotary embedding; use safetensors"
    if number_type != 0 or len(shape) != 1 or not 0 < shape[0] <= 1 << 12:
        raise ModelError(problem)
    factors = np.fromfile(path, np.float32, shape[0], offset=min(offset, 2**62))
    positions = header.metadata.get("llama.rope.scaling.original_context_length", _LLAMA3_POSITIONS)
    theta = raw["rope_theta"]
    is_sound = all(type(value) in (int, float) and value >= 1 for value in (positions, theta))
    if len(factors) < shape[0] or not np.isfinite(factors).all() or not is_sound:
        raise ModelError(problem)
    factor = float(factors[-1])  # the longest wavelength's
    turns = positions * float(theta) ** -(np.arange(len(factors)) / len(factors)) / (2 * np.pi)
    share = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    if factor < 1 or not np.allclose(factors, 1 / ((1 - share) / factor + share), rtol=1e-4, atol=0):
        raise ModelError(problem)
    if factor == 1:
        return None
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
    return {**scaling, "original_max_position_embeddings": positions}


def holds_float16(model: Path | None) -> bool:
    """Whether a model is a GGUF file with matrices in float16."""
    if model is None or not is_gguf(model):
        return False
    return any(entry.kind == _F16 and len(entry.shape) > 1 for entry in read_header(model).tensors.values())


def read_gguf_pooling(path: Path) -> str:
    """The pooling that a file names for its vectors, or "". Raises ModelError for an unsupported one."""
    metadata = read_header(path).metadata
    key = f"{metadata.get('general.architecture')}.pooling_type"
    value = metadata.get(key)
    if value is not None and value not in _POOLINGS:
        raise ModelError(f"{path}: {key} is {shown(value)}, which is not computed here; use safetensors")
    return _POOLINGS.get(value, "")


def _end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    token_ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token_id for token_id in token_ids if isinstance(token_id, int)))
