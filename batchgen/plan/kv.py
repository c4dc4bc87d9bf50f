"""How much attention state a job needs and how much of it this machine can hold, before any weights are loaded.

The engine's own arithmetic over the memory that is free now, less what the weights will take. Knows no torch, so a
GPU's memory is known only from a calibration, or where the job names ``kv_memory``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.memory import available_bytes
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.sizes import sizes_for
from batchgen.kernels.processor import multiplies_bfloat16
from batchgen.model import ModelConfig
from batchgen.run.loader import engine_config

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_NVIDIA = Path("/dev/nvidiactl")


def kv_plan(
    spec: JobSpec, config: ModelConfig, mean_tokens: float, numerics: Mapping[str, str], sizes: SchedulerConfig | None
) -> dict[str, Any]:
    """What a row of ``mean_tokens`` takes, and how many tokens and such rows fit at once (None: not known).

    ``numerics`` and ``sizes`` are those of a calibration or an earlier run, as far as there was one. Raises
    UsageError for sizes that cannot work.
    """
    dtype = numerics.get("dtype") or _guessed_dtype(spec, config)
    item_bytes = _ITEM_BYTES.get(dtype, 4)
    is_known = sizes is not None or spec.engine.kv_memory != "auto" or not _is_cuda(spec)
    foretold = sizes or sizes_for(
        engine_config(spec.engine), config, item_bytes, _free_bytes(config, item_bytes), is_cuda=_is_cuda(spec)
    )
    block_bytes = config.kv_block_bytes(foretold.block_size, item_bytes)
    row_blocks = max(1, -(-round(mean_tokens) // foretold.block_size))
    fits = {
        "memory_bytes": foretold.num_blocks * block_bytes,
        "tokens_that_fit": foretold.max_num_tokens,
        "rows_that_fit": foretold.num_blocks // row_blocks,
    }
    return {
        "dtype": dtype,
        "block_size": foretold.block_size,
        "bytes_per_token": block_bytes // foretold.block_size,
        "mean_row_bytes": row_blocks * block_bytes,
        "max_num_seqs": foretold.max_num_seqs,
        "is_auto": spec.engine.kv_memory == "auto",
        **(fits if is_known else dict.fromkeys(fits)),
    }


def _free_bytes(config: ModelConfig, item_bytes: int) -> int:
    """What will be free once the weights are loaded; the embedding is the output projection's twin."""
    num_embeddings = 1 if config.tie_embedding else 2
    weights = config.linear_params_per_token + num_embeddings * config.logits_params_per_token
    return max(0, available_bytes() - weights * item_bytes)


def _is_cuda(spec: JobSpec) -> bool:
    """Whether the job will run on a GPU; for "auto", whether there is the driver of one."""
    device = spec.model.device
    return device.startswith("cuda") or (device == "auto" and _NVIDIA.exists())


def _guessed_dtype(spec: JobSpec, config: ModelConfig) -> str:
    """What "auto" is going to be."""
    if spec.model.dtype != "auto":
        return spec.model.dtype
    return config.dtype if _is_cuda(spec) or multiplies_bfloat16() else "float32"
