"""Loads the weights of a job's model, for kernels that have proven themselves on this machine. Imports torch."""

from __future__ import annotations

from functools import partial

import torch

from batchgen.config.job import ModelSpec
from batchgen.engine import proof
from batchgen.kernels.interface import Kernels
from batchgen.model.config import ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model


def load_weights(
    where: ModelSpec,
    kernels: Kernels | None = None,
    *,
    has_head: bool = True,
    kv_cache_dtype: str = "auto",
    always_proves: bool = False,
) -> Decoder:
    """The model of a job, ready to run; ``kernels`` overrides the back end. Call ``use_threads`` before.

    Without a head it gives hidden states in place of logits. Kernels that are not given are proven for
    ``kv_cache_dtype``, with ``always_proves`` also where their own tests run.

    Raises:
        ModelError: unusable folder, config, or weights.
        OutOfMemory: the weights do not fit.
    """
    return load_model(
        where.path,
        where.revision,
        dtype=where.dtype,
        quantization=where.quantization,
        adapter=where.adapter,
        device=where.device,
        batch_invariant=where.batch_invariant,
        has_head=has_head,
        kernels=kernels,
        prove=partial(_proven, kv_cache_dtype=kv_cache_dtype, always=always_proves),
    )


def _proven(
    kernels: Kernels,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_cache_dtype: str,
    always: bool,
) -> Kernels:
    return proof.proven(kernels, proof.Setting(config, device, dtype, kv_cache_dtype), always=always)
