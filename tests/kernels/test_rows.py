"""Kernels that treat each row by itself: RMS norm, gates, argmax."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY_BACK_END, EVERY_NAME, rows_of
from reference_kernels import ReferenceKernels
from torch import Tensor

from batchgen.kernels.cpu.backend import CpuKernels

FAST, SLOW = CpuKernels(), ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 2, 8, 15, 16, 17, 24, 31, 33, 60, 64, 100, 1024]
ROWS = [1, 2, 7, 8, 9, 33]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_name = pytest.mark.parametrize("name", EVERY_NAME)
every_fast_name = pytest.mark.parametrize("name", [name for name in EVERY_NAME if name != "reference"])


every_gate = pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])


def sizes(name: str) -> list[tuple[int, int]]:
    """Widths and numbers of rows for one back end; few for Triton's interpreter."""
    return [(1, 3), (7, 3), (100, 3), (1030, 2)] if name == "cuda" else [*product(WIDTHS, ROWS)]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_close(fast: Tensor, slow: Tensor, least: float = 1e-12) -> None:
    """Equal to a few last places of the dtype (``exp`` has more of them far from 0, where its result is tiny)."""
    rtol = 2**-6 if fast.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(fast, slow, equal_nan=True, rtol=rtol, atol=least)


@every_dtype
@every_fast_name
def test_rms_norm_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    kernels = EVERY_BACK_END[name]()
    for (width, rows), scale in product(sizes(name), (1e-4, 1.0, 1e4)):
        weight = 1 + random(width, dtype=dtype, scale=0.2)
        x = random(rows, width, dtype=dtype, scale=scale)
        assert_close(kernels.rms_norm(x, weight, 1e-5), SLOW.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 131])
@pytest.mark.parametrize(("stored", "dtype"), [(kind, kind) for kind in DTYPES] + [(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("width", [2, 34, 64, 1024])
def test_a_tied_table_gives_its_rows(width: int, stored: torch.dtype, dtype: torch.dtype, vocab_size: int) -> None:
    table = random(vocab_size, width, dtype=stored)
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0])
    embedding, head = CpuKernels(dtype).tied_embedding(table.clone(), dtype)
    assert torch.equal(embedding(token_ids), table[token_ids].to(dtype))
    x = random(3, width, dtype=dtype)
    assert torch.equal(head(x), CpuKernels(dtype).linear(table)(x))


@every_dtype
@every_fast_name
def test_rms_norm_rounds_before_it_adds_the_residual(name: str, dtype: torch.dtype) -> None:
    kernels, most = EVERY_BACK_END[name](), 2**-6 if dtype == torch.bfloat16 else 2e-6
    for width, rows in sizes(name):
        weight = 1 + random(width, dtype=dtype, scale=0.2)
        x, residual = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=1)
        expected = kernels.rms_norm(x, weight, 1e-5) + residual
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5, residual), expected)
        assert_close(SLOW.rms_norm(x, weight, 1e-5, residual), expected, most)


@every_dtype
def test_numbers_are_scaled_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    for width, rows in product((1, 16, 33), (0, 1, 9)):
        x = random(rows, width, dtype=dtype)
        fast, slow = x.clone(), x.clone()
        FAST.scale(fast, 12 / 0.22)
        SLOW.scale(slow, 12 / 0.22)
        assert torch.equal(fast, (x.float() * torch.tensor(12 / 0.22)).to(dtype))
        assert torch.equal(slow, fast)


@every_dtype
@every_gate
@pytest.mark.parametrize("name", [name for name in EVERY_NAME if not isinstance(name, str)])
def test_swiglu_equals_the_reference(name: str, dtype: torch.dtype, is_gelu: bool) -> None:
    kernels = EVERY_BACK_END[name]()
    for (width, rows), scale in product(sizes(name), (0.01, 1.0, 20.0)):
        x = random(rows, 2 * width, dtype=dtype, scale=scale)
        assert_close(kernels.swiglu(x, is_gelu), SLOW.swiglu(x, is_gelu), 1e-5 if is_gelu else 2e-6)


def gated(gates: Tensor, ups: Tensor, is_gelu: bool) -> Tensor:
    """Gates [width] times ups [width], by a product with one input that is not zero."""
    gate, up = (torch.stack((part, torch.zeros_like(part)), 1) for part in (gates, ups))
    return FAST.gated_linear(gate, up, is_gelu)(torch.tensor([[1, 0]], dtype=gates.dtype))


@every_dtype
@every_gate
def test_a_gate_equals_the_reference(dtype: torch.dtype, is_gelu: bool) -> None:
    for width, scale in product(WIDTHS, (0.01, 1.0, 20.0)):
        gates, ups = random(2, width, dtype=dtype, scale=scale)
        least = 1e-5 if is_gelu else 1e-12  # 1 + tanh cancels in the reference
        assert_close(gated(gates, ups, is_gelu), SLOW.swiglu(torch.cat((gates, ups))[None], is_gelu), least)


@every_dtype
@every_gate
def test_a_gate_is_finite_at_the_ends_of_the_range(dtype: torch.dtype, is_gelu: bool) -> None:
    gates = torch.tensor([-1e10, -1e4, -90.0, -88.0, 0.0, 88.0, 90.0, 1e4], dtype=dtype)
    found = gated(gates, torch.ones_like(gates), is_gelu)
    torch.testing.assert_close(found, gates.clamp(min=0)[None], rtol=0, atol=1e-20)


DRAWS = {"temperature": 0.8, "min_p": 0.01, "top_k": 40, "top_p": 0.95}
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: FAST.rms_norm(x, random(x.shape[1], dtype=x.dtype), 1e-5),
    "logsumexp": FAST.logsumexp,
    "sample": lambda x: FAST.sample(x, rows_of([0.37] * len(x), **DRAWS)),
}


@every_dtype
@pytest.mark.parametrize("width", [16, 33, 100, 777])
@pytest.mark.parametrize("operation", BY_ROW)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    operation: str, width: int, dtype: torch.dtype
) -> None:
    x, compute = random(40, width, dtype=dtype, scale=3), BY_ROW[operation]
    torch.set_num_threads(1)
    together = compute(x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for first, end in ((0, 1), (0, 8), (3, 20), (39, 40), (1, 40)):
            assert torch.equal(compute(x[first:end].contiguous()), together[first:end])


@every_dtype
def test_a_row_of_nan_stays_alone(dtype: torch.dtype) -> None:
    weight, x = random(24, dtype=dtype), random(9, 24, dtype=dtype)
    clean, dirty = FAST.rms_norm(x, weight, 1e-5), x.clone()
    dirty[4] = torch.nan
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(FAST.rms_norm(dirty, weight, 1e-5)[others], clean[others])


def test_kernels_take_no_rows() -> None:
    none = torch.empty(0, 32)
    assert FAST.rms_norm(none, torch.ones(32), 1e-5).shape == (0, 32)
    assert FAST.argmax(none).shape == (0,)


@every_dtype
@every_name
def test_argmax_takes_the_first_of_equals(name: str, dtype: torch.dtype) -> None:
    kernels = EVERY_BACK_END[name]()
    for width in (1, 2, 15, 16, 17, 40, 333, 9001):
        x = random(9 if name == "cuda" else 50, width, dtype=dtype).round()  # few values: many ties
        assert kernels.argmax(x).tolist() == [row.index(max(row)) for row in x.tolist()]


@every_dtype
@every_name
def test_argmax_of_a_row_with_a_nan_is_minus_one(name: str, dtype: torch.dtype) -> None:
    kernels = EVERY_BACK_END[name]()
    for width in (1, 16, 33):
        x = random(width + 4, width, dtype=dtype)
        x[range(width), range(width)] = torch.nan
        x[width] = torch.nan
        x[width + 1] = -torch.inf
        x[width + 1, width - 1] = torch.nan
        for best in (kernels.argmax(x), kernels.argmax_or_none(x)):
            assert best[: width + 2].tolist() == [-1] * (width + 2)
            assert min(best[width + 2 :]) >= 0


@every_dtype
@every_name
def test_argmax_of_infinities(dtype: torch.dtype, name: str) -> None:
    inf, largest = torch.inf, torch.finfo(dtype).max
    rows = [[-inf, -inf, -inf], [-inf, -3e38, -inf], [3e38, inf, inf], [0.0, -inf, -0.0], [largest, inf, 0.0]]
    assert EVERY_BACK_END[name]().argmax(torch.tensor(rows, dtype=dtype)).tolist() == [0, 1, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False), min_size=19, max_size=19),
        min_size=1,
        max_size=6,
    )
)
def test_argmax_equals_python_on_any_floats(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    assert FAST.argmax(x).tolist() == [row.index(max(row)) for row in rows]
    assert SLOW.argmax(x).tolist() == [row.index(max(row)) for row in rows]
