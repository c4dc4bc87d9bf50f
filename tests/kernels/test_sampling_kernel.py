"""Draws: which tokens stay allowed, with which probability, and that nothing but the row's own numbers decides.

A draw inverts the cumulative distribution over token ids, so the middle of a token's share of [0, 1) must draw that
token: one uniform per allowed token checks a whole distribution, without statistics.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY_BACK_END, EVERY_NAME, JUST_BELOW_ONE, draw, filtered, is_settled, logits_of, rows_of
from reference_kernels import ReferenceKernels
from tiny_model import BACK_ENDS
from torch import Tensor

from batchgen.kernels.interface import SamplingRows

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 2, 15, 16, 17, 100, 333]


def assert_draws_from(name: str, logits: Tensor, probabilities: Tensor, **params: float) -> None:
    """The draws follow ``probabilities`` [width]: every share of [0, 1) gives its token, and no other token comes."""
    cumulative = probabilities.double().cumsum(0)
    shares = [(0.0 if i == 0 else cumulative[i - 1].item(), cumulative[i].item()) for i in range(len(cumulative))]
    allowed = [i for i, (low, high) in enumerate(shares) if high - low > 1e-6]
    middles = [(shares[i][0] + shares[i][1]) / 2 for i in allowed]
    assert draw(name, logits, middles, **params) == allowed, (logits, params)
    possible = set(probabilities.nonzero().flatten().tolist())
    assert set(draw(name, logits, [0.0, JUST_BELOW_ONE, *shares_of(name)], **params)) <= possible, (logits, params)


def shares_of(name: str) -> list[float]:
    """Where in [0, 1) to draw: Triton's interpreter takes tens of milliseconds per row."""
    num_draws = 3 if name == "cuda" else 97
    return [i / num_draws for i in range(num_draws)]


@pytest.mark.parametrize("name", BACK_ENDS)
@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.013, 0.11, 0.4]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 69]),
    top_p=st.sampled_from([1.0, 0.31, 0.77, 0.97]),
)
def test_filters_compose_in_their_order(
    name: str, width: int, seed: int, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    logits = logits_of(width, seed)
    params = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    expected = filtered(logits, **params)  # type: ignore[arg-type]
    assert_draws_from(name, logits, expected, **params)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_draws_follow_the_filtered_probabilities(name: str) -> None:
    logits = logits_of(17, seed=3)
    for params in (
        {"temperature": 0.3, "top_k": 3},
        {"min_p": 0.05, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.7, "top_p": 0.8},
        {"top_p": 1e-9},
    ):
        full = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0, **params}
        assert_draws_from(name, logits, filtered(logits, **full), **params)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EVERY_NAME)
def test_what_equals_the_last_kept_token_is_kept(name: str) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0, -1.0])
    tied = torch.where(logits >= 1.0, logits, -torch.inf).double().softmax(-1)
    assert_draws_from(name, logits, tied, top_k=2)
    assert_draws_from(name, logits, tied, top_p=float(logits.double().softmax(-1)[1]) + 0.01)
    equal = torch.zeros(6)
    assert_draws_from(name, equal, torch.full((6,), 1 / 6), top_k=1)
    assert_draws_from(name, equal, torch.full((6,), 1 / 6), top_p=0.5)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_uniform_on_the_border_of_two_tokens_draws_the_second(name: str) -> None:
    assert draw(name, torch.zeros(4), [0.0, 0.25, 0.5, 0.75]) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", EVERY_NAME)
def test_extreme_temperatures(name: str) -> None:
    logits = torch.tensor([1.0, 3.0, 2.999, -500.0, 0.0])
    for cold in (1e-4, 1e-10, 1e-37):
        assert set(draw(name, logits, shares_of(name), temperature=cold)) == {1}
    for hot in (1e9, 3e38):
        assert_draws_from(name, logits, torch.full((5,), 0.2), temperature=hot)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_forbidden_token_is_never_drawn(name: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf], dtype=dtype)
    grid = [2.0**-53, JUST_BELOW_ONE, *shares_of(name)]
    for params in ({}, {"temperature": 1e6}, {"temperature": 0.01}, {"top_k": 4}, {"top_p": 0.9999999}):
        assert set(draw(name, logits, grid, **params)) <= {1, 3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_row_that_is_not_finite_draws_minus_one(name: str, dtype: torch.dtype) -> None:
    good = [0.5] * 20
    some = [*good[:7], torch.nan, *good[8:]]
    infinite = [*good[:7], torch.inf, *good[8:]]
    logits = torch.tensor([good, [torch.nan] * 20, some, infinite, [-torch.inf] * 20, good], dtype=dtype)
    drawn = EVERY_BACK_END[name]().sample(logits, rows_of([0.5] * 6)).tolist()
    assert drawn == [10, -1, -1, -1, -1, 10]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in EVERY_NAME if name != "reference"])
def test_sample_equals_the_reference_with_the_same_uniforms(name: str, dtype: torch.dtype) -> None:
    for n, width in [(12, 9000), *((200, width) for width in WIDTHS if name != "cuda")]:
        generator = torch.Generator().manual_seed(width)

        def pick(values: list[float], kind: torch.dtype, n: int = n, g: torch.Generator = generator) -> Tensor:
            return torch.tensor(values, dtype=kind)[torch.randint(len(values), (n,), generator=g)]

        logits = (3 * torch.randn(n, width, generator=generator)).to(dtype)
        rows = SamplingRows(
            temperature=pick([0.01, 0.3, 1.0, 2.0, 100.0], torch.float32),
            min_p=pick([0.0, 0.0, 0.05, 0.3], torch.float32),
            top_k=pick([0, 0, 1, 5, 40, 10_000], torch.int64),
            top_p=pick([1.0, 1.0, 0.2, 0.9, 0.99], torch.float64),
            uniform=torch.rand(n, generator=generator, dtype=torch.float64),
        )
        settled = is_settled(logits, rows)
        assert settled.float().mean() > 0.9
        fast, slow = EVERY_BACK_END[name]().sample(logits, rows), ReferenceKernels().sample(logits, rows)
        assert torch.equal(fast[settled], slow[settled]), width


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_is_that_of_torch_and_forbidden_tokens_add_nothing(dtype: torch.dtype, name: str) -> None:
    widths = [2, 100, 9001] if name == "cuda" else [1, 2, 15, 16, 17, 31, 33, 100, 1000, 9001]
    for width, scale in product(widths, (0.01, 1.0, 30.0, 1000.0)):
        logits = (scale * torch.randn(4, width, generator=torch.Generator().manual_seed(width))).to(dtype)
        logits[2:, 1::2] = -torch.inf
        got = EVERY_BACK_END[name]().logsumexp(logits)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_of_a_row_that_is_not_finite_is_not_finite_and_the_others_are(name: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(6, 20, dtype=dtype)
    logits[1, 3], logits[2, 19], logits[3], logits[4] = torch.nan, torch.inf, torch.nan, -torch.inf
    got = EVERY_BACK_END[name]().logsumexp(logits)
    assert got.isfinite().tolist() == [True, False, False, False, False, True]
