"""Where a model's weights come from: a safetensors checkpoint, or a random generator of the same shapes.

A source is asked for each tensor by name and shape exactly once and told when the model is built; then it can say
which tensor was missing, misshapen or left over. Only safetensors is read: loading runs no code.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.core.machine import is_out_of_memory
from batchgen.core.model_files import INDEX, WEIGHTS, file_bytes, weight_map
from batchgen.core.units import shortened, shown

_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # others want scales to mean anything


class TensorSource(Protocol):
    """Hands out a model's tensors."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, checked against ``shape``, in the source's dtype and device."""
        ...

    def finish(self) -> None:
        """Called when the model has all it needs."""
        ...


class Checkpoint:
    """The tensors of a checkpoint folder, memory-mapped: what is never touched is never read.

    Each is mapped by itself, so that its pages are let go of with it: weights are laid out anew for most devices, and
    a mapping of the whole file would keep both copies in memory until the last.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._where = self._locate()
        self._taken: set[str] = set()

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        names = weight_map(self.folder)
        if names is not None:
            self._check_index(names)
            return names
        if not (self.folder / WEIGHTS).exists():
            raise ModelError(f"{self.folder}: has neither {WEIGHTS} nor {INDEX}; only safetensors weights are loaded")
        return dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)

    def _check_index(self, names: dict[str, str]) -> None:
        listed: dict[str, set[str]] = {}
        for tensor, file in names.items():
            listed.setdefault(file, set()).add(tensor)
        for file, tensors in sorted(listed.items()):
            held = set(self._open(file).keys())
            if held != tensors:
                odd = min(held ^ tensors)
                raise ModelError(f"{self.folder / INDEX}: the index and {file} disagree about tensor {shown(odd)}")

    def _open(self, file: str) -> Any:
        path = self.folder / file
        file_bytes(path)  # refuses what would be read for ever
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            if is_out_of_memory(error):
                raise
            why = shortened(" ".join(str(error).split()), 200)
            raise ModelError(f"{path}: cannot be read as safetensors ({why}); download it again") from None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See ``TensorSource.take``.

        Raises:
            ModelError: no such tensor, another shape, or no plain floating-point numbers.
        """
        if name not in self._where:
            raise ModelError(f"{self.folder}: the weights lack tensor {name!r}, which config.json asks for")
        file = self._open(self._where[name])
        found = file.get_slice(name).get_shape()
        if tuple(found) != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} has shape {shown(found)}; config.json asks for {list(shape)}"
            )
        tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise ModelError(f"{self.folder}: tensor {name!r} is {tensor.dtype}; quantized weights are not supported")
        self._taken.add(name)
        return tensor.to(self.device, self.dtype)

    def finish(self) -> None:
        """Refuse tensors the model did not ask for: an unknown tensor means an unknown model.

        Raises:
            ModelError: a tensor was left over.
        """
        left = sorted(set(self._where) - self._taken - {"lm_head.weight"})
        if left:
            raise ModelError(f"{self.folder}: unknown tensor {shown(left[0])} ({len(left)} the model has no place for)")


class RandomTensors:
    """Random weights of any shape, the same in every run: for measuring speed where no checkpoint is at hand."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0, std: float = 0.02) -> None:
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self.std = std

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See ``TensorSource.take``; norm weights are near one, all others normal with the source's deviation."""
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + self.seed)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if "norm" in name:
            return tensor.normal_(1.0, 0.1, generator=generator)
        std = 0.5 if name.endswith("conv.conv.weight") else self.std
        return tensor.normal_(0.0, std, generator=generator)

    def finish(self) -> None:
        """Nothing can be left over."""
