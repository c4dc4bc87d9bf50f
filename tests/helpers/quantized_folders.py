"""Writers of quantized checkpoints, made from the published layouts alone and sharing nothing with the readers.

A writer takes a matrix and returns the tensors of its module and the values that they stand for, in numpy and float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_model import write_checkpoint
from torch import Tensor

Parts = tuple[dict[str, Tensor], np.ndarray]
Writer = Callable[[np.ndarray], Parts]
GROUP = 16


def words(values: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of unsigned ``values`` [rows, n], padded; ``places`` is the place in its word of each value."""
    per_word = 32 // bits
    padded = np.pad(values.astype(np.int64), ((0, 0), (0, -values.shape[1] % per_word)))
    packed = np.zeros((len(values), padded.shape[1] // per_word), dtype=np.int64)
    for index in range(per_word):
        place = places[index] if places else index
        packed += padded[:, index::per_word] << (bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def rounded(weight: np.ndarray, size: int, bits: int, groups: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Unsigned values, zero points and scales (of bfloat16) of groups of ``size`` inputs, or as ``groups`` has them."""
    groups = np.arange(weight.shape[1]) // size if groups is None else groups
    count = int(groups.max()) + 1
    low = np.stack([weight[:, groups == g].min(1) for g in range(count)], 1)
    high = np.stack([weight[:, groups == g].max(1) for g in range(count)], 1)
    exact = torch.from_numpy((high - low) / (2**bits - 1))
    scale = exact.bfloat16().double().numpy()
    zero = np.clip(np.round(-low / scale), 1, 2**bits - 1)
    values = np.clip(np.round(weight / scale[:, groups]) + zero[:, groups], 0, 2**bits - 1)
    return values, zero, scale, (values - zero[:, groups]) * scale[:, groups]


def symmetric(weight: np.ndarray, size: int, bits: int) -> tuple[np.ndarray, ...]:
    """Signed values, scales and what they stand for."""
    out, width = weight.shape
    split = weight.reshape(out, width // size, size)
    exact = np.abs(split).max(-1) / (2 ** (bits - 1) - 1)
    scale = torch.from_numpy(exact).bfloat16().double().numpy()
    values = np.clip(np.round(split / scale[..., None]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return values.reshape(out, width), scale, (values * scale[..., None]).reshape(out, width)


def tensor(values: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def int8(weight: np.ndarray) -> Parts:
    values, scale, wide = symmetric(weight, weight.shape[1], 8)
    return {"weight": tensor(values, torch.int8), "weight_scale": tensor(scale)}, wide


def int8_of_a_tensor(weight: np.ndarray) -> Parts:
    values = np.round(weight / 0.01).clip(-128, 127)
    scale = torch.tensor([0.01])
    return {"weight": tensor(values, torch.int8), "weight_scale": scale}, values * scale.double().item()


def int8_with_zero_points(weight: np.ndarray) -> Parts:
    values, zero, scale, wide = rounded(weight, GROUP, 8)
    parts = {"weight": values - 128, "weight_zero_point": zero - 128}
    return {name: tensor(part, torch.int8) for name, part in parts.items()} | {"weight_scale": tensor(scale)}, wide


def packed(bits: int, size: int = 0) -> Writer:
    def write(weight: np.ndarray) -> Parts:
        values, scale, wide = symmetric(weight, size or weight.shape[1], bits)
        shape = torch.tensor(weight.shape)
        stored = words(values + 2 ** (bits - 1), bits)
        return {"weight_packed": stored, "weight_scale": tensor(scale), "weight_shape": shape}, wide

    return write


def packed_with_zero_points(weight: np.ndarray, groups: np.ndarray | None = None) -> Parts:
    values, zero, scale, wide = rounded(weight, GROUP, 4, groups)
    parts = {"weight_packed": words(values, 4), "weight_scale": tensor(scale), "weight_shape": torch.tensor(wide.shape)}
    parts["weight_zero_point"] = words(zero.T, 4).T.contiguous()
    return parts | ({} if groups is None else {"weight_g_idx": tensor(groups, torch.int32)}), wide


def mixed_up(width: int) -> np.ndarray:
    return np.random.default_rng(width).permutation(np.arange(width) // GROUP)


def packed_out_of_order(weight: np.ndarray) -> Parts:
    return packed_with_zero_points(weight, mixed_up(weight.shape[1]))


def float8(part: str, rows: int, columns: int) -> Writer:
    """Scales of blocks of that size; 0 is the size of the whole matrix."""

    def write(weight: np.ndarray) -> Parts:
        out, width = weight.shape
        row, column = np.arange(out) // (rows or out), np.arange(width) // (columns or width)
        scale = np.abs(np.random.default_rng(out).normal(0.01, 0.002, (row.max() + 1, column.max() + 1)))
        scale = scale.astype(np.float32).astype(np.float64)
        spread = scale[row][:, column]
        stored = tensor(weight / spread, torch.float32).to(torch.float8_e4m3fn)
        return {"weight": stored, part: tensor(scale, torch.float32)}, stored.double().numpy() * spread

    return write


def gptq(bits: int, size: int, offset: int, *, is_mixed_up: bool = False) -> Writer:
    def write(weight: np.ndarray) -> Parts:
        width = weight.shape[1]
        groups = mixed_up(width) if is_mixed_up else np.arange(width) // (size or width)
        values, zero, scale, wide = rounded(weight, size, bits, groups)
        parts = {
            "qweight": words(values, bits).T.contiguous(),
            "qzeros": words((zero - offset).T, bits),
            "scales": tensor(scale.T),
            "g_idx": tensor(groups, torch.int32),
        }
        return parts, wide

    return write


def awq(weight: np.ndarray) -> Parts:
    values, zero, scale, wide = rounded(weight, GROUP, 4)
    places = tuple([0, 2, 4, 6, 1, 3, 5, 7].index(output) for output in range(8))
    parts = {"qweight": words(values.T, 4, places), "qzeros": words(zero.T, 4, places), "scales": tensor(scale.T)}
    return parts, wide


def compressed(file_format: str, *groups: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors for groups with these settings of weights."""
    numbered = {f"group_{n}": {"targets": ["Linear"], "weights": weights} for n, weights in enumerate(groups)}
    method = {"quant_method": "compressed-tensors", "format": file_format, "ignore": ["lm_head"]}
    return {**method, "config_groups": numbered, **settings}


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT4 = {"num_bits": 4, "group_size": GROUP, "strategy": "group"}
W8A8 = compressed("int-quantized", {"num_bits": 8, "strategy": "channel"})
W8A8["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
KINDS: dict[str, tuple[dict[str, Any], Writer]] = {
    "int8": (W8A8, int8),
    "int8 of a tensor": (compressed("int-quantized", {"num_bits": 8, "strategy": "tensor"}), int8_of_a_tensor),
    "int8 with zero points": (
        compressed("naive-quantized", {"num_bits": 8, "group_size": GROUP, "symmetric": False}),
        int8_with_zero_points,
    ),
    "packed int8": (compressed("pack-quantized", {"num_bits": 8, "group_size": -1}), packed(8)),
    "packed int4": (compressed("pack-quantized", INT4), packed(4, GROUP)),
    "packed int4 with zero points": (compressed("pack-quantized", INT4), packed_with_zero_points),
    "packed int4 out of order": (compressed("pack-quantized", INT4), packed_out_of_order),
    "float8 of a tensor": (compressed("float-quantized", FLOAT8), float8("weight_scale", 0, 0)),
    "float8 of outputs": (compressed("float-quantized", FLOAT8), float8("weight_scale", 1, 0)),
    "float8 of blocks": (
        compressed("naive-quantized", {**FLOAT8, "strategy": "block", "block_structure": [24, 40]}),
        float8("weight_scale", 24, 40),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [40, 24]}, float8("weight_scale_inv", 40, 24)),
    "fp8 of a tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, float8("weight_scale", 0, 0)),
    "gptq": (GPTQ, gptq(4, GROUP, 1)),
    "gptq of 8 bits": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, 0, 1)),
    "gptq out of order": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, GROUP, 0, is_mixed_up=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


def write_quantized(folder: Path, kind: str, **changes: Any) -> dict[str, Tensor]:
    """Write a tiny checkpoint whose linears are quantized; its tensors by name, and those it stands for beside it.

    The folder ``plain`` in ``folder`` holds the same model with the values that the quantized tensors stand for.
    """
    settings, writer = KINDS[kind]
    tensors = write_checkpoint(folder, **changes)
    plain, stored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and "embed" not in name:
            parts, wide = writer(weight.double().numpy())
            plain[name] = tensor(wide, torch.float32)
            del stored[name]
            stored |= {f"{name.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    save_file(stored, folder / "model.safetensors")
    write_checkpoint(folder / "plain", **changes)
    save_file(plain, folder / "plain" / "model.safetensors")
    set_quantization(folder, settings)
    return stored


def set_quantization(folder: Path, settings: Any, key: str = "quantization_config") -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: settings}))
