"""Instruction sets that kernels are compiled for: one answer for the plan, the loader and the kernels.

Numba compiles the kernels, so its settings (``NUMBA_CPU_FEATURES``, ``NUMBA_CPU_NAME``, ``NUMBA_ENABLE_AVX``) decide
here too: with them a run behaves as on an older CPU. Imports neither torch nor numba, so that ``plan`` can use it.
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def target() -> tuple[str, str]:
    """The CPU to compile for and its instruction sets, each by LLVM's name: ``znver4``, ``+avx2,-avx512bf16,...``."""
    from llvmlite import binding  # takes a while to import, and help texts do not need it

    settings = _numba_settings()
    name = binding.get_host_cpu_name() if settings.CPU_NAME is None else str(settings.CPU_NAME)
    if settings.CPU_FEATURES is not None:
        return name, str(settings.CPU_FEATURES)
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this system
        return name, ""
    for feature in features:
        features[feature] &= bool(settings.ENABLE_AVX) or not feature.startswith("avx")
    return name, features.flatten()


def _numba_settings() -> Any:
    """Numba's settings, read by its own module of them: importing numba itself takes half a second."""
    numba = find_spec("numba")
    assert numba is not None and numba.origin is not None, "batchgen depends on numba"
    config = spec_from_file_location("batchgen_numba_config", Path(numba.origin).parent / "core" / "config.py")
    assert config is not None and config.loader is not None, "a path of a module's source has a loader"
    settings = module_from_spec(config)
    config.loader.exec_module(settings)
    return settings


@lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    """The instruction sets to compile for, by LLVM's names, such as ``avx512bf16``."""
    return frozenset(name[1:] for name in target()[1].split(",") if name.startswith("+"))


def has_bfloat16_pairs() -> bool:
    """Whether a vector instruction rounds to bfloat16 and multiplies pairs of them."""
    return "avx512bf16" in cpu_features()


def has_matrix_unit() -> bool:
    """Whether a matrix unit multiplies bfloat16."""
    return "amx-bf16" in cpu_features()


def leaves_products_to_onednn(dtype: str, weights: str = "auto", activations: str = "auto") -> bool:
    """Whether oneDNN computes a model's products: of bfloat16 numbers on a matrix unit, for which there is no kernel.

    It reads no integers, so weights that are to be stored as such are multiplied by kernels of our own.
    """
    return dtype == "bfloat16" and weights == activations == "auto" and has_matrix_unit()


def has_wide_registers() -> bool:
    """Whether there are 32 vector registers of 16 float32."""
    return "avx512f" in cpu_features()


def cpu_obstacle(activations: str = "auto") -> str:
    """Reason for which this processor cannot have compiled kernels, with a remedy; "" if it can."""
    is_arm = platform.machine().lower() in ("aarch64", "arm64")  # LLVM does not list its features on every system
    if not is_arm and not {"fma", "avx512f", "neon"} & cpu_features():
        why = "this processor has no instruction that multiplies and adds (FMA), which every x86 since 2013 has"
        narrowed = [name for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES") if name in os.environ]
        return f"{why}; " + (f"unset {' and '.join(narrowed)}" if narrowed else "use another machine, or a GPU")
    if activations == "int8" and integer_products() is None:
        return (
            "this processor multiplies no bytes (AVX2 or Arm's dot products), which --quantization w8a8 needs; omit it"
        )
    return ""


def integer_products() -> tuple[int, int] | None:
    """(products that a lane adds up, number added to weights) of vector instructions that multiply integers of 8 bits.

    VNNI multiplies bytes, unsigned weights by signed inputs. Without it x86 adds up products of bytes in 16 bits, which
    do not hold them, so it multiplies integers of 16 bits. None: no instruction does it.
    """
    if {"avx512vnni", "avxvnni"} & cpu_features():
        return 4, 128
    if "dotprod" in cpu_features():
        return 4, 0
    return (2, 0) if "avx2" in cpu_features() else None


def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are native; emulated they are slower than float32."""
    return has_bfloat16_pairs() or has_matrix_unit()


def processor_variant(product: str = "") -> str:
    """``Kernels.variant`` on a CPU: its vectors, such as ``avx512-bf16``, and the library of matrix products, if any.

    A library comes with torch, and another version of it may add in another order, so torch's version is named with
    it; kernels of our own define each operation and give the same bits under any version.
    """
    import torch

    vectors = torch.backends.cpu.get_cpu_capability().lower()  # as torch finds them, and oneDNN too
    units = [name for name, is_there in (("bf16", has_bfloat16_pairs()), ("amx", has_matrix_unit())) if is_there]
    architecture = [] if vectors.startswith("avx") else [platform.machine().lower()]
    parts = [*architecture, vectors, *units]
    if product:
        parts += [product, f"torch{torch.__version__.partition('+')[0]}"]
    return "-".join(parts)
