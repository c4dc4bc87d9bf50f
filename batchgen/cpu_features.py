"""What this machine's CPU multiplies by itself: one answer for the plan, the loader and the kernels.

Numba's own override, ``NUMBA_CPU_FEATURES``, decides what the kernels are compiled for, so it decides here too: with it
a run behaves as on an older CPU. Imports no torch, so that ``plan`` may ask.
"""

from __future__ import annotations

import os
from functools import lru_cache


@lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    """The instruction sets to compile for, by LLVM's names, such as ``avx512bf16``."""
    named = os.environ.get("NUMBA_CPU_FEATURES")
    if named is not None:
        return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))
    from llvmlite import binding

    try:
        found = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on every system
        return frozenset()
    return frozenset(name for name, is_there in found.items() if is_there)


def has_bfloat16_pairs() -> bool:
    """Whether a vector instruction rounds to bfloat16 and multiplies pairs of them."""
    return "avx512bf16" in cpu_features()


def has_matrix_unit() -> bool:
    """Whether a matrix unit multiplies bfloat16."""
    return "amx-bf16" in cpu_features()


def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are native; emulated they are slower than float32."""
    return has_bfloat16_pairs() or has_matrix_unit()
