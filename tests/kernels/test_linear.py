"""Linears: right, and a row's bits never depend on how many rows share the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_cases import normal
from reference_kernels import ReferenceKernels
from repeats import nightly, slow
from torch import Tensor

from batchgen.kernels.cpu.linear import PackedGatedLinear, PackedLinear
from batchgen.kernels.interface import Linear

LINEARS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "panels": PackedLinear,
    "int8": partial(PackedLinear, weights="int8"),
    "integers": partial(PackedLinear, weights="int8", activations="int8"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FEW_ROWS = [*range(1, 71), 97, 127, 128, 129, 255, 256, 257, 300]
SHAPES = [(40, 24), (193, 100), (8, 33), (192, 640), (513, 66)]  # (out_features, in_features)
MODEL_SHAPES = [(3072, 1024), (2048, 1024), (1024, 4608), (9216, 1024), (4096, 2048)]


def make(kind: str, weight: Tensor, bias: Tensor | None) -> Linear:
    if kind in ("panels", "int8") and weight.shape[1] % 2:
        pytest.skip(f"{weight.shape[1]} inputs make no pairs")
    return LINEARS[kind](weight, bias)


def rows_that_differ(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], counts: dict[int, list[int]]
) -> list[tuple[int, int]]:
    """(threads, rows) at which some row is not bit-equal to the same row of the largest product on one thread.

    ``counts`` are the numbers of rows to try, by number of threads.
    """
    bias = normal(shape[0], seed=1, dtype=dtype) if shape[0] % 2 else None
    linear = make(kind, normal(*shape, seed=0, dtype=dtype), bias)
    x, residual = (normal(max(counts[1]), width, seed=width, dtype=dtype) for width in shape[::-1])
    torch.set_num_threads(1)
    whole, added = linear(x), linear(x, residual)
    bad = []
    for threads, tried in counts.items():
        torch.set_num_threads(threads)
        for count in tried:
            same = torch.equal(linear(x[:count]), whole[:count])
            if not (same and torch.equal(linear(x[:count], residual[:count]), added[:count])):
                bad.append((threads, count))
    return bad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_has_the_same_bits_in_any_product(kind: str, dtype: str, shape: tuple[int, int]) -> None:
    assert rows_that_differ(kind, DTYPES[dtype], shape, {1: FEW_ROWS, 2: FEW_ROWS[::5]}) == []


@pytest.mark.parametrize("shape", [*map(slow, MODEL_SHAPES[:3]), *map(nightly, MODEL_SHAPES[3:])], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_has_the_same_bits_in_products_of_published_shapes(kind: str, dtype: str, shape: tuple[int, int]) -> None:
    counts = [*FEW_ROWS, 511, 512, 513]
    assert rows_that_differ(kind, DTYPES[dtype], shape, {1: counts, 2: counts}) == []


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("inputs", [576, 8192])
def test_float32_is_as_exact_for_many_inputs_as_for_few(inputs: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight, x = (torch.rand(count, inputs, generator=generator) for count in (96, rows))  # all positive: errors add up
    exact = x.double() @ weight.double().T
    assert ((PackedLinear(weight, None)(x).double() - exact).abs() / exact).max() < 7e-7


@pytest.mark.parametrize("place", [0, 1, 7, 30, 39])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_has_the_same_bits_wherever_it_stands(kind: str, dtype: str, place: int) -> None:
    weight, row, others = (normal(n, 64, seed=place + n, dtype=DTYPES[dtype]) for n in (96, 1, 40))
    linear, others = make(kind, weight, None), 1e3 * others
    others[place] = row
    assert torch.equal(linear(others)[place], linear(row)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_of_nan_stays_alone(kind: str, dtype: str) -> None:
    weight, x = (normal(n, 64, seed=n, dtype=DTYPES[dtype]) for n in (96, 5))
    linear = make(kind, weight, None)
    clean = linear(x)
    x[2] = torch.nan
    dirty = linear(x)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINEARS)
def test_linear_equals_the_reference(kind: str, dtype: str, rows: int) -> None:
    shapes = (50, 36), (50,), (rows, 36), (rows, 50)
    weight, bias, x, residual = (normal(*shape, seed=i, dtype=DTYPES[dtype]) for i, shape in enumerate(shapes))
    tolerance = {"rtol": 2**-6, "atol": 2**-5} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    for b in (None, bias):
        activations = "int8" if kind == "integers" else "auto"
        settings = {"weights": "int8" if kind in ("int8", "integers") else "auto", "activations": activations}
        fast, slow = make(kind, weight, b), ReferenceKernels(**settings).linear(weight, b)
        torch.testing.assert_close(fast(x), slow(x), **tolerance)
        torch.testing.assert_close(fast(x, residual), slow(x, residual), **tolerance)


@pytest.mark.parametrize("shape", [(192, 640), (513, 66)], ids=str)
def test_float32_from_bfloat16_has_the_bits_of_float32(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(n, generator=generator).bfloat16() for n in (shape, shape[:1]))
    x, residual = (torch.randn(133, n, generator=generator) for n in (shape[1], shape[0]))
    stored = PackedLinear(weight, bias, dtype=torch.float32)
    widened = PackedLinear(weight.float(), bias.float())
    for rows in (1, 2, 3, 7, 133):
        assert torch.equal(stored(x[:rows]), widened(x[:rows]))
        assert torch.equal(stored(x[:rows], residual[:rows]), widened(x[:rows], residual[:rows]))


@pytest.mark.parametrize("width", [8, 32, 40, 100, 160])
@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
def test_a_gated_linear_equals_the_reference_in_any_product(width: int, is_gelu: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    gate, up, x = (torch.randn(n, 70, generator=generator).to(torch.bfloat16) for n in (width, width, 133))
    weights = gate / 8, up / 8
    fast, slow = PackedGatedLinear(*weights, is_gelu=is_gelu), ReferenceKernels().gated_linear(*weights, is_gelu)
    whole = fast(x)
    torch.testing.assert_close(whole, slow(x), rtol=2**-6, atol=2**-5)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (0, 1, 2, 5, 6, 7, 13, 24, 25, 60, 132):
            assert torch.equal(fast(x[:rows]), whole[:rows])
            assert torch.equal(fast(x[rows:]), whole[rows:])


@pytest.mark.parametrize(
    ("x", "residual"),
    [((2, 32), None), ((2, 128), None), ((2, 3, 64), None), ((2, 64), (64,)), ((2, 64), (3, 64))],
    ids=str,
)
def test_panels_refuse_what_they_would_read_out_of_bounds(x: tuple[int, ...], residual: tuple[int, ...] | None) -> None:
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    linear = make("panels", weight, None)
    with pytest.raises((AssertionError, ValueError)):
        linear(torch.ones(x).to(weight), None if residual is None else torch.ones(residual).to(weight))
    with pytest.raises(AssertionError, match="bits"):
        linear(torch.ones(2, 64, dtype=torch.float16))


def test_float32_weights_refuse_inputs_of_bfloat16() -> None:
    linear = PackedLinear(normal(64, 32, seed=1), None)
    with pytest.raises(AssertionError, match="no kernel multiplies"):
        linear(normal(3, 32, seed=2, dtype=torch.bfloat16))


def test_a_bias_may_lie_apart_and_be_of_another_type() -> None:
    bias = torch.arange(128.0).view(64, 2)[:, 0]
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert torch.equal(make("panels", x.new_zeros(64, 64), bias)(x), bias.to(x).expand(3, 64))
