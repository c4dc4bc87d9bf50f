"""Integers for weights and inputs: how far they are from the numbers, and what a product of integers is to the bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_kernels import ReferenceKernels
from tiny_model import CPU, DTYPES
from torch import Tensor

from batchgen.kernels.cpu.layout import DOT_GROUP, GROUP, MIN_QUANTIZED
from batchgen.kernels.interface import Kernels
from batchgen.kernels.quantize import (
    MAX,
    Int8Weight,
    hadamard,
    quantize_rotated,
    quantize_rows,
    quantize_weight,
    rotate,
)
from batchgen.kernels.select import select
from batchgen.kernels.torch_kernels import Int8Linear

F16_STEP, LEAST_F16 = 2.0**-10, 2.0**-24  # between neighbouring float16 numbers: relative at most, or the least


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest_of_groups(weight: Tensor, group: int) -> Tensor:
    """Each value's group's largest absolute value, in the weight's shape."""
    parts = [part.abs().amax(1, keepdim=True).expand(part.shape) for part in weight.float().split(group, 1)]
    return torch.cat(parts, 1)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 300)),
    group=st.sampled_from([GROUP, DOT_GROUP]),
    exponent=st.integers(-60, 10),
    spread=st.integers(0, 10),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_a_weight_is_off_by_at_most_half_a_scale(
    shape: tuple[int, int], group: int, exponent: int, spread: int, dtype: str, seed: int
) -> None:
    """Up to numbers of a million; the scale is the largest over 127, rounded up to float16."""
    sizes = 2.0 ** (exponent + spread * randn(*shape, seed=seed + 1).clamp(-1, 1))
    weight = (randn(*shape, seed=seed) * sizes).to(DTYPES[dtype])
    found = quantize_weight(weight, group)
    assert found.values.dtype == torch.int8
    assert found.values.abs().max() <= MAX
    assert found.scales.dtype == torch.float16
    assert found.scales.shape == (shape[0], -(-shape[1] // group))
    least = largest_of_groups(weight, group).double() * (1 + 1e-6) / MAX
    most = torch.maximum(least * (1 + F16_STEP), least + LEAST_F16)
    scales = found.scales.double().repeat_interleave(group, 1)[:, : shape[1]]
    assert (scales <= most).all()
    assert ((found.dequantize(torch.float32).double() - weight.double()).abs() <= scales * 0.5000001).all()


@pytest.mark.parametrize("size", [8e6, 1.0, 2.0**-14])
def test_the_largest_numbers_of_either_sign_stay_within_127(size: float) -> None:
    weight = torch.tensor([[size, -size, 0.0, size / 3]])
    found = quantize_weight(weight)
    assert found.values[0, 0] == -found.values[0, 1]
    assert 0 < found.values[0, 0] <= MAX
    assert torch.allclose(found.dequantize(torch.float32), weight, rtol=0, atol=size / 100)


def test_a_group_of_zeros_stays_zeros() -> None:
    weight = torch.zeros(2, 70)
    weight[0, 40] = 1.0
    found = quantize_weight(weight)
    assert found.scales.count_nonzero() == 1
    assert found.dequantize(torch.float32).count_nonzero() == 1


@given(exponent=st.integers(-24, 9), seed=st.integers(0, 99))
def test_integers_times_scales_give_the_same_integers_and_scales(exponent: int, seed: int) -> None:
    """Those of a format whose largest integer is 127 too, such as Q8_0."""
    scales = (1 + torch.rand(3, 2, generator=torch.Generator().manual_seed(seed))) * 2.0**exponent
    values = (127 * randn(3, 2, GROUP, seed=seed) / randn(3, 2, GROUP, seed=seed).abs().amax(2, keepdim=True)).round()
    found = quantize_weight((values * scales.half().float()[:, :, None]).flatten(1))
    assert torch.equal(found.values, values.flatten(1).to(torch.int8))
    assert torch.equal(found.scales, scales.half())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 9e6])
def test_a_number_that_is_not_finite_or_too_large_shows_in_the_whole_group_and_in_no_other(value: float) -> None:
    weight = randn(2, 64)
    weight[0, 40] = value
    found = quantize_weight(weight).dequantize(torch.bfloat16)
    assert not found[0, 32:].isfinite().any()
    assert found[0, :32].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 16, 64, 128])
def test_a_rotation_multiplies_by_sylvesters_matrix(length: int) -> None:
    """Entry (i, j) is -1 where i and j share an odd number of bits; sums of small integers are exact."""
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(length)] for i in range(length)])
    x = torch.randint(-99, 99, (5, length), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(hadamard(x), x @ matrix)
    assert torch.equal(hadamard(hadamard(x)), length * x)


@given(inputs=st.integers(1, 400), seed=st.integers(0, 99))
def test_a_product_of_rotated_factors_is_that_of_the_factors(inputs: int, seed: int) -> None:
    """Of every group by itself, in exact integers, but for the length to which the group was filled."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-99, 99, (count, inputs), generator=generator).float() for count in (3, 4))
    groups = zip(rotate(a).unbind(1), rotate(b).unbind(1), a.split(DOT_GROUP, 1), b.split(DOT_GROUP, 1), strict=True)
    for rotated_a, rotated_b, part_a, part_b in groups:
        count = part_a.shape[1]
        length = next(length for length in (16, 32, 64, 128) if length >= count)
        assert torch.equal(rotated_a @ rotated_b.T, length * (part_a @ part_b.T))
        assert not rotated_a[:, length:].any()


def test_a_channel_that_outgrows_the_others_does_not_take_the_bits_of_its_group() -> None:
    """As behind norms: of inputs that are not rotated, 8 bits lose more than twice as much."""
    x, weight = randn(50, 1024), randn(64, 1024, seed=1)
    x[:, 5::128] *= 80
    exact = x @ weight.T
    loss = (Int8Linear(quantize_rotated(weight), None)(x) - exact).norm() / exact.norm()
    assert loss < 0.012


def rotated_by_numpy(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """A group's Hadamard transform, halves first, each addition one rounding."""
    length = 16
    while length < len(numbers):
        length *= 2
    return _transformed(np.pad(numbers, (0, length - len(numbers))))


def _transformed(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    if len(numbers) == 1:
        return numbers
    a, b = np.split(numbers, 2)
    return np.concatenate([_transformed(a + b), _transformed(a - b)])


def product_by_numpy(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, residual: Tensor | None
) -> NDArray[np.float32]:
    """The product with integer activations, element by element, each operation one rounding to float32."""
    rows, values, scales = x.float().numpy(), weight.values.numpy().astype(np.int64), weight.scales.float().numpy()
    out = np.zeros((len(rows), len(values)), np.float32)
    for row, output in product(range(len(rows)), range(len(values))):
        total = np.float32(0)
        for number, start in enumerate(range(0, rows.shape[1], 128)):
            part = rotated_by_numpy(rows[row, start : start + 128])
            largest = np.abs(part).max()
            integers = np.zeros(len(part), np.int64)
            if largest >= MIN_QUANTIZED:
                integers = np.rint(part * (np.float32(127) / largest)).clip(-127, 127).astype(np.int64)
            integer_sum = int((integers * values[output, start : start + len(part)]).sum())
            scale = largest / np.float32(127 * len(part) / 8)
            total = total + scales[output, number] * scale * np.float32(integer_sum)
        for term in (None if bias is None else bias[output], None if residual is None else residual[row, output]):
            total = total if term is None else total + np.float32(float(term))
        out[row, output] = total
    return out


@pytest.mark.parametrize("inputs", [1, 40, 128, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_integers_is_what_its_definition_says(dtype: str, inputs: int) -> None:
    kind = DTYPES[dtype]
    x = (randn(5, inputs) * 10 ** randn(5, inputs, seed=1)).to(kind)
    x[1] = 0
    x[2] *= 1e-38  # below what counts
    weight, bias, residual = quantize_rotated(randn(7, inputs, seed=2)), randn(7), randn(5, 7, seed=3)
    for terms in ((None, None), (bias.to(kind), None), (None, residual.to(kind)), (bias.to(kind), residual.to(kind))):
        found = Int8Linear(weight, terms[0])(x, terms[1])
        assert found.dtype == kind
        assert torch.equal(found, torch.from_numpy(product_by_numpy(x, weight, *terms)).to(kind))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_inputs_that_are_not_finite_are_told_by_their_own_row_alone(value: float) -> None:
    x = randn(3, 200)
    x[1, 150] = value
    found = Int8Linear(quantize_rotated(randn(4, 200, seed=1)), None)(x)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_rotated_inputs_are_off_by_at_most_half_a_scale() -> None:
    x = randn(6, 300)
    values, scales = quantize_rows(x)
    lengths = torch.tensor([128.0, 128.0, 64.0])[:, None]
    wanted = 8 * rotate(x) / lengths
    assert ((values * scales[:, :, None] - wanted).abs() <= scales[:, :, None] * 0.500001).all()


def back_ends(dtype: torch.dtype, **settings: str) -> list[Kernels]:
    return [ReferenceKernels(**settings), select(CPU, dtype, **settings)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_back_end_multiplies_with_the_numbers_that_the_integers_stand_for(dtype: str) -> None:
    kind = DTYPES[dtype]
    weight, x = randn(48, 200).to(kind), randn(5, 200, seed=1).to(kind)
    numbers = quantize_weight(weight).dequantize(kind)
    for plain, kernels in zip(back_ends(kind), back_ends(kind, weights="int8"), strict=True):
        assert torch.equal(kernels.linear(weight)(x), plain.linear(numbers)(x)), kernels.name
        gated = kernels.gated_linear(weight[:24], weight[24:])
        assert torch.equal(gated(x), plain.gated_linear(numbers[:24], numbers[24:])(x)), kernels.name
        assert not torch.equal(kernels.linear(weight)(x), plain.linear(weight)(x))


@pytest.mark.parametrize("inputs", [192, 200])  # whole groups, and not
def test_integers_of_weights_in_bfloat16_stand_for_numbers_in_float32(inputs: int) -> None:
    """A float32 model holds such weights as they are stored; their integers times scales are not rounded to that."""
    weight, x = randn(48, inputs).bfloat16(), randn(5, inputs, seed=1)
    numbers = quantize_weight(weight).dequantize(torch.float32)
    kernels = select(CPU, torch.float32, weights="int8")
    assert torch.equal(kernels.linear(weight)(x), select(CPU, torch.float32).linear(numbers)(x))
    expected = select(CPU, torch.float32).gated_linear(numbers[:24], numbers[24:])(x)
    assert torch.equal(kernels.gated_linear(weight[:24], weight[24:])(x), expected)


# The last group of 160 inputs is rotated as one of 32, of 200 as one of 128.
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 160), (70, 200), (70, 576), (6, 40), (128, 256), (5, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_back_end_computes_products_of_integers_to_the_bit(dtype: str, outputs: int, inputs: int) -> None:
    kind = DTYPES[dtype]
    weight, x = randn(outputs, inputs), randn(19, inputs, seed=1) * 10 ** randn(19, inputs, seed=3)
    for factor in (weight[:2], x[2:4]):  # rotated, all integers of a group are 127 or all are -127
        factor.zero_()
        factor[:, ::DOT_GROUP] = torch.tensor([[1.0], [-1.0]])
    x[1] = 0
    weight, x, residual = weight.to(kind), x.to(kind), randn(19, outputs, seed=2).to(kind)
    expected = Int8Linear(quantize_rotated(weight), None)(x, residual)
    for kernels in back_ends(kind, weights="int8", activations="int8"):
        linear = kernels.linear(weight)
        for rows in range(1, 20):
            assert torch.equal(linear(x[:rows], residual[:rows]), expected[:rows]), (kernels.name, rows)
