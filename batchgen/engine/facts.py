"""Facts of an engine for the report: the sizes chosen for "auto", and its roofline.

A long run measures the ceilings again with the model it still holds; a short run, for which that would take too long,
recalls the last measurement under the same conditions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from batchgen.core.machine import processor_name
from batchgen.engine.engine import Engine
from batchgen.model.decoder import Decoder
from batchgen.model.rates import QUICK, measure
from batchgen.model.roofline import Ceilings, Costs, describe_costs, machine_key, recall, remember

_LEAST_S = 60.0  # of steps: a shorter run does not measure
_MOST_SHARE = 0.01  # of a run's tokens


def engine_facts(engine: Engine) -> dict[str, Any]:
    """``sizes`` and ``roofline`` for the report; measures where that takes less than a hundredth of the run."""
    model, stats = engine.runner.model, engine.stats
    num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
    pays = sum(stats.phase_s.values()) >= _LEAST_S and _MOST_SHARE * num_tokens >= QUICK.on(model.device).num_tokens
    measured = (_measure_now(model) if pays else None) or recall(model_key(model))
    costs = Costs.of(model.config, model.dtype.itemsize, weight_bytes(model), engine.config.kv_dtype)
    return {"sizes": engine_sizes(engine), "roofline": describe_costs(costs, measured)}


def weight_bytes(model: Decoder) -> float:
    """Bytes of memory per weight of a model's linears."""
    kernels, is_cpu = model.kernels, model.device.type == "cpu"
    return model.config.weight_bytes(model.numerics["dtype"], kernels.weights, kernels.activations, is_cpu=is_cpu)


def engine_sizes(engine: Engine) -> dict[str, Any]:
    """The sizes that the engine works with, whether given or chosen; of a GPU, the most memory that was used."""
    model, sizes = engine.runner.model, engine.config
    block_bytes = model.config.kv_block_bytes(sizes.block_size, model.dtype.itemsize, sizes.kv_dtype)
    found = {**asdict(sizes), "kv_bytes": sizes.num_blocks * block_bytes, "kernels": model.kernels.name}
    if model.device.type == "cuda":
        found["max_device_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return found


def model_key(model: Decoder) -> str:
    """The conditions under which ceilings measured with this model hold."""
    is_gpu = model.device.type == "cuda"
    processor = torch.cuda.get_device_name(model.device) if is_gpu else processor_name()
    return machine_key(processor, model.config, model.numerics, torch.get_num_threads())


def _measure_now(model: Decoder) -> Ceilings | None:
    """Measure the ceilings and keep them for later runs; None without memory for it: the run itself has succeeded."""
    try:
        measured = measure(model, QUICK).measured_by("measured at the end of a run")
    except (RuntimeError, MemoryError):  # torch raises RuntimeError for memory that is not there
        return None
    remember(model_key(model), measured)
    return measured
