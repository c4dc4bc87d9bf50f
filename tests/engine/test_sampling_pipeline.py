"""The whole way from logits to a token, against transformers' processors and warpers in vLLM's order.

As with the kernels, the middle of a token's share of [0, 1) must draw that token, so a distribution is checked without
statistics; that keyed draws follow it is then checked with them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import BACK_ENDS, token_counts
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import sampler as sampler_module
from batchgen.engine.observers import rules_for
from batchgen.engine.sampler import Sampler, build_mask
from batchgen.engine.sequence import RequestState, Sequence

EOS, WIDTH = 7, 40
every_back_end = pytest.mark.parametrize("name", BACK_ENDS)


def sampler_of(name: str) -> Sampler:
    return Sampler(BACK_ENDS[name](), frozenset({EOS}))


def sequence(
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    params: SamplingParams,
    sample: int = 0,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sequence:
    made = RequestState(Request(3, prompt, replace(params, n=sample + 1), output)).sequences[sample]
    made.generation.counts = token_counts(prompt, output) if params.has_penalties else None
    made.generation.rules = rules_for(params, bad_words, WIDTH)
    return made


def sampled(name: str, logits: Tensor, sequences: list[Sequence]) -> list[int]:
    mask = build_mask(None, sequences, logits.shape[1], logits.device)
    return sampler_of(name).sample(logits, sequences, mask).tolist()


def logits_of(seed: int, rows: int = 1, width: int = WIDTH) -> Tensor:
    return 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def warped(
    logits: Tensor,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    p: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Tensor:
    """Probabilities [width] after transformers' own steps, where it has them of this kind."""
    from transformers.generation import logits_process as hf

    ids, scores = torch.tensor([[*prompt, *output]]), logits.clone()
    if p.allowed_token_ids:
        scores[0, [token for token in range(WIDTH) if token not in p.allowed_token_ids]] = -torch.inf
    for *start, last in bad_words:
        if len(start) <= len(output) and list(output[len(output) - len(start) :]) == start:
            scores[0, last] = -torch.inf
    if p.min_tokens:
        ends = torch.tensor([EOS, *p.stop_token_ids])
        scores = hf.MinNewTokensLengthLogitsProcessor(len(prompt), p.min_tokens, ends)(ids, scores)  # type: ignore[arg-type]
    for token, bias in p.logit_bias:
        scores[0, token] += bias
    if p.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores)
    for token, times in Counter(output).items():
        scores[0, token] -= p.frequency_penalty * times + p.presence_penalty
    scores = hf.TemperatureLogitsWarper(p.temperature)(ids, scores)
    if p.min_p:
        scores = hf.MinPLogitsWarper(p.min_p)(ids, scores)
    if p.top_k:
        scores = hf.TopKLogitsWarper(p.top_k)(ids, scores)
    if p.top_p < 1:
        scores = hf.TopPLogitsWarper(p.top_p)(ids, scores)
    return scores[0].double().softmax(-1)


PARAMS = st.builds(
    SamplingParams,
    min_tokens=st.sampled_from([0, 2, 9]),
    stop_token_ids=st.sampled_from([(), (11, 12)]),
    repetition_penalty=st.sampled_from([1.0, 1.05, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    min_p=st.sampled_from([0.0, 0.013, 0.15]),
    top_k=st.sampled_from([0, 1, 5, 17]),
    top_p=st.sampled_from([1.0, 0.47, 0.93]),
    logit_bias=st.dictionaries(st.integers(0, WIDTH - 1), st.sampled_from([-100.0, -1.5, 0.7, 3.0]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_token_ids=st.sets(st.integers(0, WIDTH - 1), min_size=20).map(tuple) | st.just(()),
)
TOKENS = st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=6).map(tuple)
# Whole words, and tails of the output with a token more, which is then forbidden.
WORDS = st.lists(st.tuples(st.integers(0, 6), TOKENS), max_size=3)


@every_back_end
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TOKENS, output=TOKENS, params=PARAMS, words=WORDS, seed=st.integers(0, 10**6))
def test_the_tokens_left_and_their_probabilities_are_those_of_transformers(
    name: str,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    params: SamplingParams,
    words: list[tuple[int, tuple[int, ...]]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = logits_of(seed)
    known = prompt + output
    bad_words = tuple(known[len(known) - size :] + word[:1] if size else word for size, word in words)
    expected = warped(logits, prompt, output, params, bad_words)
    cumulative = expected.cumsum(0)
    allowed = [i for i in range(WIDTH) if expected[i] > 1e-6]
    middles = [float(cumulative[i] - expected[i] / 2) for i in allowed]
    grid = [i / 50 for i in range(50)]
    chosen = np.array([*middles, *grid])
    monkeypatch.setattr(sampler_module, "uniforms", lambda *columns: chosen)
    n = len(chosen)
    rows = logits.expand(n, -1).contiguous()
    drawn = sampled(name, rows, [sequence(prompt, output, params, bad_words=bad_words)] * n)
    assert drawn[: len(middles)] == allowed
    assert set(drawn[len(middles) :]) <= set(expected.nonzero().flatten().tolist())


@every_back_end
def test_n_samples_follow_the_distribution(name: str) -> None:
    """20,000 samples of one request; 60 is above the 99.999th percentile of chi-square with 19 degrees of freedom."""
    prompt, output = (1, 2, 3), (4, 5, 5)
    params = SamplingParams(temperature=1.3, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3, seed=8)
    logits = logits_of(1)
    expected = 20_000 * warped(logits, prompt, output, params)
    drawn: Counter[int] = Counter()
    sampler = sampler_of(name)
    request = Request(3, prompt, replace(params, n=2000), output)
    for key in range(10):
        sequences = RequestState(replace(request, key=key)).sequences
        for made in sequences:
            made.generation.counts = token_counts(prompt, output)
        drawn.update(sampler.sample(logits.expand(2000, -1).contiguous(), sequences).tolist())
    counts = torch.tensor([drawn[i] for i in range(WIDTH)], dtype=torch.float64)
    allowed = expected > 0
    assert counts[~allowed].sum() == 0
    assert ((counts - expected)[allowed] ** 2 / expected[allowed]).sum() < 60


@every_back_end
def test_greedy_takes_the_best_after_the_penalties(name: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, 1.0]])
    plain, punished = SamplingParams(), SamplingParams(presence_penalty=0.5)
    assert sampler_of(name).sample(logits.clone(), [sequence((1,), (1,), plain)]).tolist() == [1]
    assert sampler_of(name).sample(logits.clone(), [sequence((1,), (1,), punished)]).tolist() == [2]


@every_back_end
def test_a_bias_is_not_rounded_to_the_type_of_the_logits(name: str) -> None:
    logits = torch.tensor([[256.0, 256.0, 0.0]]).bfloat16()  # the next larger number is 258
    assert sampled(name, logits, [sequence((1,), (), SamplingParams(logit_bias=((1, 0.5),)))]) == [1]


@every_back_end
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_row_of_which_nothing_is_left_gives_no_token(name: str, temperature: float) -> None:
    asked = {"temperature": temperature, "allowed_token_ids": (4, 5), "logit_bias": ((5, -100.0),)}
    params = SamplingParams(**asked)  # type: ignore[arg-type]
    rows = [sequence((1,), (5,), params, bad_words=words) for words in ((), ((4,),), ((4,), (5, 5)), ((5, 4),))]
    assert sampled(name, logits_of(0, rows=4), rows) == [4, 5, -1, 5]


@every_back_end
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_are_those_of_the_logits_as_they_come(name: str, dtype: torch.dtype) -> None:
    """Before min_tokens, penalties and temperature, as vLLM reports them."""
    params = SamplingParams(
        **{"temperature": 0.4, "min_tokens": 9, "repetition_penalty": 1.7, "presence_penalty": 1.0, "top_k": 3},
        **{"logprobs": 4, "seed": 2, "logit_bias": ((1, 9.0),), "allowed_token_ids": tuple(range(1, WIDTH, 2))},
    )
    logits = logits_of(5, rows=6).to(dtype)
    expected = logits.double().log_softmax(-1)
    sequences = [sequence((1, 2), (3,), params, bad_words=((3, 5),)) for _ in range(6)]
    tokens = sampled(name, logits.clone(), sequences)
    for row, token, made in zip(expected, tokens, sequences, strict=True):
        [[found]] = made.generation.logprobs
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(row[token]), abs=2e-6)
        ranked = sorted(range(WIDTH), key=lambda i: (-float(row[i]), i))[:4]
        assert [i for i, _ in found.top] == ranked
        assert [v for _, v in found.top] == pytest.approx([float(row[i]) for i in ranked], abs=2e-6)


@every_back_end
def test_only_those_that_ask_get_log_probabilities_and_as_many_as_they_ask_for(name: str) -> None:
    asked = [None, 0, 5, None, 1]
    sequences = [sequence((1,), (), SamplingParams(logprobs=wanted)) for wanted in asked]
    sampler_of(name).sample(logits_of(0, rows=5), sequences).tolist()
    assert [s.generation.logprobs[0].num_top if s.generation.logprobs else None for s in sequences] == asked


@every_back_end
def test_which_of_equally_likely_tokens_are_reported_does_not_depend_on_the_batch(name: str) -> None:
    """In bfloat16 ties are common. The lowest ids win, however many others in the batch ask for."""
    logits = logits_of(0, rows=8, width=500).round().bfloat16()
    wanted = [1, 2, 3, 5, 8, 13, 20, 20]

    def tops(rows: list[int]) -> list[tuple[tuple[int, float], ...]]:
        sequences = [sequence((1,), (), SamplingParams(logprobs=wanted[i])) for i in rows]
        sampler_of(name).sample(logits[rows], sequences).tolist()
        return [next(iter(s.generation.logprobs[0])).top for s in sequences]

    together = tops(list(range(8)))
    assert together == [tops([i])[0] for i in range(8)]
    for row, count, top in zip(logits.tolist(), wanted, together, strict=True):
        assert [token for token, _ in top] == sorted(range(500), key=lambda i: (-row[i], i))[:count]


@every_back_end
def test_a_model_of_few_tokens_reports_all_it_has(name: str) -> None:
    made = sequence((1,), (), SamplingParams(logprobs=20))
    sampler_of(name).sample(logits_of(0, width=9), [made]).tolist()
    [[found]] = made.generation.logprobs
    assert sorted(token for token, _ in found.top) == list(range(9))


@every_back_end
def test_a_row_that_is_not_finite_has_log_probabilities_that_say_so_and_spoils_no_other(name: str) -> None:
    logits = logits_of(0, rows=3)
    clean = [sequence((1,), (), SamplingParams(logprobs=2)) for _ in range(3)]
    sampler_of(name).sample(logits.clone(), clean).tolist()
    dirty = [sequence((1,), (), SamplingParams(logprobs=2)) for _ in range(3)]
    logits[1] = torch.nan
    assert sampler_of(name).sample(logits, dirty).tolist()[1] == -1
    assert [dirty[i].generation.logprobs for i in (0, 2)] == [clean[i].generation.logprobs for i in (0, 2)]
    [[found]] = dirty[1].generation.logprobs
    assert found.logprob != found.logprob
