"""Masks: which logits of which rows become -inf, and that nothing else changes by a bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY_BACK_END, EVERY_NAME, rows_of
from torch import Tensor

from batchgen.kernels.cpu.backend import CpuKernels

DTYPES = [torch.float32, torch.bfloat16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
# Beside usual numbers what a kernel could damage: infinities, zeros, numbers too small for a normal exponent.
SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-39, -1e-39, 3e38, 1.0, -2.5]


def mixed(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers with all of ``SPECIAL`` strewn among them; NaN of either sign, quiet or signalling."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, width, generator=generator)
    chosen = torch.randint(4 * len(SPECIAL), logits.shape, generator=generator)
    for i, value in enumerate(SPECIAL):
        logits[chosen == i] = value
    logits = logits.to(dtype)
    signalling = torch.tensor([0xFF81 - (1 << 16), 0x7F81]) << (16 if dtype is torch.float32 else 0)
    for i, bits in enumerate(signalling.tolist()):
        logits.view(INTEGERS[dtype])[chosen == len(SPECIAL) + i] = bits
    return logits


def plainly(logits: Tensor, rows: list[int], allowed: list[list[bool]]) -> Tensor:
    """Bits of the logits after the mask, token by token; ``allowed`` may say more than there are tokens."""
    lowest = torch.tensor(-torch.inf, dtype=logits.dtype).view(INTEGERS[logits.dtype])
    wanted, is_nan = logits.view(INTEGERS[logits.dtype]).clone(), logits.isnan()
    for row, flags in zip(rows, allowed, strict=True):
        for token, is_allowed in enumerate(flags[: logits.shape[1]]):
            if not is_allowed and not is_nan[row, token]:
                wanted[row, token] = lowest
    return wanted


def packed(allowed: list[list[bool]]) -> Tensor:
    """Int32 words of flags, whose number per row is a multiple of 32."""
    words = [
        [sum(1 << bit for bit in range(32) if flags[at + bit]) for at in range(0, len(flags), 32)] for flags in allowed
    ]
    return torch.tensor(words, dtype=torch.int64).view(torch.int32)[:, ::2].contiguous()


WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([16, 32, 48, 64, 128, 200]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY_NAME)
@settings(max_examples=40, deadline=None)
@given(
    width=WIDTHS,
    rows=st.permutations(range(5)).flatmap(lambda order: st.integers(1, 5).map(lambda count: order[:count])),
    more_words=st.integers(0, 2),
    density=st.sampled_from([0.0, 0.03, 0.5, 0.97, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_a_mask_forbids_what_its_bits_say_and_leaves_the_rest(
    name: str, dtype: torch.dtype, width: int, rows: list[int], more_words: int, density: float, seed: int
) -> None:
    logits = mixed(5, width, dtype, seed)
    num_flags = 32 * (-(-width // 32) + more_words)
    generator = torch.Generator().manual_seed(seed)
    allowed = (torch.rand(len(rows), num_flags, generator=generator) < density).tolist()
    expected = plainly(logits, rows, allowed)
    EVERY_BACK_END[name]().mask(logits, torch.tensor(rows), packed(allowed))
    assert torch.equal(logits.view(INTEGERS[dtype]), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_row_wider_than_one_program_keeps_every_hundredth_token(name: str, dtype: torch.dtype) -> None:
    width = 9001
    logits = mixed(3, width, dtype, seed=1)
    allowed = [[(token + row) % 100 == 0 for token in range(9024)] for row in range(2)]
    expected = plainly(logits, [2, 0], allowed)
    EVERY_BACK_END[name]().mask(logits, torch.tensor([2, 0]), packed(allowed))
    assert torch.equal(logits.view(INTEGERS[dtype]), expected)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_masked_row_gives_its_best_allowed_token_and_one_of_nan_none(name: str) -> None:
    kernels = EVERY_BACK_END[name]()
    logits = torch.tensor([[5.0, 1.0, 3.0, 4.0]] * 3)
    logits[1] = torch.nan
    kernels.mask(logits, torch.tensor([0, 1]), packed([[False, True, True, False] + [True] * 28, [False] * 32]))
    assert kernels.argmax(logits).tolist() == [2, -1, 0]
    assert kernels.sample(logits, rows_of([0.999] * 3)).tolist() == [2, -1, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_mask_rows_that_touch_each_other(dtype: torch.dtype) -> None:
    logits = mixed(64, 77, dtype, seed=2)
    allowed = (torch.rand(64, 96, generator=torch.Generator().manual_seed(0)) < 0.5).tolist()
    expected = plainly(logits, list(range(64)), allowed)
    torch.set_num_threads(2)
    CpuKernels().mask(logits, torch.arange(64), packed(allowed))
    assert torch.equal(logits.view(INTEGERS[dtype]), expected)
