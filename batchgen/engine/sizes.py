"""Sizes of the engine, and its threads: chooses the ones that the user did not set, for this machine and model.

The arithmetic does not need torch, so that a plan can use it; only queries of memory and threads do.
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchgen.config.job import EngineConfig
from batchgen.core.errors import UsageError
from batchgen.core.machine import available_bytes, num_usable_cpus, total_bytes
from batchgen.core.units import shown
from batchgen.model.config import ModelConfig

if TYPE_CHECKING:
    from batchgen.model.decoder import Decoder

# CPU: a linear is near its best rate from 128 rows up, but more rows share the cost of each launch, and an expert
# gets only some of them. Twice as many do not gain more.
_CPU = {"max_num_batched_tokens": 512, "max_num_seqs": 256, "block_size": 32}
_CUDA = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "block_size": 64}
_MEMORY_SHARE = 0.5  # of free memory; the rest is for activations, the input and other processes
_CUDA_MEMORY_SHARE = 0.9  # of a card that is rarely shared, less other known needs
_MAX_HALVINGS = 5  # of the tokens and sequences of a step, for a card that is too small
_CUDA_BYTES = 1 << 30  # for libraries and graphs
_SHARED_PARAMS = 10_000_000  # a smaller model's products end before a second thread has joined in
_MAX_THREADS_PER_CPU = 8  # more only wait for each other; beyond some thousands the OpenMP runtime ends the process
_ALWAYS_ALLOWED_THREADS = 64  # so that one job file serves small and large machines
_MAX_NUM_BLOCKS = 1 << 22  # the block pool takes 50 bytes of host memory per block


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes the scheduler works with, all resolved and positive, and its policies; see ``EngineConfig``.

    ``admits_in_batches`` is for devices that run single tokens far cheaper than steps with prompts. With
    ``whole_prompts`` each prompt is computed in one step; a prompt beyond the token budget gets a separate step.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    prefix_caching: bool = True
    longest_first: bool = True
    forecast_memory: bool = True
    kv_cache_dtype: str = "auto"
    admits_in_batches: bool = False
    whole_prompts: bool = False

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of one sequence whose state can be held at once."""
        return self.num_blocks * self.block_size


def resolve(config: EngineConfig, model: Decoder) -> SchedulerConfig:
    """Every size of the scheduler for ``model``; see ``sizes_for``. Raises UsageError, also if memory is short."""
    is_cuda = model.device.type == "cuda"
    free, total = _memory(model)
    config = replace(config, kv_cache_dtype=cache_dtype(config.kv_cache_dtype, model))
    sizes = sizes_for(config, model.config, model.dtype.itemsize, free, is_cuda=is_cuda)
    _refuse_beyond(sizes, model.config, model.dtype.itemsize, total)
    return sizes


def cache_dtype(kv_cache_dtype: str, model: Decoder) -> str:
    """The type that keys and values are rounded to; "auto" is the model's dtype. Raises UsageError if unsupported."""
    if kv_cache_dtype in ("auto", model.numerics["dtype"]):
        return "auto"
    if model.device.type != "cpu" and kv_cache_dtype != "int8":
        raise UsageError(
            f'kv_cache_dtype {kv_cache_dtype}: a GPU keeps keys and values as they are computed, "auto", or as '
            'integers, "int8"'
        )
    return kv_cache_dtype


def sizes_for(
    config: EngineConfig, model: ModelConfig, itemsize: int, free_bytes: int, *, is_cuda: bool = False
) -> SchedulerConfig:
    """Every size of the scheduler, with ``free_bytes`` of memory once the weights are loaded.

    Raises UsageError for a value that cannot work, or too little memory for one block.
    """
    block_size = config.block_size or default_sizes(is_cuda=is_cuda)["block_size"]
    trained = model.max_position_embeddings
    max_model_len = min(config.max_model_len or trained, trained)
    if max_model_len < 2:
        raise UsageError(f"max_model_len {max_model_len}: at least 2 (one prompt token and one generated)")
    block_bytes = model.kv_block_bytes(block_size, itemsize, config.kv_cache_dtype)
    tokens, max_num_seqs, kept = _step_sizes(config, model, itemsize, free_bytes, is_cuda=is_cuda)
    share = _CUDA_MEMORY_SHARE if is_cuda else _MEMORY_SHARE
    memory = config.kv_cache_memory or max(0, int(share * free_bytes) - kept)
    # Memory for every sequence at full length is all that can ever be used.
    max_blocks = max_num_seqs * -(-max_model_len // block_size)
    num_blocks = min(memory // block_bytes if block_bytes else max_blocks, max_blocks, _MAX_NUM_BLOCKS)
    if num_blocks < 1:
        raise UsageError(
            f"kv_cache_memory {memory} bytes holds no block of {block_bytes} bytes; raise it, or give fewer --workers"
        )
    return SchedulerConfig(
        max_num_batched_tokens=tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        kv_cache_dtype=config.kv_cache_dtype,
        admits_in_batches=is_cuda,  # its graphs hold steps of single tokens alone
        prefix_caching=config.prefix_caching and model.is_causal,
        whole_prompts=not model.is_causal,
        longest_first=config.longest_first,
        forecast_memory=config.forecast_memory and not is_cuda,  # there a step with fewer rows takes as long
    )


def _step_sizes(
    config: EngineConfig, model: ModelConfig, itemsize: int, free_bytes: int, *, is_cuda: bool
) -> tuple[int, int, int]:
    """Most tokens and sequences of a step, halved on a card too small for them, and its bytes except KV memory."""
    defaults = default_sizes(is_cuda=is_cuda)
    for halvings in range(_MAX_HALVINGS + 1 if is_cuda else 1):
        tokens = config.max_num_batched_tokens or defaults["max_num_batched_tokens"] >> halvings
        max_num_seqs = config.max_num_seqs or defaults["max_num_seqs"] >> halvings
        kept = max_num_seqs * model.conv_slot_bytes(itemsize)
        kept += _step_bytes(tokens, max_num_seqs, model, itemsize) if is_cuda else 0
        if kept <= _MEMORY_SHARE * free_bytes:
            break
    return tokens, max_num_seqs, kept


def default_sizes(*, is_cuda: bool) -> dict[str, int]:
    """The sizes of "auto", except sizes of memory."""
    return _CUDA if is_cuda else _CPU


def _step_bytes(tokens: int, max_num_seqs: int, model: ModelConfig, itemsize: int) -> int:
    """Bytes that full steps take on a GPU, launched and as recordings, in addition to weights and state.

    Logits have a float32 copy, and penalties int32 counts of all tokens. A step that scores prompts or labels may be
    asked for the logits of all its tokens.
    """
    logits, counts = max_num_seqs * model.vocab_size * (itemsize + 4), max_num_seqs * model.vocab_size * 4
    launched = max(logits, tokens * model.vocab_size * itemsize)
    return 2 * _activation_bytes(tokens, model, itemsize) + logits + launched + counts + _CUDA_BYTES


def _activation_bytes(tokens: int, model: ModelConfig, itemsize: int) -> int:
    return tokens * (2 * model.hidden_size + 3 * model.ff_dim) * itemsize


def _refuse_beyond(sizes: SchedulerConfig, model: ModelConfig, itemsize: int, total_bytes: int) -> None:
    """Refuse sizes that never fit: memory is allocated on first use, so the process would be killed later."""
    tokens = min(sizes.max_num_batched_tokens, sizes.max_num_tokens)
    block_bytes = model.kv_block_bytes(sizes.block_size, itemsize, sizes.kv_cache_dtype)
    needs = {
        "max_num_seqs": (sizes.max_num_seqs, sizes.max_num_seqs * model.conv_slot_bytes(itemsize)),
        "kv_cache_memory": (sizes.num_blocks, sizes.num_blocks * block_bytes),
        "max_num_batched_tokens": (tokens, _activation_bytes(tokens, model, itemsize)),
    }
    units = {"max_num_seqs": "sequences", "kv_cache_memory": "KV blocks", "max_num_batched_tokens": "tokens in a step"}
    for name, (count, needed) in needs.items():
        if needed > total_bytes:
            raise UsageError(
                f"{name}: {count:,} {units[name]} take {needed / 1e9:,.1f} GB, the device has "
                f"{total_bytes / 1e9:,.1f} GB; lower it"
            )


def _memory(model: Decoder) -> tuple[int, int]:
    """Free and total bytes of the model's device; unused memory that torch keeps on a CUDA device counts as free."""
    if model.device.type not in ("cuda", "xpu"):  # the memory of "mps" is the processor's
        return available_bytes(), total_bytes()
    import torch

    if model.device.type == "xpu":
        free, total = torch.xpu.mem_get_info(model.device)
        return int(free), int(total)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return int(free) + unused, int(total)


def use_host_threads(model: Decoder, threads: int | None) -> None:
    """Set the CPU threads of this process if ``threads`` is given; to one by default if the model is on a GPU."""
    if threads is not None or model.device.type == "cuda":
        use_threads(threads or 1, model.config)


def use_threads(threads: int | None, config: ModelConfig) -> int:
    """Set the CPU threads of this process, and return how many; loading packs weights with them.

    None means all threads of torch, up to the usable processors, or one for a model too small to share. Raises
    UsageError for more than could be useful here.
    """
    import torch

    num_cpus = os.cpu_count() or 1
    max_threads = max(_ALWAYS_ALLOWED_THREADS, _MAX_THREADS_PER_CPU * num_cpus)
    if threads is not None and threads > max_threads:
        raise UsageError(f"threads {shown(threads)}: at most {max_threads} on this machine, which has {num_cpus} CPUs")
    if threads is None:
        is_large = config.linear_params_per_token >= _SHARED_PARAMS
        threads = min(torch.get_num_threads(), num_usable_cpus()) if is_large else 1
    torch.set_num_threads(threads)
    return threads


def reported_sizes(sizes: SchedulerConfig, model: Decoder) -> dict[str, Any]:
    """The sizes that an engine works with, given or chosen, as plain data; on a GPU also the peak of its memory."""
    block_bytes = model.config.kv_block_bytes(sizes.block_size, model.dtype.itemsize, sizes.kv_cache_dtype)
    report = {**asdict(sizes), "kv_bytes": sizes.num_blocks * block_bytes, "kernels": model.kernels.name}
    if model.device.type == "cuda":
        import torch

        report["max_device_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return report
