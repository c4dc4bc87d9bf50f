"""Products of integers by the kernels of an instruction set, held against the reference to the bit.

Run as a program, it fails at the first that differs. With the argument "avxvnni" kernels take the instructions of
AVX-VNNI, in the encoding that a processor with AVX512-VNNI knows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from reference_kernels import ReferenceKernels
from torch import Tensor

from batchgen.kernels.cpu import build, compiler
from batchgen.kernels.cpu.compiled import int8
from batchgen.kernels.interface import Kernels

SHAPES = [(70, 576), (70, 130), (6, 40), (128, 256), (5, 2)]  # (out_features, in_features)
ROWS = (1, 2, 3, 4, 5, 6, 7, 19)


def products(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Those of every number of rows with each of ``SHAPES``, some of the largest integers."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for out_features, in_features in SHAPES:
        weight, x, residual = randn(out_features, in_features), randn(19, in_features), randn(19, out_features)
        x *= 10 ** randn(19, in_features)
        x[1] = 0
        for factor in (weight[:2], x[2:4]):  # rotated, all integers of a group are 127 or all are -127
            factor.zero_()
            factor[:, ::128] = torch.tensor([[1.0], [-1.0]]).to(dtype)
        linear = kernels.linear(weight)
        for rows in ROWS:
            yield f"{out_features} x {in_features}, {rows} rows", linear(x[:rows], residual[:rows])


def main() -> None:
    """Compare."""
    from batchgen.kernels.cpu.backend import CpuKernels

    torch.set_num_threads(1)
    build.address = compiler.compile_plainly
    for dtype in (torch.float32, torch.bfloat16):
        fast = CpuKernels(dtype, weights="int8", activations="int8")
        slow = ReferenceKernels(dtype=dtype, weights="int8", activations="int8")
        for (name, found), (_, expected) in zip(products(fast, dtype), products(slow, dtype), strict=True):
            assert torch.equal(found, expected), f"{name} in {dtype}"


if __name__ == "__main__":
    if sys.argv[1:] == ["avxvnni"]:
        setattr(int8, "cpu_features", lambda: frozenset({"avx2", "avxvnni"}))  # noqa: B010 - mypy knows it as cached
    main()
