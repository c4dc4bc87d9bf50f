"""Loads the weights of a job's model, for kernels that have passed their self-test. Imports torch."""

from __future__ import annotations

import torch

from batchgen.config.job import ModelSpec
from batchgen.engine.self_test import SmallModel, self_tested
from batchgen.kernels.interface import Kernels
from batchgen.model.config import ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model


def load_weights(
    model_spec: ModelSpec, kernels: Kernels | None = None, *, has_head: bool = True, kv_cache_dtype: str = "auto"
) -> Decoder:
    """The model of a job, ready to run; ``kernels`` overrides the back end. Call ``use_threads`` first.

    Without a head it gives hidden states in place of logits. Default kernels are tested first, with ``kv_cache_dtype``.
    Raises ModelError for an unusable folder, config or weights, OutOfMemory if the weights do not fit.
    """

    def tested(kernels: Kernels, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
        return self_tested(kernels, SmallModel(config, device, dtype, kv_cache_dtype))

    return load_model(
        model_spec.path,
        model_spec.revision,
        dtype=model_spec.dtype,
        quantization=model_spec.quantization,
        adapter=model_spec.adapter,
        device=model_spec.device,
        batch_invariant=model_spec.batch_invariant,
        has_head=has_head,
        kernels=kernels,
        tested=tested,
    )
