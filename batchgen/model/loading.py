"""Puts a model together: which folder, which dtype, which device, which kernels."""

from __future__ import annotations

import re

import torch

from batchgen.cpu_features import multiplies_bfloat16
from batchgen.errors import ModelError
from batchgen.kernels import Kernels, select
from batchgen.model import _PATTERNS, is_dummy
from batchgen.model.config import ModelConfig
from batchgen.model.lfm2 import Lfm2Model
from batchgen.model.published import dummy_config
from batchgen.model.tensors import Checkpoint, RandomTensors, TensorSource

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(
    path: str,
    revision: str,
    dtype: str,
    device: str,
    kernels: Kernels | None = None,
    *,
    batch_invariant: bool = False,
) -> Lfm2Model:
    """See ``batchgen.model.load_model``; ``kernels`` overrides the back end that fits the device."""
    where = resolve_device(device)
    source: TensorSource
    if is_dummy(path):
        config = dummy_config(path)
        kind = resolve_dtype(dtype, config, where)
        source = RandomTensors(kind, where)
    else:
        from batchgen.hub import resolve_folder

        folder = resolve_folder(path, revision, _PATTERNS)
        config = ModelConfig.from_folder(folder)
        kind = resolve_dtype(dtype, config, where)
        source = Checkpoint(folder, kind, where)
    with torch.inference_mode():
        return Lfm2Model(config, source, kernels or select(where, kind, batch_invariant=batch_invariant))


def resolve_device(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here.

    Raises:
        ModelError: another name, or CUDA was asked for and is not there.
    """
    if device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", device):
        raise ModelError(f"device {device!r} is not one of auto, cpu, cuda")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: this torch sees no CUDA device; use --device cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that "auto" means for this checkpoint on this device, or the one named.

    Raises:
        ModelError: an unknown name.
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if multiplies_bfloat16() else torch.float32
        dtype = config.dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
