"""Prepares this process for an engine: sets its CPU threads and loads the weights of a job's model. Imports torch."""

from __future__ import annotations

import os

import torch

from batchgen.config.job import ModelSpec
from batchgen.core.errors import UsageError
from batchgen.core.units import shown
from batchgen.kernels.interface import Kernels
from batchgen.kernels.processor import num_usable_cpus
from batchgen.model.config import ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model

_SHARED_PARAMS = 10_000_000  # a smaller model's products end before a second thread has joined in
_MAX_THREADS_PER_CPU = 8  # more only wait for each other; beyond some thousands the OpenMP runtime ends the process
_ALWAYS_ALLOWED_THREADS = 64  # so that one job file serves small and large machines


def load_weights(where: ModelSpec, kernels: Kernels | None = None, *, has_head: bool = True) -> Decoder:
    """The model of a job, ready to run; ``kernels`` overrides the back end. Call ``use_threads`` before.

    Without a head it gives hidden states in place of logits.

    Raises:
        ModelError: unusable folder, config, or weights.
        OutOfMemory: the weights do not fit.
    """
    return load_model(
        where.path,
        where.revision,
        dtype=where.dtype,
        weights=where.weights,
        activations=where.activations,
        adapter=where.adapter,
        device=where.device,
        batch_invariant=where.batch_invariant,
        has_head=has_head,
        kernels=kernels,
    )


def use_threads_beside(model: Decoder, threads: int | None) -> None:
    """Set the CPU threads of this process where that is asked for; beside a GPU one, as its tensors are small."""
    if threads is not None or model.device.type == "cuda":
        use_threads(threads or 1, model.config)


def use_threads(threads: int | None, config: ModelConfig) -> int:
    """Set the CPU threads of this process, and return how many; loading packs weights with them.

    None means all that torch has, as far as processors may be used, or one for a model too small to share.

    Raises:
        UsageError: more than could be of use here.
    """
    num_cpus = os.cpu_count() or 1
    most = max(_ALWAYS_ALLOWED_THREADS, _MAX_THREADS_PER_CPU * num_cpus)
    if threads is not None and threads > most:
        raise UsageError(f"threads {shown(threads)}: at most {most} on this machine, which has {num_cpus} CPUs")
    if threads is None:
        is_large = config.linear_params_per_token >= _SHARED_PARAMS
        threads = min(torch.get_num_threads(), num_usable_cpus()) if is_large else 1
    torch.set_num_threads(threads)
    return threads
