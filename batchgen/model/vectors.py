"""The head of a model that gives vectors: dense layers, cut, L2 norm, in sentence-transformers' order; or label scores.

Each row is computed separately in float32, so that its bits do not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchgen.core.errors import ModelError
from batchgen.kernels.interface import Kernels, Linear
from batchgen.model.vector_files import Dense
from batchgen.model.weights import Checkpoint

_CPU = torch.device("cpu")
_MIN_NORM = np.float32(1e-12)  # torch's functional.normalize


@dataclass(frozen=True, slots=True)
class VectorSettings:
    """Settings that turn pooled hidden states into a vector or scores.

    ``dimensions`` is how many numbers of a vector are kept, None for all. ``scores`` names the function of a
    classifier's logits, see ``ModelConfig``; "" for vectors. Numbers are rounded to ``dtype``.
    """

    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    dimensions: int | None = None
    scores: str = ""
    dtype: str = "float32"


class VectorHead:
    """Makes a text's vectors, float32 [num_rows, dimensions], of its pooled states [num_rows, hidden_size]."""

    def __init__(
        self,
        settings: VectorSettings,
        kernels: Kernels,
        width: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        """``width``, ``dtype`` and ``device`` are the model's. Raises ModelError for unfit layers or dimensions."""
        self._settings, self._dtype, self._device = settings, dtype, device
        self._layers: list[tuple[Linear, bool]] = []
        for layer in settings.dense:
            if layer.inputs != width:
                raise ModelError(f"{layer.folder}: takes {layer.inputs} numbers, and is given {width}")
            width = layer.outputs
            self._layers.append((_loaded(layer, kernels, dtype, device), layer.has_tanh))
        if settings.dimensions and settings.dimensions > width:
            raise ModelError(f"embed.dimensions = {settings.dimensions}: the model's embeddings have {width}")

    def __call__(self, states: np.ndarray) -> np.ndarray:
        for linear, has_tanh in self._layers:
            product = linear(torch.from_numpy(states).to(self._device, self._dtype)).float().cpu()
            states = (product.tanh() if has_tanh else product).numpy()
        states = np.ascontiguousarray(states[:, : self._settings.dimensions], dtype=np.float32)
        if self._settings.scores:
            return np.stack([_scores(row, self._settings.scores) for row in states])
        vectors = np.stack([_normalized(row) for row in states]) if self._settings.normalize else states
        with np.errstate(over="ignore"):  # infinity, which is refused
            return vectors.astype(self._settings.dtype).astype(np.float32)


def _normalized(row: np.ndarray) -> np.ndarray:
    normed: np.ndarray = row / max(np.sqrt(np.square(row).sum()), _MIN_NORM)
    return normed


def _scores(row: np.ndarray, form: str) -> np.ndarray:
    if form == "logits":
        return row
    with np.errstate(over="ignore"):  # infinity, whose score is 0
        weights: np.ndarray = np.exp(-row if form == "sigmoid" else row - row.max())
    scores: np.ndarray = 1 / (1 + weights) if form == "sigmoid" else weights / weights.sum()
    return scores


def _loaded(layer: Dense, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Linear:
    source = Checkpoint(layer.folder, dtype, device)
    weight = source.take("linear.weight", (layer.outputs, layer.inputs))
    bias = source.take("linear.bias", (layer.outputs,)) if layer.has_bias else None
    source.finish()
    return kernels.linear(weight.to(dtype), None if bias is None else bias.to(dtype))
