"""How large the state of sequences is, in bytes: what ``cache`` allocates and a plan foretells. Imports no torch."""

from __future__ import annotations

from batchgen.model.config import ModelConfig

LANES = 16  # positions a vector of the CPU kernels holds: keys and head_dim are padded to it


def padded(n: int) -> int:
    """``n`` rounded up to whole vectors."""
    return -(-n // LANES) * LANES


def kv_block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes that one block takes over all layers, padding and the convolution state at its end included."""
    per_layer = config.num_kv_heads * padded(config.head_dim) * (padded(block_size) + block_size)
    return config.num_attention_layers * per_layer * itemsize + conv_slot_bytes(config, itemsize)


def conv_slot_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of convolution state that one sequence takes over all layers."""
    return config.num_conv_layers * (config.conv_l_cache - 1) * config.hidden_size * itemsize
