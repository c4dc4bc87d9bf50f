"""A safetensors checkpoint with quantized matrices, as a source of plain weights.

A value is ``(q - zero) * scale``, computed in float32 and rounded once to the dtype of the model. Layouts, by what
lies beside the module's other tensors:

    weight_packed  [out, in * bits / 32] int32, lowest bits first, q stored plus half its range      compressed-tensors
    weight         [out, in] int8 or float8_e4m3fn, with weight_scale or weight_scale_inv       compressed-tensors, fp8
    qweight        [in * bits / 32, out] int32, lowest bits first, zero points minus one                           GPTQ
    qweight        [in, out * bits / 32] int32, eight outputs interleaved                                           AWQ

Whatever has none of these beside it is taken as it is, so lists of modules that were left out need not be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.model.config import Quantization
from batchgen.model.weights import WEIGHT_DTYPES, Checkpoint, Init, Shape, fill_rows, is_finite

_PARTS = {  # by method: what shows that a matrix is quantized
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "gptq": ("qweight",),
    "awq": ("qweight",),
}
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale")  # not needed
_CHUNK = 1 << 15  # values computed at once: in the cache, and too few for torch to wake its threads
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output -> its place in the word
_WORDS = (torch.int32,)
_INDICES = (torch.int32, torch.int64)
_BYTES = (torch.int8, torch.float8_e4m3fn)
_NUMBERS = (*WEIGHT_DTYPES, torch.int8)  # of scales and of zero points that are not packed


class Matrix(NamedTuple):
    """A quantized matrix [out, in], whose values are ``(values - zero) * scale``.

    ``scale`` and ``zero`` are [out or 1, num_groups], for groups of equal size in the order of the inputs, or by
    ``groups`` [in], the group of each input.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None = None
    groups: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Tensor:
        """What it stands for, computed in float32 by rows that stay in the processor's cache."""
        result = torch.empty(self.values.shape, dtype=dtype)

        def fill(rows: slice) -> None:
            result[rows] = self._wide(rows)

        fill_rows(fill, len(result), max(1, _CHUNK // self.values.shape[1]))
        return result

    def _wide(self, rows: slice) -> Tensor:
        wide = self.values[rows].contiguous().float()
        split = wide.view(len(wide), self.scale.shape[1], -1) if self.groups is None else wide
        if self.zero is not None:
            split -= self._spread(self.zero, rows)
        split *= self._spread(self.scale, rows)
        return wide

    def _spread(self, parts: Tensor, rows: slice) -> Tensor:
        parts = parts if len(parts) == 1 else parts[rows]
        return parts.unsqueeze(-1) if self.groups is None else parts[:, self.groups]


class QuantizedCheckpoint(Checkpoint):
    """Tensors of a checkpoint folder, quantized matrices read back into ``dtype``, in little more memory than both."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, settings: Quantization) -> None:
        super().__init__(folder, dtype, device)
        self._settings = settings

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As of a plain checkpoint. Raises ModelError also for parts that do not fit, and for no finite value."""
        module = name.removesuffix(".weight")
        part = next((part for part in _PARTS[self._settings.method] if self.holds(f"{module}.{part}")), None)
        if part is None or module == name:
            return super().take(name, shape, init, dtype)
        if len(shape) != 2:
            raise self._error(f"{module}.{part}", "quantizes what is no matrix")
        if part == "weight_packed":
            matrix = self._packed(module, *shape)
        else:
            matrix = self._by_columns(module, *shape) if part == "qweight" else self._scaled(module, part, *shape)
        tensor = matrix.to(dtype or self.dtype)
        if not is_finite(tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise self._error(name, f"has values that {kind} cannot hold, so its scales are damaged")
        return tensor.to(self.device)

    def holds(self, name: str) -> bool:
        """As of a plain checkpoint; a quantized matrix is there under the names of its parts."""
        module = name.removesuffix(".weight")
        parts = _PARTS[self._settings.method] if module != name else ()
        return super().holds(name) or any(super(QuantizedCheckpoint, self).holds(f"{module}.{part}") for part in parts)

    def finish(self, optional: str = "") -> None:
        head = optional.removesuffix("weight")
        of_head = {name for name in self._places if head and name.startswith(head)}
        self._taken |= of_head | {name for name in self._places if name.endswith(_OF_ACTIVATIONS)}
        super().finish(optional)

    def _packed(self, module: str, out: int, width: int) -> Matrix:
        """Matrix [out, width] from ``weight_packed``."""
        counts = {bits: -(-width * bits // 32) for bits in sorted(self._settings.bits)}
        words = self._part(f"{module}.weight_packed", _WORDS, *((out, count) for count in counts.values()))
        bits = next(bits for bits, count in counts.items() if count == words.shape[1])
        if self.holds(name := f"{module}.weight_shape") and self._part(name, _INDICES, (2,)).tolist() != [out, width]:
            raise self._error(name, f"is not {[out, width]}, which config.json asks for")
        scale = self._scale(f"{module}.weight_scale", out, width)
        zero = torch.full((1, scale.shape[1]), float(1 << (bits - 1)))
        if self.holds(name := f"{module}.weight_zero_point"):
            packed = self._part(name, _WORDS, (-(-out * bits // 32), scale.shape[1]))
            zero = unpack(packed.T, bits)[:, :out].T
        groups = self._groups(f"{module}.weight_g_idx", width, scale.shape[1])
        return Matrix(unpack(words, bits)[:, :width], scale, zero, groups)

    def _scaled(self, module: str, part: str, out: int, width: int) -> Matrix:
        """Matrix [out, width] from a ``weight`` of 8 bits."""
        stored = self._part(f"{module}.weight", _BYTES, (out, width))
        scale = self._scale(f"{module}.{part}", out, width)
        zero = None
        if self.holds(name := f"{module}.weight_zero_point"):
            zero = self._scale(name, out, width)
            if zero.shape != scale.shape:
                raise self._error(name, f"has shape {list(zero.shape)}, its scales {list(scale.shape)}")
        groups = torch.arange(width) // self._settings.block[1] if self._settings.block else None
        return Matrix(stored, scale, zero, groups)

    def _by_columns(self, module: str, out: int, width: int) -> Matrix:
        """Matrix [out, width] from ``qweight``, of which every column is an output."""
        (bits,), (size,) = self._settings.bits, self._settings.group_sizes
        is_awq, per_word = self._settings.method == "awq", 32 // bits
        order = _AWQ_ORDER if is_awq else None
        if width % (size or 1) or out % per_word or (width % per_word and not is_awq):
            raise self._error(f"{module}.qweight", f"is to be {[out, width]}, which is no whole number of groups")
        num_groups = width // (size or width)
        words = self._part(
            f"{module}.qweight", _WORDS, (width, out // per_word) if is_awq else (width // per_word, out)
        )
        values = unpack(words, bits, order).T if is_awq else unpack(words.T, bits)
        zero = unpack(self._part(f"{module}.qzeros", _WORDS, (num_groups, out // per_word)), bits, order).T
        scale = self._part(f"{module}.scales", WEIGHT_DTYPES, (num_groups, out)).T.float()
        groups = self._groups(f"{module}.g_idx", width, num_groups)
        return Matrix(values, scale, zero.float() + self._settings.zero_offset, groups)

    def _scale(self, name: str, out: int, width: int) -> Tensor:
        """Scales or zero points, float32 [out or 1, number of groups]."""
        sizes, block = self._settings.group_sizes, self._settings.block
        if block:
            found = self._part(name, _NUMBERS, (-(-out // block[0]), -(-width // block[1])))
            return found.float()[torch.arange(out) // block[0]]
        shapes: list[tuple[int, ...]] = [(out, width // size) for size in sizes if size and width % size == 0]
        if None in sizes:
            shapes += [(out, 1), (out,), (1, 1), (1,), ()]
        if not shapes:
            raise self._error(
                name, f"is for {width} inputs, which are no whole number of groups of {sorted(filter(None, sizes))}"
            )
        found = self._part(name, _NUMBERS, *shapes).float()
        return found if found.dim() == 2 else found.view(-1, 1)

    def _groups(self, name: str, width: int, num_groups: int) -> Tensor | None:
        """The group of each input; None where they are in order, which is computed faster."""
        if not self.holds(name):
            return None
        groups = self._part(name, _INDICES, (width,)).long()
        if groups.min() < 0 or groups.max() >= num_groups:
            raise self._error(name, f"names groups beyond the {num_groups} that there are")
        return None if torch.equal(groups, torch.arange(width) * num_groups // width) else groups

    def _part(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        tensor = self.read(name, *shapes)
        if tensor.dtype not in dtypes:
            raise self._error(name, f"is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
        return tensor

    def _error(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {name!r} {what}; download it again, or use the bfloat16 release")


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """The unsigned values of 4 or 8 bits in int32 [rows, n], uint8 [rows, n * 32 / bits], lowest bits first.

    ``order`` is the place within its word of each of eight values.
    """
    values = words.contiguous().view(torch.uint8)  # little-endian, as all that torch runs on
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), -1).flatten(1)
    return values if order is None else values.view(len(values), -1, 8)[..., list(order)].flatten(1)
