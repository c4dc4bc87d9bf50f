"""Chooses what the user left open, for the machine and the model at hand.

The arithmetic needs no torch, so that a plan can do it too; asking the device for its memory and threads does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.config import EngineConfig, SchedulerConfig
from batchgen.engine.memory import available_bytes
from batchgen.errors import UsageError
from batchgen.model.config import ModelConfig
from batchgen.model.state_bytes import conv_slot_bytes, kv_block_bytes

if TYPE_CHECKING:
    from batchgen.model.lfm2 import Lfm2Model

# CPU: a linear runs at its best rate from 128 rows up, so wider steps gain nothing and cost latency.
_CPU = {"max_num_batched_tokens": 256, "max_num_seqs": 128, "block_size": 32}
_CUDA = {"max_num_batched_tokens": 8192, "max_num_seqs": 512, "block_size": 32}
_SHARED_PARAMS = 10_000_000  # a smaller model's products are over before a second thread has joined in
_MEMORY_SHARE = 0.5  # of what is free: the rest is for activations, the input and other processes


def resolve(config: EngineConfig, model: Lfm2Model) -> SchedulerConfig:
    """Every size of the scheduler for ``model``; see ``sizes_for``."""
    is_cuda = model.device.type == "cuda"
    return sizes_for(config, model.config, model.dtype.itemsize, _free_bytes(model), is_cuda=is_cuda)


def sizes_for(
    config: EngineConfig, model: ModelConfig, itemsize: int, free_bytes: int, *, is_cuda: bool = False
) -> SchedulerConfig:
    """Every size of the scheduler, with ``free_bytes`` of memory once the weights are loaded.

    Raises:
        UsageError: a value that cannot work, or memory for not even one block.
    """
    defaults = _CUDA if is_cuda else _CPU
    max_num_seqs = config.max_num_seqs or defaults["max_num_seqs"]
    block_size = config.block_size or defaults["block_size"]
    trained = model.max_position_embeddings
    max_model_len = min(config.max_model_len or trained, trained)
    if max_model_len < 2:
        raise UsageError(f"max_model_len {max_model_len}: at least 2 (one prompt token and one generated)")
    block_bytes = kv_block_bytes(model, block_size, itemsize)
    slots = max_num_seqs * conv_slot_bytes(model, itemsize)
    memory = config.kv_memory or max(0, int(_MEMORY_SHARE * free_bytes) - slots)
    # Memory for every sequence at full length is all that can ever be used.
    most = max_num_seqs * -(-max_model_len // block_size)
    num_blocks = min(memory // block_bytes if block_bytes else most, most)
    if num_blocks < 1:
        raise UsageError(f"kv_memory {memory} bytes holds no block of {block_bytes} bytes; raise it")
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens or defaults["max_num_batched_tokens"],
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        prefix_caching=config.prefix_caching,
        longest_first=config.longest_first,
        forecast_memory=config.forecast_memory,
    )


def _free_bytes(model: Lfm2Model) -> int:
    """What the model's device has left."""
    if model.device.type != "cuda":
        return available_bytes()
    import torch

    free, _ = torch.cuda.mem_get_info(model.device)
    return int(free)


def auto_threads(config: ModelConfig) -> int:
    """CPU threads for a process that runs one job: all that torch has, or one for a model too small to share."""
    import torch

    return torch.get_num_threads() if config.linear_params_per_token >= _SHARED_PARAMS else 1
