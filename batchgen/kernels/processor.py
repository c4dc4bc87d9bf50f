"""Instruction sets that kernels are compiled for, decided once for the plan, the loader and the kernels.

Numba's settings (``NUMBA_CPU_NAME`` and others) apply too; for ``plan`` they are read without importing numba.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from functools import lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

# Linux on x86-64: the numbers of the system call, of its request, and of the tile registers' state.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
# For tests: processors without a matrix unit run its kernels too, with tiles in memory; see ``compiled.tiles``.
ARE_TILES_EMULATED = os.environ.get("BATCHGEN_TILES") == "memory"


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
    """Numba's settings, from its configuration module, since importing numba itself takes half a second."""
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


def has_fast_bfloat16_pairs() -> bool:
    """Whether pairs of bfloat16 are multiplied faster than float32, as on AMD; Intel takes twice as long."""
    return has_bfloat16_pairs() and target()[0].startswith("znver")


def has_matrix_unit(kind: str) -> bool:
    """Whether this process multiplies "bf16" or "int8" on the tiles of a matrix unit: AMX, if Linux permits its use.

    It requests the permission, so it must be called before the first kernel of a process runs.
    """
    if {"amx-tile", f"amx-{kind}"} <= cpu_features():
        return not tiles_obstacle()
    return ARE_TILES_EMULATED


@lru_cache(maxsize=1)
def tiles_obstacle() -> str:
    """Ask Linux for the use of tile registers; "" if granted, otherwise the reason with a remedy.

    Threads share the permission and forks inherit it; an executed program must ask again. Without it the first tile
    instruction kills the process.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only Linux lets programs use it"
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    number = ctypes.get_errno()
    remedies = {
        errno.EINVAL: "this Linux is older than 5.16; use a newer one",
        errno.ENOSPC: "a thread's signal stack is too small for tile registers; run batchgen in a process of its own",
    }
    return remedies.get(number, f"Linux refuses ({os.strerror(number)}); allow arch_prctl in the container")


def matrix_unit_note() -> str:
    """A line for the user of a processor whose matrix unit this process may not use; "" elsewhere."""
    why = tiles_obstacle() if "amx-tile" in cpu_features() else ""
    return f"AMX is not used, so products are slower: {why}" if why else ""


def has_wide_registers() -> bool:
    """Whether there are 32 vector registers of 16 float32."""
    return "avx512f" in cpu_features()


def cpu_obstacle(activations: str = "auto") -> str:
    """The reason why this processor cannot run compiled kernels, with a remedy; "" if it can."""
    is_arm = platform.machine().lower() in ("aarch64", "arm64")  # LLVM does not list its features on every system
    if not is_arm and not {"fma", "avx512f", "neon"} & cpu_features():
        why = "this processor lacks an instruction that multiplies and adds (FMA), which every x86 since 2013 has"
        narrowed = [name for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES") if name in os.environ]
        return f"{why}; " + (f"unset {' and '.join(narrowed)}" if narrowed else "use another machine, or a GPU")
    if activations == "int8" and integer_products() is None:
        return (
            "this processor cannot multiply bytes (AVX2, Arm's dot products), which --quantization w8a8 needs; omit it"
        )
    return ""


def integer_products() -> tuple[int, int] | None:
    """(products per lane, shift of weights) of the vector instructions that multiply 8-bit integers; None without any.

    VNNI multiplies unsigned weights by signed inputs. Without it, x86 adds products of bytes in 16 bits, which
    overflow, so 16-bit integers are multiplied instead.
    """
    if {"avx512vnni", "avxvnni"} & cpu_features() or has_matrix_unit("int8"):
        return 4, 128
    if "dotprod" in cpu_features():
        return 4, 0
    return (2, 0) if "avx2" in cpu_features() else None


def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are native; emulated they are slower than float32."""
    return has_bfloat16_pairs() or has_matrix_unit("bf16")


def processor_variant(library: str = "") -> str:
    """``Kernels.variant`` on a CPU: its vectors, such as ``avx512-bf16``; with ``library``, this and torch's version.

    A library's order of sums may change with torch's version. Our own kernels give the same bits with any version.
    """
    import torch

    vectors = torch.backends.cpu.get_cpu_capability().lower()  # as torch finds them
    has_pairs, is_fast = has_bfloat16_pairs(), has_fast_bfloat16_pairs()
    has_tiles = has_matrix_unit("bf16")  # "amx" without "attention": versions whose attention did not use tiles
    unit_names = {"bf16": has_pairs, "intel": has_pairs and not is_fast, "amx": has_tiles, "attention": has_tiles}
    units = [name for name, is_there in unit_names.items() if is_there]
    architecture = [] if vectors.startswith("avx") else [platform.machine().lower()]
    parts = [*architecture, vectors, *units]
    if library:
        parts += [library, f"torch{torch.__version__.partition('+')[0]}"]
    return "-".join(parts)
