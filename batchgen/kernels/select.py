"""Choice of the back end for a device and dtype."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from batchgen.kernels.interface import Kernels


def select(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = True,
    weights: str = "auto",
    activations: str = "auto",
) -> Kernels:
    """The fastest back end for a device and dtype; on CUDA the one whose rows are independent if ``batch_invariant``.

    Without it, or without Triton, CUDA multiplies with cuBLAS, which ``Kernels.variant`` then names; on the CPU both
    are the same. ``weights`` and ``activations`` are those of ``Kernels``; CUDA ignores the latter.
    """
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        from batchgen.kernels.cpu.backend import CpuKernels

        return CpuKernels(dtype, weights=weights, activations=activations)
    if device.type == "cuda" and find_spec("triton") is not None:
        from batchgen.kernels.cuda.backend import CudaKernels

        return CudaKernels(device, batch_invariant=batch_invariant, weights=weights)
    from batchgen.kernels.reference import ReferenceKernels

    return ReferenceKernels(device, dtype, weights=weights, activations=activations)
