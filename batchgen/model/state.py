"""The state a sequence leaves between steps: paged keys and values, and the short convolutions' last inputs.

Holds memory and its layout; who owns which block or slot is the scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.inputs import ConvState, KVCache, upload
from batchgen.model import state_bytes
from batchgen.model.config import ModelConfig
from batchgen.model.state_bytes import LANES, padded

__all__ = ["LANES", "ConvState", "KVCache", "StateCache", "allocate", "conv_slot_bytes", "kv_block_bytes"]


def key_pack(dtype: torch.dtype, device: torch.device) -> int:
    """Dimensions of a key that lie side by side: the CPU multiplies bfloat16 by pairs, other back ends one by one."""
    return 2 if dtype == torch.bfloat16 and device.type == "cpu" else 1


@dataclass(frozen=True, slots=True)
class StateCache:
    """State of all layers: ``kv`` per attention layer, ``conv`` per convolution layer, in layer order."""

    kv: tuple[KVCache, ...]
    conv: tuple[ConvState, ...]

    def restore_conv(self, blocks: list[int], slots: list[int]) -> None:
        """Give each of ``slots`` the convolution state at the end of the block beside it."""
        if self.conv:
            taken, given = upload(torch.tensor([blocks, slots]), self.conv[0].slots.device)
            for state in self.conv:
                state.slots[given] = state.blocks[taken]


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, padding and the convolution state at its end included."""
    return state_bytes.kv_block_bytes(config, block_size, dtype.itemsize)


def conv_slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of convolution state that one sequence takes over all layers."""
    return state_bytes.conv_slot_bytes(config, dtype.itemsize)


def allocate(
    config: ModelConfig, *, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> StateCache:
    """Zeroed state: what a vector reads beyond a sequence's end is masked, but must be finite.

    One spare block of keys ends the memory, for the last vector of a block whose size is no multiple of 16.
    """
    width, pack = padded(config.head_dim), key_pack(dtype, device)

    def zeros(*shape: int) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # Memory the system hands out zeroed and backs when first touched: a pool costs what is used of it.
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

    kv = tuple(
        KVCache(
            keys=zeros(num_blocks + 1, config.num_kv_heads, width // pack, padded(block_size), pack),
            values=zeros(num_blocks, config.num_kv_heads, block_size, width),
            block_size=block_size,
        )
        for _ in range(config.num_attention_layers)
    )
    inputs = (config.conv_l_cache - 1, config.hidden_size)
    conv = tuple(
        ConvState(zeros(num_slots, *inputs), zeros(num_blocks, *inputs), block_size)
        for _ in range(config.num_conv_layers)
    )
    return StateCache(kv, conv)
