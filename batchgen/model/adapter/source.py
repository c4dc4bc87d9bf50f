"""Weights of a model with those of a LoRA adapter added, as a source of plain weights.

``W + scale * B A`` is rounded to float32 and once to the dtype of the model. Products of float32 are exact in float64,
where they are added rank by rank: no number of threads, processor or fused operation changes a bit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.core.machine import UNTRIED_DEVICES
from batchgen.core.model_files import ADAPTER_WEIGHTS
from batchgen.core.units import shown
from batchgen.model.adapter.settings import USE_MERGED, Lora
from batchgen.model.config import ModelConfig
from batchgen.model.weights import Init, Shape, TensorSource, fill_rows, is_finite, open_weights

_NAME = re.compile(r"base_model\.model\.(.{1,500})\.lora_([AB])(?:\.default)?\.weight", re.DOTALL)
_NUMBERS = (torch.bfloat16, torch.float16, torch.float32)  # whose products float64 holds
_CHUNK = 1 << 15  # values added up at once: in the cache, and too few for torch to wake its threads


class _Matrices(NamedTuple):
    """Names of the matrices A [rank, in] and B [out, rank] of a module, and what their product is multiplied by."""

    a: str
    b: str
    rank: int
    scale: float


class LoraTensors:
    """The tensors of a model, with an adapter's matrices added to those of its modules.

    All come in the dtype of the model, or in a wider one that the model's own source gives them in.
    """

    def __init__(self, plain: TensorSource, lora: Lora, config: ModelConfig) -> None:
        self.dtype = plain.dtype
        self._plain = plain
        self._exact = copy.copy(plain)  # counts what it gives as given by both
        self._exact.dtype = torch.float32  # so that a sum is rounded once
        self._lora = lora
        self._path = lora.folder / ADAPTER_WEIGHTS
        self._file = open_weights(self._path)
        names = self._located(self._file.keys())
        self._matrices = {
            config.stored_name(module): _Matrices(
                parts["A"], parts["B"], rank := self._rank(parts["A"]), lora.scale(rank)
            )
            for module, parts in names.items()
        }
        self._added: set[str] = set()
        self._head = config.tensor_names["head"]
        if (embedding := config.tensor_names["embedding"]) in self._matrices:
            raise self._error(f"changes {embedding!r}, which is no linear", "train the adapter without it")

    def _located(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Module -> "A" and "B" -> name of the tensor."""
        modules: dict[str, dict[str, str]] = {}
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or match[2] in modules.get(match[1], {}):
                what = "is no lora_A or lora_B of a linear" if match is None else "is there twice"
                raise self._error(f"tensor {shown(name)} {what}", USE_MERGED)
            modules.setdefault(match[1], {})[match[2]] = name
        for module, parts in modules.items():
            if len(parts) == 1:
                raise self._error(
                    f"tensor {shown(next(iter(parts.values())))} has no partner for {shown(module)}", "save it again"
                )
        if not modules:
            raise self._error("holds no tensors", "save it again")
        return modules

    def holds(self, name: str) -> bool:
        return self._plain.holds(name)

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As of the model alone. Raises ModelError also if the adapter has no such matrices, or no finite sums."""
        module = name.removesuffix(".weight")
        if module == name or module not in self._matrices:
            tensor = self._plain.take(name, shape, init, dtype)
            return tensor.to(torch.promote_types(tensor.dtype, self.dtype))
        if len(shape) != 2:
            raise self._error(f"changes {module!r}, which is no linear", "train the adapter without it")
        matrices = self._matrices[module]
        a, b = self._read(matrices.a, matrices.rank, shape[1]), self._read(matrices.b, shape[0], matrices.rank)
        weight = self._exact.take(name, shape, init)
        exact = weight.cpu() if weight.device.type in UNTRIED_DEVICES else weight  # these may lack float64
        tensor = _sum(exact, a, b, matrices.scale, dtype or self.dtype).to(weight.device)
        if not is_finite(tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise self._error(f"gives {module!r} values that {kind} cannot hold", "it is damaged: download it again")
        self._added.add(module)
        return tensor

    def finish(self, optional: str = "") -> None:
        if left := sorted(self._matrices.keys() - self._added):
            what = "is the embedding table of this model too" if left[0] == self._head else "is no linear of this model"
            more = f" ({len(left)} such modules)" if len(left) > 1 else ""
            base = f"; its own model is {shown(self._lora.base)}" if self._lora.base else ""
            raise self._error(f"changes {shown(left[0])}, which {what}{more}{base}", "give a model that it fits")
        self._plain.finish(optional)

    def _rank(self, name: str) -> int:
        """The rank of the matrix A of that name [rank, in]."""
        shape = self._file.get_slice(name).get_shape()
        if len(shape) != 2 or not shape[0]:
            raise self._error(f"tensor {shown(name)} has shape {shown(shape)}, not a rank and inputs", "save it again")
        return int(shape[0])

    def _read(self, name: str, *shape: int) -> Tensor:
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
