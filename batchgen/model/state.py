"""Memory of the state that sequences keep between steps: paged keys and values, and inputs of short convolutions.

It holds tensors and their layout; the scheduler decides which sequence owns which block or slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.inputs import ConvState, KVCache, upload
from batchgen.model.config import ModelConfig, padded

KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}  # types that keys and values may be rounded to


def key_pack(dtype: torch.dtype, device: torch.device, width: int) -> int:
    """The number of dimensions of a key that are adjacent in memory.

    The CPU multiplies bfloat16 in pairs, all else one by one. Elsewhere keys have the layout of values: a GPU writes a
    key in one piece and reads the keys of a block in one piece, in the layout that its matrix instructions take.
    """
    if device.type != "cpu":
        return width
    return 2 if dtype == torch.bfloat16 else 1


@dataclass(frozen=True, slots=True)
class StateCache:
    """State of all layers: ``kv`` per attention layer, ``conv`` per convolution layer, in layer order."""

    kv: tuple[KVCache, ...]
    conv: tuple[ConvState, ...]

    def restore_conv(self, blocks: list[int], slots: list[int]) -> None:
        """Copy the convolution state at the end of each of ``blocks`` to the slot of the same index in ``slots``."""
        if self.conv:
            sources, targets = upload(torch.tensor([blocks, slots]), self.conv[0].slots.device)
            for state in self.conv:
                state.slots[targets] = state.blocks[sources]


def allocate(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_cache_dtype: torch.dtype | None = None,
) -> StateCache:
    """Zeroed state: values that a vector reads beyond the end of a sequence are masked, but must be finite.

    ``kv_cache_dtype`` is what keys and values are rounded to, if not ``dtype``. The keys have one more block, for the
    last vector of a block whose size is not a multiple of ``LANES``.
    """
    cached = kv_cache_dtype or dtype
    heads, width, lanes = config.num_kv_heads, padded(config.head_dim), padded(block_size)
    pack = key_pack(cached, device, width)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # The system provides this memory when it is first touched: unused parts of a pool cost nothing.
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

    kv = tuple(
        KVCache(
            keys=zeros(num_blocks + 1, heads, width // pack, lanes, pack, dtype=cached),
            values=zeros(num_blocks, heads, block_size, width, dtype=cached),
            block_size=block_size,
            scales=zeros(num_blocks, heads, 2, lanes, dtype=torch.float32) if cached is torch.int8 else None,
        )
        for _ in range(config.num_attention_layers)
    )
    reach, width = config.conv_l_cache - 1, config.hidden_size
    conv = tuple(
        ConvState(zeros(num_slots, reach, width), zeros(num_blocks, reach, width), block_size)
        for _ in range(config.num_conv_layers)
    )
    return StateCache(kv, conv)
