"""The sampler: randomness keyed by (seed, request, position) alone, and who is forbidden to end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import BACK_ENDS
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.observers import rules_for
from batchgen.engine.sampler import Sampler, build_mask, uniforms
from batchgen.engine.sequence import RequestState, Sequence

EOS = frozenset({7})
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def sequence(key: int = 0, output: int = 0, params: SamplingParams = SAMPLED) -> Sequence:
    return RequestState(Request(key, (1, 2, 3), params, (9,) * output)).sequences[0]


def logits_of(rows: int, width: int = 50, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_a_row_with_a_constraint_and_allowed_tokens_may_take_what_both_allow() -> None:
    made, free = sequence(params=replace(SAMPLED, allowed_token_ids=(1, 2))), sequence(1)
    guided: Any = SimpleNamespace(is_active=True)
    made.generation.constraint = guided
    made.generation.rules = rules_for(made.request.params, (), vocab_size=40)

    def fill(_: object, bits: np.ndarray) -> None:
        bits[:] = [[0b1100, 0]]  # tokens 2 and 3

    constraints: Any = SimpleNamespace(fill=fill)
    mask = build_mask(constraints, [free, made], 40, torch.device("cpu"))
    assert mask is not None
    assert (mask.rows.tolist(), mask.bits.tolist()) == ([1], [[0b100, 0]])


def test_uniforms_never_change() -> None:
    """A run resumed by a newer version must draw the same tokens: these values are part of the contract."""
    golden = {
        (0, 0, 0, 0): 0.1296456182997474,
        (0, 0, 0, 1): 0.16526896395580137,
        (0, 0, 1, 0): 0.8513026201288322,
        (0, 1, 0, 0): 0.8193382636014529,
        (1, 0, 0, 0): 0.8847898165349132,
        (-1, 2**40, 3, 7): 0.9661681116661577,
    }
    assert dict(zip(golden, uniforms(*np.array([*golden]).T).tolist(), strict=True)) == golden


def defined(*arguments: int) -> float:
    """The definition: splitmix64's finalizer over each argument in turn, in integers of any size."""
    x, mask = 0, 2**64 - 1
    for argument in arguments:
        x = ((x ^ argument & mask) + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return (x >> 11) / 2**53


ARGUMENTS = st.tuples(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 127), st.integers(0, 2**31)
)


@given(st.lists(ARGUMENTS, min_size=1, max_size=50))
def test_uniforms_are_as_defined_whatever_other_rows_there_are(rows: list[tuple[int, int, int, int]]) -> None:
    drawn = uniforms(*zip(*rows, strict=True)).tolist()
    assert drawn == [defined(*row) for row in rows]
    assert all(0.0 <= u < 1.0 for u in drawn)


@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_draw_is_keyed_by_seed_request_and_output_position(name: str) -> None:
    logits = logits_of(1, width=300).expand(90, -1).contiguous()
    sequences = [
        sequence(key, output=n, params=replace(SAMPLED, seed=seed))
        for seed, key, n in itertools.product((0, 1, -4), range(3), range(10))
    ]
    drawn = [defined(s.request.params.seed, s.request.key, 0, s.num_output_tokens) for s in sequences]
    cumulative = logits[0].double().softmax(0).cumsum(0)
    expected = torch.searchsorted(cumulative, torch.tensor(drawn, dtype=torch.float64), right=True).tolist()
    assert Sampler(BACK_ENDS[name](), EOS).sample(logits, sequences).tolist() == expected
    assert len(set(expected)) > 20


@pytest.mark.parametrize("name", BACK_ENDS)
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"ignore_eos": True}], ids=str)
def test_no_end_token_comes_before_min_tokens_though_it_is_ignored(name: str, more: dict[str, Any]) -> None:
    """As in vLLM. A model's logits are made in inference mode, outside which they cannot be written."""
    params = SamplingParams(min_tokens=3, stop_token_ids=(8, 999, -11), **more)
    with torch.inference_mode():
        logits = torch.full((3, 20), -4.0)
        logits[:, 7], logits[:, 8], logits[:, 9] = 100.0, 90.0, 50.0
    sequences = [sequence(0, n, params) for n in (0, 2, 3)]
    assert Sampler(BACK_ENDS[name](), EOS).sample(logits, sequences).tolist() == [9, 9, 7]


@pytest.mark.parametrize("name", BACK_ENDS)
@settings(max_examples=30, deadline=None)
@given(temperature=st.floats(min_value=0.0, exclude_min=True, allow_infinity=False), seed=st.integers(0, 100))
def test_any_positive_temperature_draws_a_token(name: str, temperature: float, seed: int) -> None:
    logits = logits_of(1, seed=seed)
    params = replace(SAMPLED, temperature=temperature, min_tokens=1, stop_token_ids=(3,))
    (token,) = Sampler(BACK_ENDS[name](), EOS).sample(logits.clone(), [sequence(params=params)]).tolist()
    assert 0 <= token < 50
    assert token not in (3, 7)
    if temperature < 1e-6:
        logits[0, [3, 7]] = -torch.inf
        assert token == int(logits.argmax())
