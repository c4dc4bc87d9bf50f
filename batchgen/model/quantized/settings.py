"""Settings of a quantized checkpoint, from its ``config.json``; torch-free, so that a plan refuses what a run would.

The formats are those of compressed-tensors, of GPTQ and AWQ, and of fp8 as transformers and vLLM read it. Which tensors
are quantized, ``checkpoint`` reads off the tensors; the settings say how, and must agree with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.units import shown
from batchgen.model.config import Quantization
from batchgen.model.config_values import ConfigValues

_KEYS = ("quantization_config", "compression_config", "quantization")  # transformers; the same once; MLX
_REMEDY = "use the bfloat16 release"
_FORMATS = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized")
_MAX_GROUP_SIZE = 1 << 20


def parse_quantization(values: ConfigValues) -> Quantization | None:
    """How the checkpoint of this ``config.json`` is quantized; None if it is not.

    Raises ModelError: in a way that is not read, or with impossible settings.
    """
    key = next((key for key in _KEYS if values.raw.get(key) is not None), None)
    if key is None:
        return None
    settings = values.section(key)
    method = settings.raw.get("quant_method")
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        kind = "MLX" if method is None and "bits" in settings.raw else shown(method)
        raise values.error(f"{key} by {kind} is not supported ({', '.join(_METHODS)} are); {_REMEDY}")
    return parse(settings)


def _compressed_tensors(values: ConfigValues) -> Quantization | None:
    if values.raw.get("transform_config"):
        raise _unsupported(values, "transform_config")
    if values.raw.get("sparsity_config") and values.section("sparsity_config").raw.get("format") != "dense":
        raise _unsupported(values, "sparsity_config")
    groups = values.section("config_groups")
    bits: set[int] = set()
    sizes: set[int | None] = set()
    blocks: set[tuple[int, int]] = set()
    has_activations = False
    for name in groups.raw:
        group = groups.section(name)
        has_activations |= group.raw.get("input_activations") is not None
        if group.raw.get("weights") is None:
            continue
        file_format = group.get("format", default=values.raw.get("format"))
        if file_format not in _FORMATS:
            raise _unsupported(values, f"format {shown(file_format)}")
        weights = group.section("weights")
        bits.add(_bits(weights, "num_bits"))
        if weights.raw.get("block_structure") is None:
            sizes.add(_group_size(weights, default=-1))
        else:
            blocks.add(_block(weights, "block_structure"))
    if not bits:
        return None
    if len(blocks) + bool(sizes) > 1:
        raise _unsupported(values, "config_groups with blocks beside other groups")
    block = next(iter(blocks), None)
    return Quantization("compressed-tensors", frozenset(bits), frozenset(sizes), block, has_activations=has_activations)


def _fp8(values: ConfigValues) -> Quantization:
    is_blocked = values.raw.get("weight_block_size") is not None
    block = _block(values, "weight_block_size") if is_blocked else None
    sizes: frozenset[int | None] = frozenset() if is_blocked else frozenset({None})
    return Quantization("fp8", frozenset({8}), sizes, block, has_activations=True)


def _gptq(values: ConfigValues) -> Quantization:
    if values.raw.get("dynamic"):
        raise _unsupported(values, "dynamic")
    layout = values.text("checkpoint_format", "format", default="gptq")
    if layout not in ("gptq", "gptq_v2") or values.raw.get("is_marlin_format"):
        raise _unsupported(values, f"checkpoint_format {shown(layout)}")
    size = frozenset({_group_size(values)})
    return Quantization("gptq", frozenset({_bits(values, "bits")}), size, zero_offset=int(layout == "gptq"))


def _awq(values: ConfigValues) -> Quantization:
    version = values.text("version", default="gemm")
    if version.lower() != "gemm":
        raise _unsupported(values, f"version {shown(version)}")
    if (bits := _bits(values, "bits", "w_bit")) != 4:
        raise _unsupported(values, f"bits {bits}")
    return Quantization("awq", frozenset({bits}), frozenset({_group_size(values)}))


_METHODS: Mapping[str, Callable[[ConfigValues], Quantization | None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
}


def _bits(values: ConfigValues, *names: str) -> int:
    bits = values.integer(*names)
    if bits not in (4, 8):
        raise _unsupported(values, f"{names[0]} {bits}")
    return bits


def _group_size(values: ConfigValues, **default: Any) -> int | None:
    """Inputs that share a scale; None for all of an output's, which files write as -1."""
    size = values.get("group_size", "q_group_size", **default)
    if type(size) is int and size == -1:
        return None
    return values.integer("group_size", "q_group_size", most=_MAX_GROUP_SIZE)


def _block(values: ConfigValues, key: str) -> tuple[int, int]:
    sizes = values.get(key)
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= _MAX_GROUP_SIZE for size in sizes):
        raise values.error(f"{key} must be two positive integers, not {shown(sizes)}")
    return sizes[0], sizes[1]


def _unsupported(values: ConfigValues, what: str) -> ModelError:
    return values.error(f"{what} is not supported; {_REMEDY}")
