"""LFM2 from a folder, a Hub id or a published shape's name. ``load_config`` needs no torch, ``load_model`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.model.config import ModelConfig
from batchgen.model.published import PREFIX, dummy_config

if TYPE_CHECKING:
    from batchgen.model.lfm2 import Lfm2Model

__all__ = ["ModelConfig", "is_dummy", "load_config", "load_model"]

_PATTERNS = ("*.safetensors", "*.json", "*.jinja")


def is_dummy(path: str) -> bool:
    """Whether ``path`` names a random-weight model (``dummy:LFM2-350M``)."""
    return path.startswith(PREFIX)


def load_config(path: str, revision: str = "main") -> ModelConfig:
    """Shape of the model at ``path``: a folder, a Hub id or ``dummy:NAME``.

    Raises:
        ModelError: it cannot be found, read, or run by this engine.
    """
    if is_dummy(path):
        return dummy_config(path)
    from batchgen.core.hub import resolve_folder

    return ModelConfig.from_folder(resolve_folder(path, revision, ("*.json", "*.jinja")))


def load_model(
    path: str, revision: str = "main", *, dtype: str = "auto", device: str = "auto", batch_invariant: bool = False
) -> Lfm2Model:
    """The model at ``path`` with its weights, ready to run.

    ``dtype`` "auto" is the checkpoint's own on CUDA; on the CPU bfloat16 where the machine multiplies it
    natively, else float32. ``device`` "auto" is CUDA where there is one. ``batch_invariant`` makes products on a GPU
    add up in one order whatever shares the batch, as they do on the CPU anyway.

    Raises:
        ModelError: unusable folder, config, or weights.
    """
    from batchgen.model.loading import load

    return load(path, revision, dtype, device, batch_invariant=batch_invariant)
