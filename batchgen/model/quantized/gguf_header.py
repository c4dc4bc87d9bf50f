"""Header of a GGUF file: its metadata, where its tensors are, and the config of the model that they describe.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. It is parsed here, without the ``gguf`` package,
because that package trusts the lengths that a file states; and without torch, so that a plan can read it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.core.errors import ModelError
from batchgen.core.model_files import file_bytes
from batchgen.core.units import one_line, shown

_MAX_HEADER_BYTES = 64 << 20  # the largest vocabularies with their merges take 20
_MAX_KEPT = 1024  # elements of an array: those of a vocabulary are passed over
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LAYER = "blk.{layer}"
_LFM2_NAMES = {
    "embedding": "token_embd",
    "final_norm": "token_embd_norm",
    "head": "output",
    "mixer_norm": f"{_LAYER}.attn_norm",
    "feed_forward_norm": f"{_LAYER}.ffn_norm",
    "q": f"{_LAYER}.attn_q",
    "k": f"{_LAYER}.attn_k",
    "v": f"{_LAYER}.attn_v",
    "attention_out": f"{_LAYER}.attn_output",
    "q_norm": f"{_LAYER}.attn_q_norm",
    "k_norm": f"{_LAYER}.attn_k_norm",
    "conv_in": f"{_LAYER}.shortconv.in_proj",
    "conv": f"{_LAYER}.shortconv.conv",
    "conv_out": f"{_LAYER}.shortconv.out_proj",
    "gate": f"{_LAYER}.ffn_gate",
    "up": f"{_LAYER}.ffn_up",
    "down": f"{_LAYER}.ffn_down",
}
_LFM2_KEYS = {  # key of config.json -> key of the metadata, behind "lfm2."
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "block_ff_dim": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
}


class GgufTensor(NamedTuple):
    """Place of one tensor: the number of its type, its ``shape`` as torch has it, its first byte in the file."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class GgufHeader(NamedTuple):
    """Metadata by key, None for arrays of more than a thousand values; tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file. Raises ModelError if it is no GGUF file, cut short, or not of one piece."""
    size = file_bytes(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(_Cursor(data, min(size, _MAX_HEADER_BYTES)))
    except (OSError, ValueError, struct.error) as error:
        why = "its header is cut short" if isinstance(error, struct.error) else one_line(error)
        raise ModelError(f"{path}: no usable GGUF file ({why}); download it again") from None
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{path}: is one piece of several; join them with llama-gguf-split --merge")
    return header


def read_gguf_config(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """What ``config.json`` of the model in a GGUF file would hold, and the names of its tensors by role.

    Raises ModelError for an unusable file, another architecture, or missing metadata.
    """
    metadata, tensors = read_header(path)
    architecture = metadata.get("general.architecture")
    if architecture != "lfm2":
        raise ModelError(
            f"{path}: general.architecture is {shown(architecture)}; GGUF files of 'lfm2' are read: use safetensors"
        )
    kv_heads = metadata.get("lfm2.attention.head_count_kv")  # per layer, 0 for a convolution
    if not isinstance(kv_heads, list):
        raise ModelError(f"{path}: lfm2.attention.head_count_kv must be a list, not {shown(kv_heads)}")
    raw: dict[str, Any] = {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "num_key_value_heads": max(kv_heads, default=0),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": "output.weight" not in tensors,
        "head_dim": metadata.get("lfm2.attention.key_length"),
        "rope_scaling": _rope_scaling(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
    }
    for key, name in _LFM2_KEYS.items():
        raw[key] = metadata.get(f"lfm2.{name}")
        if raw[key] is None:
            raise ModelError(f"{path}: the metadata has no 'lfm2.{name}'; convert the model again")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelError(f"{path}: has no tensor 'token_embd.weight'; convert the model again")
    raw["vocab_size"] = embedding.shape[0]
    has_new_name = "output_norm.weight" in tensors
    return raw, _LFM2_NAMES | ({"final_norm": "output_norm"} if has_new_name else {})


def _rope_scaling(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = metadata.get("lfm2.rope.scaling.type")
    return None if kind in (None, "none") else {"rope_type": kind}


def _end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return list(dict.fromkeys(token_id for token_id in found if isinstance(token_id, int)))


class _Cursor:
    """Reads little-endian values one after the other, none beyond ``end``. Raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self.offset = 0

    def number(self, code: str) -> Any:
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return float(str(np.float32(value))) if code == "f" else value  # the shortest number of that float32

    def take(self, count: int) -> bytes:
        if count > self._end - self.offset:
            raise struct.error
        self.offset += count
        return self._data[self.offset - count : self.offset]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def skip_texts(self, count: int) -> None:
        """Pass over ``count`` strings."""
        if 8 * count > self._end - self.offset:  # of which each has its length
            raise struct.error
        offset, end, length_at = self.offset, self._end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if offset > end:
                raise struct.error
            offset += 8 + length_at(self._data, offset)[0]
        self.offset = offset

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"metadata of unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any] | None:
        if kind == _STRING:
            self.skip_texts(count)
            return None
        if kind not in _SCALARS:
            raise ValueError(f"an array of type {kind}")
        if count <= _MAX_KEPT:
            return [self.number(_SCALARS[kind]) for _ in range(count)]
        self.take(count * struct.calcsize("<" + _SCALARS[kind]))
        return None


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are read")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value()
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        num_dimensions = cursor.number("I")
        if name in tensors or num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)} is there twice, or has more than {_MAX_DIMENSIONS} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
        tensors[name] = GgufTensor(cursor.number("I"), shape, cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"general.alignment is {shown(alignment)}")
    start = -(-cursor.offset // alignment) * alignment
    return GgufHeader(metadata, {name: found._replace(offset=start + found.offset) for name, found in tensors.items()})
