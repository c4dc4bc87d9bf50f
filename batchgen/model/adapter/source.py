"""Weights of a model with a LoRA adapter added, as a source of plain weights.

Products of float32 numbers are exact in float64 and are added rank by rank: no thread or processor changes a bit.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.core.machine import UNTRIED_DEVICES
from batchgen.core.model_files import ADAPTER_WEIGHTS
from batchgen.core.units import shown
from batchgen.model.adapter.settings import USE_MERGED, Lora
from batchgen.model.config import ModelConfig
from batchgen.model.weights import Init, Shape, TensorSource, fill_rows, is_finite, open_weights

_NAME = re.compile(r"base_model\.model\.(.{1,500}?)(?:\.lora_([AB])(?:\.default)?)?\.weight", re.DOTALL)
_NUMBERS = (torch.bfloat16, torch.float16, torch.float32)  # their products are exact in float64
_CHUNK = 1 << 15  # values added up at once: in the cache, and too few for torch to wake its threads


class LoraTensors:
    """A model's tensors with an adapter's matrices added, in the model's dtype or a wider one of its source."""

    def __init__(self, plain: TensorSource, lora: Lora, config: ModelConfig) -> None:
        self.dtype = plain.dtype
        self._plain = plain
        self._exact = copy.copy(plain)  # tensors taken from it count as taken from both
        self._exact.dtype = torch.float32  # so that a sum is rounded once
        self._lora = lora
        self._path = lora.folder / ADAPTER_WEIGHTS
        self._file = open_weights(self._path)
        self._embedding, self._head = (f"{config.tensor_names[role]}.weight" for role in ("embedding", "head"))
        self._is_tied = config.tie_embedding and config.has_head
        self._modules: dict[str, str] = {}  # a weight's name in the model -> its name in the adapter
        self._parts: dict[str, dict[str | None, str]] = {}  # names of "A" and "B", or of a weight (None) in their place
        for name in sorted(self._file.keys()):
            match = _NAME.fullmatch(name)
            weight = f"{config.stored_name(match[1])}.weight" if match else ""
            parts = self._parts.setdefault(weight, {})
            is_new = match is not None and match[2] is None
            if match is None or match[2] in parts or (is_new and weight not in (self._embedding, self._head)):
                raise self._error(
                    f"tensor {shown(name)} is not a lora_A or lora_B of a linear, embedding or head", USE_MERGED
                )
            parts[match[2]] = name
            self._modules[weight] = match[1]
        for parts in self._parts.values():
            if parts.keys() not in ({"A", "B"}, {None}):
                raise self._error(f"tensor {shown(next(iter(parts.values())))} has no partner", "save it again")
        if not self._parts:
            raise self._error("holds no tensors", "save it again")
        self._added: set[str] = set()

    def holds(self, name: str) -> bool:
        """Whether there is a weight of that name. A tied model has a head if the adapter replaces embedding or head."""
        is_untied = self._is_tied and any(None in self._parts.get(own, ()) for own in (self._embedding, self._head))
        return (is_untied and name == self._head) or self._plain.holds(name)

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The model's tensor with the adapter added. Raises ModelError, also if it does not fit or sums overflow."""
        own = self._embedding if name == self._head and not self._plain.holds(name) and self._is_tied else name
        if name not in self._parts:
            tensor = self._plain.take(own, shape, init, dtype)
            return tensor.to(torch.promote_types(tensor.dtype, self.dtype))
        parts = self._parts[name]
        weight = self._exact.take(own, shape, init)
        if None in parts:
            tensor = self._read(parts[None], shape).to(weight.device, dtype or self.dtype)
        else:
            exact = weight.cpu() if weight.device.type in UNTRIED_DEVICES else weight  # these may lack float64
            a, b, scale = self._matrices(name, shape)
            tensor = _sum(exact, a, b, scale, dtype or self.dtype).to(weight.device)
        if not is_finite(tensor):
            what = f"gives {self._modules[name]!r} values that {str(tensor.dtype).removeprefix('torch.')} cannot hold"
            raise self._error(what, "it is damaged: download it again")
        self._added.add(name)
        return tensor

    def finish(self, optional: str = "") -> None:
        if left := sorted(self._parts.keys() - self._added):
            what = (
                "is the embedding table of this model too" if left[0] == self._head else "is not a linear of this model"
            )
            more = f" ({len(left)} such modules)" if len(left) > 1 else ""
            base = f"; its own model is {shown(self._lora.base)}" if self._lora.base else ""
            raise self._error(
                f"changes {shown(self._modules[left[0]])}, which {what}{more}{base}", "give a model that it fits"
            )
        self._plain.finish(optional)

    def _matrices(self, name: str, shape: Shape) -> tuple[Tensor, Tensor, float]:
        """A [rank, in], B [out, rank], and the scale of their product."""
        module, parts = self._modules[name], self._parts[name]
        if len(shape) != 2 or name == self._embedding:
            raise self._error(f"changes {module!r}, which is not a linear", "train the adapter without it")
        rank = self._file.get_slice(parts["A"]).get_shape()[0]
        a, b = self._read(parts["A"], (rank, shape[1])), self._read(parts["B"], (shape[0], rank))
        return a, b, self._lora.scale(module, max(rank, 1))

    def _read(self, name: str, shape: Shape) -> Tensor:
        stored = self._file.get_slice(name)
        if stored.get_shape() != list(shape):
            sizes = f"shape {shown(stored.get_shape())}, but rank and model make it {list(shape)}"
            raise self._error(
                f"tensor {shown(name)} has {sizes}", "give the model and settings that it was trained with"
            )
        tensor: Tensor = self._file.get_tensor(name)
        if tensor.dtype not in _NUMBERS:
            raise self._error(f"tensor {shown(name)} is {tensor.dtype}", "save it in float32, bfloat16 or float16")
        return tensor

    def _error(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"{self._path}: {what}; {remedy}")


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``weight`` [out, in] plus ``scale`` times b [out, rank] times a [rank, in], in ``dtype``."""
    a, b = (part.to(weight.device, torch.float64) for part in (a, b))
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    step = max(1, _CHUNK // weight.shape[1])

    def fill(rows: slice) -> None:
        total = torch.zeros(weight[rows].shape, dtype=torch.float64, device=weight.device)
        for left, right in zip(b[rows].T, a, strict=True):
            total.addr_(left, right)
        result[rows] = total.mul_(scale).add_(weight[rows]).float()

    fill_rows(fill, len(result), step)
    return result
