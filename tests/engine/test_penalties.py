"""Penalties, number for number: as vLLM defines them; transformers' are in ``test_sampling_pipeline``."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import token_counts
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.overlap import DeviceTokenCounts
from batchgen.engine.sampler import penalize
from batchgen.engine.sequence import RequestState

TOKENS = st.lists(st.integers(0, 30), max_size=40)


def logits_of(rows: int, width: int, seed: int) -> Tensor:
    logits = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    logits[:, :: max(width // 4, 1)] = 0.0  # neither side of the repetition penalty
    logits[:, 1] = -torch.inf  # a token that is forbidden, and stays so
    return logits


def penalized(logits: Tensor, cases: list[tuple[list[int], list[int], SamplingParams]]) -> Tensor:
    """Every row with its own prompt, output and parameters, all in one call."""
    out = logits.clone()
    counts = [token_counts(prompt, output) for prompt, output, _ in cases]
    penalize(out, range(len(cases)), counts, [params for _, _, params in cases])
    return out


def defined(row: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """vLLM's definition, token by token, in float32."""
    one = np.float32
    values = [one(v) for v in row.tolist()]
    for token in {*prompt, *output}:
        by = one(params.repetition_penalty)
        values[token] = values[token] / by if values[token] > 0 else values[token] * by
    for token, times in Counter(output).items():
        values[token] -= one(params.frequency_penalty) * one(times)
        values[token] -= one(params.presence_penalty)
    return torch.tensor(np.array(values))


CASES = st.lists(
    st.tuples(
        TOKENS,
        TOKENS,
        st.builds(
            SamplingParams,
            repetition_penalty=st.sampled_from([1.0, 0.5, 1.05, 1.3, 2.0]),
            presence_penalty=st.sampled_from([0.0, 1.5, -2.0, 0.1]),
            frequency_penalty=st.sampled_from([0.0, 0.3, -1.1, 2.0]),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(cases=CASES, seed=st.integers(0, 1000))
def test_every_row_is_what_vllm_defines(cases: list[tuple[list[int], list[int], SamplingParams]], seed: int) -> None:
    logits = logits_of(len(cases), 31, seed)
    got = penalized(logits, cases)
    for row, case, before in zip(got, cases, logits, strict=True):
        assert torch.equal(row, defined(before, *case))


@settings(max_examples=30, deadline=None)
@given(cases=CASES, seed=st.integers(0, 1000), data=st.data())
def test_counts_on_the_device_give_the_same_bits_from_step_to_step(
    cases: list[tuple[list[int], list[int], SamplingParams]], seed: int, data: st.DataObject
) -> None:
    """Also after a step that leaves a sequence out, in another slot, and with a token that nothing sampled."""
    seen, width, free = DeviceTokenCounts(8), 31, set(range(8))
    sequences = [
        RequestState(Request(key, tuple(prompt or [3]), params, tuple(output))).sequences[0]
        for key, (prompt, output, params) in enumerate(cases)
    ]
    for sequence in sequences:
        sequence.conv_slot = free.pop()
    for step in range(5):
        chosen = [s for s in sequences if data.draw(st.booleans())] or sequences
        for sequence in chosen:
            if data.draw(st.integers(0, 4)) == 0 and sequence.conv_slot is not None:
                free.add(sequence.conv_slot)
                sequence.conv_slot = data.draw(st.sampled_from(sorted(free)))
                free.remove(sequence.conv_slot)
        logits = logits_of(len(chosen) + 1, width, seed + step)
        expected, rows = logits.clone(), range(1, len(chosen) + 1)
        counts = [token_counts(s.request.prompt_token_ids, s.token_ids[s.num_prompt_tokens :]) for s in chosen]
        penalize(expected, rows, counts, [s.request.params for s in chosen])
        slots = seen.penalize(logits, rows, chosen)
        assert torch.equal(logits, expected)
        sampled = [data.draw(st.integers(0, width - 1)) for _ in chosen]
        seen.add(slots, torch.tensor(sampled))
        for sequence, token_id in zip(chosen, sampled, strict=True):
            sequence.token_ids += [token_id] + [5] * (data.draw(st.integers(0, 9)) == 0)
