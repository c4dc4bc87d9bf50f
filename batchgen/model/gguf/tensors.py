"""The tensors of a GGUF file as a source of plain weights.

Numbers are read here; the ``gguf`` package, which knows the blocks of each quantized type, turns them into float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.core.gguf import GgufTensor, read_header
from batchgen.core.model_files import file_bytes
from batchgen.model.gguf.config import ROPE_FACTORS, ROTATED
from batchgen.model.weights import Init, Shape, StoredTensors, fill_rows, is_finite

_NUMBERS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}  # by type
_ROTATED = (".attn_q.weight", ".attn_k.weight")
_MAX_EXPERTS = 1 << 12  # of a layer
_CHUNK = 1 << 18  # values turned into float32 at once: these stay in the processor's cache, all of a row's do not


class GgufTensors(StoredTensors[GgufTensor]):
    """Tensors of a GGUF file, each read back into ``dtype``. A tensor of all experts is read one expert at a time.

    For the architectures ``ROTATED``, converters put outputs i and i + head_dim / 2 of each head side by side; they are
    moved back here. With ``is_exact``, blocks are read into float32, from which the file's integers of Q8_0 can be made
    again.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, head_dim: int = 2, *, is_exact: bool = False
    ) -> None:
        metadata, tensors = read_header(path)
        architecture = metadata.get("general.architecture")
        self._rotated = _ROTATED if architecture in ROTATED else ()
        self._pairs = head_dim // 2
        self._of_blocks = torch.float32 if is_exact else dtype
        # Llama 3's factors are compared when the config is read.
        entries = {name: entry for name, entry in tensors.items() if (architecture, name) != ("llama", ROPE_FACTORS)}
        super().__init__(path, dtype, device, dict(_by_expert(entries)))

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name; axes of one element may be missing in the file, as in convolutions.

        Raises ModelError: no such tensor, another shape, a type that is not read, data beyond the end of the file, or
        numbers that are not finite.
        """
        entry = self._locations.get(name)
        if entry is None:
            raise self._error(name, "is missing; convert the model again")
        if [n for n in entry.shape if n != 1] != [n for n in shape if n != 1]:
            raise self._error(name, f"has shape {list(entry.shape)}; the metadata asks for {list(shape)}")
        wanted = dtype or (self.dtype if entry.kind in _NUMBERS else self._of_blocks)
        if entry.kind in _NUMBERS:
            dtype = _NUMBERS[entry.kind]
            tensor = torch.from_numpy(self._bytes(name, entry, math.prod(shape) * dtype.itemsize)).view(dtype)
        else:
            tensor = self._from_blocks(name, entry, wanted)
        tensor = tensor.to(self.device, wanted).view(shape)
        if name.endswith(self._rotated):
            tensor = tensor.view(-1, self._pairs, 2, shape[1]).transpose(1, 2).reshape(shape)
        if not is_finite(tensor):
            raise self._error(name, "has values that are not finite; download the file again")
        self._taken.add(name)
        return tensor

    def _from_blocks(self, name: str, entry: GgufTensor, dtype: torch.dtype) -> Tensor:
        import gguf

        try:
            block_type = gguf.GGMLQuantizationType(entry.kind)
        except ValueError:
            raise self._error(name, f"has type {entry.kind}, which the installed gguf package does not know") from None
        values_per_block, block_bytes = gguf.GGML_QUANT_SIZES[block_type]
        width = math.prod(entry.shape[-1:])
        if width % values_per_block:
            raise self._error(name, f"has rows of {width} values, {block_type.name} blocks of {values_per_block}")
        num_blocks = math.prod(entry.shape) // values_per_block
        data = self._bytes(name, entry, num_blocks * block_bytes).reshape(num_blocks, block_bytes)
        tensor = torch.empty((num_blocks, values_per_block), dtype=dtype)

        def fill(rows: slice) -> None:
            part = data[rows]
            with np.errstate(all="ignore"):  # scales may not be finite; the caller checks
                wide = gguf.dequantize(part.reshape(1, -1), block_type)
            tensor[rows] = torch.from_numpy(wide).view(len(part), -1)

        try:
            fill_rows(fill, num_blocks, _CHUNK // values_per_block)
        except NotImplementedError:
            raise self._error(name, f"has type {block_type.name}, which is not supported; use another file") from None
        return tensor

    def _bytes(self, name: str, entry: GgufTensor, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if entry.offset + count > file_bytes(self.path):
            raise self._error(name, "lies beyond the end of the file; download it again")
        return np.fromfile(self.path, np.uint8, count, offset=entry.offset)

    def _error(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {name!r} {what}")


def _by_expert(entries: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors' places by name; a tensor of all experts, ``x.weight``, is split into ``x.0.weight`` and so on."""
    for name, entry in entries.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_exps") or len(entry.shape) != 3:
            yield name, entry
            continue
        count, *shape = entry.shape
        num_bytes = _num_bytes(entry.kind, math.prod(shape))
        for expert in range(min(count, _MAX_EXPERTS)):
            yield f"{module}.{expert}.weight", GgufTensor(entry.kind, tuple(shape), entry.offset + expert * num_bytes)


def _num_bytes(number_type: int, count: int) -> int:
    """Bytes of ``count`` values of a type; 0 for an unknown type, which is refused when it is read."""
    if number_type in _NUMBERS:
        return count * _NUMBERS[number_type].itemsize
    import gguf

    try:
        values_per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number_type)]
    except ValueError:
        return 0
    return count // values_per_block * block_bytes
