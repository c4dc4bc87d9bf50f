"""Choice of the back end for a device and dtype."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

from batchgen.kernels.interface import Kernels

_MIN_CAPABILITY = (8, 0)  # of a GPU that the kernels are compiled for in tests: it multiplies bfloat16
_UNTRIED = "batchgen's authors have not tried it, so each start compares a small model there with the CPU"


def select(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = True,
    weights: str = "auto",
    activations: str = "auto",
    is_causal: bool = True,
) -> Kernels:
    """The fastest back end for a device and dtype; on CUDA, with ``batch_invariant``, the one with independent rows.

    Plain torch is for models that are not causal on CUDA, GPUs with a ``triton_obstacle``, and other devices. For
    ``weights`` and ``activations``, which CUDA ignores, see ``Kernels``. For a CPU ``processor.cpu_obstacle`` is "".
    """
    if device.type == "cpu":
        from batchgen.kernels.cpu.backend import CpuKernels

        return CpuKernels(dtype, weights=weights, activations=activations)
    why = _UNTRIED
    if device.type == "cuda":
        why = triton_obstacle(device) if is_causal else "its kernels do not let tokens see their whole text"
        if not why:
            from batchgen.kernels.cuda.backend import CudaKernels

            return CudaKernels(device, batch_invariant=batch_invariant, weights=weights)
    from batchgen.kernels.plain import PlainKernels

    return PlainKernels(device, dtype, weights=weights, activations=activations, why=why)


@lru_cache
def triton_obstacle(device: torch.device) -> str:
    """The reason why the Triton kernels cannot run on a GPU, with a remedy; "" if they can. Cached per device."""
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA's GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        return "its compute capability is {}.{}; the kernels need {}.{} or more".format(*capability, *_MIN_CAPABILITY)
    try:
        _launch_one(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's errors lack a common base class; a missing libcuda is an AssertionError
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return f"Triton cannot launch a kernel ({why}); it needs a C compiler and Python's headers (gcc, python3-dev)"
    return ""


def _launch_one(device: torch.device) -> None:
    """Compile and launch a small kernel; for the first one on a machine Triton calls the C compiler."""
    from batchgen.kernels.cuda.backend import CudaKernels

    CudaKernels(device).swiglu(torch.zeros(1, 2, device=device))
    torch.cuda.synchronize(device)
