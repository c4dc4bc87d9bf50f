"""The compiled kernels: the source of each, its kinds, and the choice of kernels that a run needs.

Imports neither torch nor numba, so that kernels are found, or compiled elsewhere, before these are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy import float32 as F32  # noqa: N812 - as in the kernels' sources
from numpy import int8 as INT8  # noqa: N812
from numpy import int16 as TILED  # noqa: N812
from numpy import uint8 as BYTES  # noqa: N812
from numpy import uint16 as BF16  # noqa: N812

from batchgen.kernels.processor import has_bfloat16_pairs, has_fast_bfloat16_pairs, has_matrix_unit

COMPILED = "batchgen.kernels.cpu.compiled"  # the package with the sources of kernels
Kinds = Mapping[str, tuple[Any, ...]]
_SHORT = {"bfloat16": "bf16", "float32": "f32", "int8": "int8"}
ELEMENTS: Kinds = {"bfloat16": (BF16,), "float32": (F32,)}


@dataclass(frozen=True)
class KernelSpec:
    """A kernel: the function ``name`` of ``module``, an ``entry.ItemKernel`` or a function of a launch's words.

    ``kinds`` maps the name of a kind to the element types that the kernel is compiled for. A kind with the name of a
    dtype is for tensors of that dtype.
    """

    module: str
    name: str
    kinds: Kinds = field(default_factory=lambda: ELEMENTS, compare=False)


RMS_NORM, SCALE, ARGMAX, MASK = (
    KernelSpec(f"{COMPILED}.rows", name) for name in ("rms_norm", "scale", "argmax", "mask")
)
QUANTIZE = KernelSpec(f"{COMPILED}.quantize", "quantize_rows")
SHORT_CONV = KernelSpec(f"{COMPILED}.rope_conv", "short_conv")
# The element types of the model and of the cache.
_CACHED: Kinds = {
    "bfloat16": (BF16, BF16),
    "float32": (F32, F32),
    "bf16_kv_int8": (BF16, INT8),
    "f32_kv_bf16": (F32, BF16),
    "f32_kv_int8": (F32, INT8),
}
ROPE_AND_CACHE = KernelSpec(f"{COMPILED}.rope_conv", "rope_and_cache", _CACHED)
# The element types of the model, of the cache, and of queries and probabilities in products.
_ATTENDED: Kinds = {kind: (*types, F32) for kind, types in _CACHED.items()} | {
    "bf16_pairs": (BF16, BF16, BF16),
    "bf16_tiles": (BF16, BF16, TILED),
}
ATTENTION = KernelSpec(f"{COMPILED}.attention", "attention", _ATTENDED)
ROUTE, ADD_UP = (KernelSpec(f"{COMPILED}.experts", name) for name in ("route", "add_up"))
SORT = KernelSpec(f"{COMPILED}.experts", "sort", {"any": ()})
SAMPLE, LOGSUMEXP = (KernelSpec(f"{COMPILED}.sampling", name) for name in ("sample", "logsumexp"))
RUN_ALL, SERVE = (KernelSpec(f"{COMPILED}.thread_pool", name, {"any": ()}) for name in ("run_all", "serve"))
# The element types of results and inputs, and of the weights or the table that are read.
_STORED: Kinds = {"bfloat16": (BF16, BF16), "float32": (F32, F32), "f32_of_bf16": (F32, BF16)}
TAKE_ROWS = KernelSpec(f"{COMPILED}.rows", "take_rows", _STORED)
EMBEDDING_LOOKUP_PACKED = KernelSpec(f"{COMPILED}.rows", "embedding_lookup_packed", _STORED)
_INT8: Kinds = {"bf16_of_int8": (BF16, BYTES), "f32_of_int8": (F32, BYTES)}
MATMUL = KernelSpec(f"{COMPILED}.matmul", "matmul", {**_STORED, **_INT8})
_BYTES: Kinds = {"bfloat16": (BF16, BYTES), "float32": (F32, BYTES)}
MATMUL_INTEGERS = KernelSpec(f"{COMPILED}.matmul", "matmul_integers", _BYTES)
# The element types of the model and of the unpacked weights.
_PAIRED: Kinds = {"bfloat16": (BF16, F32), "bf16_pairs": (BF16, BF16), "float32": (F32, F32)}
MATMUL_UNPACKED = KernelSpec(f"{COMPILED}.matmul", "matmul_unpacked", _PAIRED)

# Kernels on the tiles of a matrix unit.
MATMUL_BF16 = KernelSpec(f"{COMPILED}.amx_bf16", "matmul_bf16", {"bfloat16": (BF16, BF16)})
MATMUL_BF16_UNPACKED = KernelSpec(f"{COMPILED}.amx_bf16", "matmul_bf16_unpacked", {"bfloat16": (BF16, BYTES)})
MATMUL_INT8 = KernelSpec(f"{COMPILED}.amx_int8", "matmul_int8", _BYTES)


def paired_kind(dtype: str) -> str:
    """The kind of a kernel that multiplies pairs of bfloat16 if the processor can, for a model in ``dtype``."""
    return "bf16_pairs" if dtype == "bfloat16" and has_bfloat16_pairs() else dtype


def cached_kind(dtype: str, kv_cache_dtype: str) -> str:
    """The kind of the kernels that cache keys and values in ``kv_cache_dtype``, for a model in ``dtype``."""
    if kv_cache_dtype in ("auto", dtype):
        return dtype
    return f"{_SHORT[dtype]}_kv_{_SHORT[kv_cache_dtype]}"


def attention_kind(dtype: str, kv_cache_dtype: str, is_whole: bool) -> str:
    """The kind of attention for a model's dtypes; ``is_whole``: heads are multiples of ``layout.TILE_STEP`` wide."""
    kind = cached_kind(dtype, kv_cache_dtype)
    if kind == "bfloat16" and is_whole and has_matrix_unit("bf16"):
        return "bf16_tiles"
    return "bf16_pairs" if kind == "bfloat16" and has_fast_bfloat16_pairs() else kind


def needed(
    dtype: str,
    stored: str,
    weights: str = "auto",
    activations: str = "auto",
    kv_cache_dtype: str = "auto",
    parts: str = "dense",
) -> list[tuple[KernelSpec, str]]:
    """The kernels that each step of a model may need, and their kinds; the longest to compile first.

    ``dtype`` is the dtype of the computation, ``stored`` of the weights before ``weights`` and ``activations`` apply,
    ``kv_cache_dtype`` of keys and values; ``parts`` are ``model.config.ModelConfig.parts``.
    """
    if dtype not in ELEMENTS:
        return []
    reading = "f32_of_bf16" if (dtype, stored) == ("float32", "bfloat16") else dtype
    linears = _linears(dtype, reading, weights, activations)
    kernels = [(ATTENTION, attention_kind(dtype, kv_cache_dtype, "tiles" in parts)), *linears]
    if "scales" in parts:
        kernels.append((SCALE, dtype))
    if "experts" in parts:
        kernels += [(ROUTE, dtype), (SORT, "any"), (ADD_UP, dtype)]
    kernels += [(spec, dtype) for spec in (SHORT_CONV, ARGMAX, RMS_NORM)]
    kernels.append((ROPE_AND_CACHE, cached_kind(dtype, kv_cache_dtype)))
    # Embeddings are read from a tied head's panels unless these are quantized; queries are float32 in any model.
    kernels.append((EMBEDDING_LOOKUP_PACKED if weights == "auto" else TAKE_ROWS, reading))
    kernels += [(TAKE_ROWS, kind) for kind in (dtype, "float32")]
    return list(dict.fromkeys([*kernels, (RUN_ALL, "any"), (SERVE, "any")]))


def _linears(dtype: str, reading: str, weights: str, activations: str) -> list[tuple[KernelSpec, str]]:
    if activations == "int8":
        return [(MATMUL_INT8 if has_matrix_unit("int8") else MATMUL_INTEGERS, dtype), (QUANTIZE, dtype)]
    if dtype == "bfloat16" and has_matrix_unit("bf16"):
        return [(MATMUL_BF16_UNPACKED if weights == "int8" else MATMUL_BF16, dtype)]
    if weights == "int8":
        return [
            (MATMUL_UNPACKED, paired_kind(dtype)),
            (MATMUL, "bf16_of_int8" if dtype == "bfloat16" else "f32_of_int8"),
        ]
    return [(MATMUL, reading)]


def needed_by_some(dtype: str, *_: str) -> list[tuple[KernelSpec, str]]:
    """The kernels that only rows with sampling, scores, constraints or penalties need (penalties in float32)."""
    if dtype not in ELEMENTS:
        return []
    kernels = [(spec, dtype) for spec in (SAMPLE, LOGSUMEXP, MASK)]
    return list(dict.fromkeys([*kernels, (SAMPLE, "float32"), (ARGMAX, "float32")]))
