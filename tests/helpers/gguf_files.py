"""GGUF files of the tiny model, written by the ``gguf`` package as llama.cpp's converter writes those of LFM2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from batchgen.model.config import ModelConfig

Kinds = Callable[[str], gguf.GGMLQuantizationType]


def gguf_name(name: str, layers: int) -> str:
    """What the package calls a tensor of that name in LFM2."""
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, layers).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def add_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    heads = [config.num_kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ff_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_freq_base(config.ropes[0].theta if config.ropes else 1e6)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_l_cache)
    writer.add_bos_token_id(config.bos_token_id or 0)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {n}" for n in range(3000)])
    writer.add_token_types([1] * 3000)


def write_gguf(
    path: Path, config: ModelConfig, tensors: dict[str, Tensor], kind_of: Kinds, metadata: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write the tensors of a checkpoint, each of the type that ``kind_of`` says; their values as the package has them.

    ``metadata`` is added: texts, whole numbers, and None for a key that is left out.
    """
    writer = gguf.GGUFWriter(path, "lfm2")
    add_metadata(writer, config)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    values = {}
    for name, tensor in tensors.items():
        kind = kind_of(name)
        wide = tensor.float().numpy()
        data = gguf.quantize(wide.squeeze(1) if wide.ndim == 3 else wide, kind)
        values[name] = gguf.dequantize(data, kind).reshape(wide.shape)
        raw_type = None if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16) else kind
        writer.add_tensor(gguf_name(name, config.num_layers), data, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values
