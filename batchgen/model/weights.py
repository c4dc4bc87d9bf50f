"""Sources of a model's weights: a safetensors checkpoint, or a random generator. Loading never runs code.

A model takes each tensor by name and shape once, then finishes the source, which names missing and left-over ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.core.machine import UNTRIED_DEVICES, is_out_of_memory
from batchgen.core.model_files import INDEX, WEIGHTS, file_bytes, weight_map
from batchgen.core.units import shortened, shown
from batchgen.model.config import ModelConfig

Shape = tuple[int, ...]
Location = TypeVar("Location")
_MAX_MAPPED = 1 << 30  # bytes read from a mapping, which keeps them in memory, before the file is mapped again
_DERIVED = (".rotary_emb.inv_freq",)  # frequencies, which the config gives; Llama's checkpoints once held them
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # others mean nothing without scales


def stored_dtype(saved: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which a checkpoint's tensor is kept for a model of ``dtype``.

    A CPU can multiply float32 by bfloat16, so it keeps bfloat16 weights in half the memory.
    """
    is_kept = saved == torch.bfloat16 and dtype == torch.float32 and device.type == "cpu"
    return saved if is_kept else dtype


def fill_rows(fill: Callable[[slice], None], num_rows: int, step: int) -> None:
    """Call ``fill`` with all of ``num_rows`` rows, ``step`` at a time, on as many threads as torch has."""

    @torch.inference_mode()  # a thread starts outside of the mode in which the model is loaded
    def fill_from(start: int) -> None:
        fill(slice(start, start + step))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill_from, range(0, num_rows, step)))


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


class Init(NamedTuple):
    """Normal distribution of random weights in place of a tensor."""

    mean: float
    std: float


TAPS = Init(0.0, 0.5)  # of a convolution
ROUTER_BIAS = Init(0.0, 0.1)  # added to scores from 0 to 1


class TensorSource(Protocol):
    """Source of the weights of a model of ``dtype``."""

    dtype: torch.dtype

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name, in ``dtype`` if not the model's.

        Raises ModelError if it is missing or its shape is not ``shape``.
        """

    def finish(self, optional: str = "") -> None:
        """Raises ModelError if a tensor except ``optional`` is left over: an unused tensor may matter."""


def open_weights(path: Path) -> Any:
    """A safetensors file, memory-mapped. Raises ModelError."""
    file_bytes(path)  # refuses pipes and devices, which would be read for ever
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        why = shortened(" ".join(str(error).split()), 200)
        raise ModelError(f"{path}: cannot be read as safetensors ({why}); download it again") from None


class StoredTensors(Generic[Location]):
    """Tensors at ``path``, a file or folder, with their ``locations`` by name; left-over tensors are refused."""

    unread: tuple[str, ...] = ()  # prefixes of the names of tensors that the model ignores

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, locations: Mapping[str, Location]) -> None:
        self.path = path
        self.dtype = dtype
        self.device = device
        self._locations = locations
        self._taken: set[str] = set()

    def holds(self, name: str) -> bool:
        return name in self._locations

    def finish(self, optional: str = "") -> None:
        names = self._locations.keys() - self._taken - {optional}
        left = sorted(name for name in names if not (name.endswith(_DERIVED) or name.startswith(self.unread)))
        if left:
            raise ModelError(f"{self.path}: unknown tensor {shown(left[0])} ({len(left)} the model has no place for)")


class Checkpoint(StoredTensors[str]):
    """Tensors of a checkpoint folder, memory-mapped: only the taken ones are read.

    A file is mapped again after every ``_MAX_MAPPED`` bytes: one mapping would keep both layouts of the weights in
    memory to the end. A mapping per tensor would parse the file's header each time, half a minute with experts.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, unread: tuple[str, ...] = ()) -> None:
        self.unread = unread
        names = weight_map(folder)
        if names is None and not (folder / WEIGHTS).exists():
            raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}; only safetensors weights are loaded")
        self._mapped: tuple[str, Any] = "", None  # the name of a file, and the file
        self._mapped_bytes = 0
        super().__init__(folder, dtype, device, names or {})
        if names is None:
            self._locations = dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        else:
            self._check_index(names)

    def _check_index(self, names: dict[str, str]) -> None:
        listed: dict[str, set[str]] = {}
        for tensor, file in names.items():
            listed.setdefault(file, set()).add(tensor)
        for file, tensors in sorted(listed.items()):
            held = set(self._open(file).keys())
            if held != tensors:
                odd = min(held ^ tensors)
                raise ModelError(f"{self.path / INDEX}: the index and {file} disagree about tensor {shown(odd)}")

    def _open(self, file: str) -> Any:
        if self._mapped[0] != file or self._mapped_bytes > _MAX_MAPPED:
            self._mapped, self._mapped_bytes = (file, open_weights(self.path / file)), 0
        return self._mapped[1]

    def read(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """The tensor of that name as it is stored. Raises ModelError if it is missing or has another shape."""
        if name not in self._locations:
            raise ModelError(f"{self.path}: the weights lack tensor {name!r}, which config.json asks for")
        file = self._open(self._locations[name])
        stored = file.get_slice(name).get_shape()
        if tuple(stored) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shown(stored)}; config.json asks for {wanted}")
        tensor: Tensor = file.get_tensor(name)
        self._mapped_bytes += tensor.nbytes
        self._taken.add(name)
        return tensor

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name on the source's device, in its dtype or as ``stored_dtype`` says.

        Raises ModelError as ``read``, and for numbers that are not floating-point.
        """
        tensor = self.read(name, shape)
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} is {tensor.dtype}, which is quantized; give the bfloat16 release of "
                "the model"
            )
        return tensor.to(self.device, dtype or stored_dtype(tensor.dtype, self.dtype, self.device))


class RandomTensors:
    """Random weights of any shape, the same in every run: for measuring speed without a checkpoint.

    Tensors without an ``Init`` are normally distributed around zero with deviation ``std``. They have the dtypes of
    tensors from a checkpoint saved in ``saved``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        std: float = 0.02,
        saved: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.stored = stored_dtype(saved or dtype, dtype, device)
        self.seed = seed
        self.std = std

    def holds(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        mean, std = init or (0.0, self.std)
        drawn_on = "cpu" if self.device.type in UNTRIED_DEVICES else self.device  # their proof compares with the CPU
        generator = torch.Generator(drawn_on).manual_seed(zlib.crc32(name.encode()) + self.seed)
        tensor = torch.empty(shape, dtype=dtype or self.stored, device=drawn_on)
        return tensor.normal_(mean, std, generator=generator).to(self.device)

    def finish(self, optional: str = "") -> None:
        """Do nothing: random tensors are never left over."""


class NamedTensors:
    """The tensors of a source by role, under the names that the model's family gives them."""

    def __init__(self, source: TensorSource, config: ModelConfig, **indices: int) -> None:
        self._source = source
        self._config = config
        self._names = config.tensor_names
        self._indices = indices

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    def of(self, **indices: int) -> NamedTensors:
        """The tensors of one layer, or of one of its experts."""
        return NamedTensors(self._source, self._config, **self._indices, **indices)

    def name(self, role: str, part: str = "weight") -> str:
        """The name of a module's tensor; with an empty ``part``, of a module that is itself a tensor."""
        module = self._names[role].format(**self._indices)
        return f"{module}.{part}" if part else module

    def holds(self, role: str, part: str = "weight") -> bool:
        return role in self._names and self._source.holds(self.name(role, part))

    def take(
        self,
        role: str,
        *shape: int,
        part: str = "weight",
        init: Init | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self._source.take(self.name(role, part), shape, init, dtype)

    def norm(self, role: str, width: int) -> Tensor:
        """A copy of the weights [width] of a norm, in the model's dtype."""
        offset = self._config.norm_offset
        weight = self.take(role, width, init=Init(1.0 - offset, 0.1))
        return (weight.float() + offset).to(self.dtype, copy=True)

    def biases(self, *parts: tuple[str, int]) -> Tensor | None:
        """Copies of the biases of modules (role, width), end to end; zeros for a module without, or None for all."""
        taken = {role: self.take(role, n, part="bias") for role, n in parts if role in self._config.biases}
        if not taken:
            return None
        device = next(iter(taken.values())).device
        biases = (taken[role] if role in taken else torch.zeros(n, device=device) for role, n in parts)
        return torch.cat([bias.to(self.dtype) for bias in biases])


def untied(config: ModelConfig, tensors: NamedTensors) -> ModelConfig:
    """The shape with an untied output projection, if the checkpoint's projection differs from the embedding.

    Some fine-tunes are saved with such a head, although their config says that it is tied. As in transformers, the two
    are compared in the model's dtype.
    """
    if not (config.tie_embedding and config.has_head and tensors.holds("head")):
        return config
    table, head = (tensors.take(role, config.vocab_size, config.hidden_size) for role in ("embedding", "head"))
    dtype = torch.promote_types(head.dtype, table.dtype)
    if torch.equal(head.to(dtype), table.to(dtype)):
        return config
    return replace(config, tie_embedding=False, has_unexpected_head=True)
