"""Drafts change no token, no score and no end of any row, however right or wrong they are.

The rows ask for all that a row may ask for, and their drafts are made by an adversary who knows what will come: always
right, never, in part, beyond the end, or none. What comes out is held against the same rows without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured import EOS, GRAMMARS, VOCAB_SIZE, Lists, grammar, listed, parts
from tiny_model import DTYPES, checked_run, engine_for, random_requests, tiny_model

from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.core.structured import canonical
from batchgen.engine import Engine
from batchgen.engine.drafts import MAX_DRAFTS, Drafter
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.model.decoder import Decoder

ANY_LETTERS = canonical({"regex": "[a-z ]*"})  # end tokens may come anywhere, and are no part of the text
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9),
    SamplingParams(temperature=1.0, n=2, seed=7),
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.7, logprobs=1, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB_SIZE, 5))),
    SamplingParams(max_repeats=2),
    SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(logit_bias=((30, 3.0), (31, 2.9)), allowed_token_ids=(2, *range(20, 40))),
    SamplingParams(prompt_logprobs=1, temperature=0.5),
    SamplingParams(temperature=1.2, stop=("e", "a b")),
    *(SamplingParams(temperature=i % 2, structured_outputs=grammar(name)) for i, name in enumerate(GRAMMARS)),
    SamplingParams(structured_outputs=grammar("object"), logprobs=1, presence_penalty=0.6, temperature=1.0, n=2),
    SamplingParams(structured_outputs=ANY_LETTERS, ignore_eos=True, logit_bias=((EOS, 9.0),), temperature=1.0),
)
BAD_WORDS = tuple((first, second) for first in range(20, 40) for second in range(20, 40))
MEMORY = 90  # tokens: what the longest of these rows needs, and a little more


@dataclass(frozen=True)
class Case:
    """What the tokens of a row depend on, beside the row."""

    family: str = "lfm2"
    dtype: str = "float32"
    kv_dtype: str = "auto"
    max_model_len: int = 400

    @property
    def sizes(self) -> dict[str, Any]:
        return {"kv_dtype": self.kv_dtype, "max_model_len": self.max_model_len, "parts": PARTS}


CASES = (
    Case(),
    Case(dtype="bfloat16", kv_dtype="int8", max_model_len=40),
    Case("lfm3", "bfloat16", max_model_len=44),  # windows of 20 tokens
    Case("lfm2_moe"),
    Case("lfm3", kv_dtype="int8"),
    Case("lfm2_moe", "bfloat16", max_model_len=40),
)
PARTS = parts()


@cache
def model(family: str, dtype: str) -> Decoder:
    return tiny_model(DTYPES[dtype], model_type=family, vocab_size=VOCAB_SIZE)


@cache
def asked() -> tuple[Request, ...]:
    requests = random_requests(2 * len(KINDS), seed=5, prompt=(1, 24), output=(8, 44))
    stem = (*requests[0].prompt_token_ids, 9, 10, 11)
    made = []
    for i, request in enumerate(requests):
        params = replace(KINDS[i % len(KINDS)], max_tokens=request.params.max_tokens)
        prompt = stem + request.prompt_token_ids[:9] if i % 3 == 0 else request.prompt_token_ids
        bad_words = BAD_WORDS if params.allowed_token_ids else ()
        made.append(replace(request, prompt_token_ids=prompt, params=params, bad_words=bad_words))
    return tuple(made)


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, Result]:
    found = {result.key: replace(result, timings=Timings()) for result in checked_run(engine, requests)}
    assert all(result.error is None for result in found.values())
    assert engine.scheduler.pool.num_free == engine.config.num_blocks
    return found


def check_labels(scheduler: Scheduler) -> None:
    """Other sequences find a block by its label: it must not have one before its last token was accepted."""
    for s in scheduler.running:
        unfilled = s.block_table[s.num_computed_tokens // scheduler.config.block_size :]
        assert not scheduler.pool._digest.keys() & set(unfilled), "a block is labelled before it is full"


def without_drafts(case: Case = CASES[0], **sizes: Any) -> Engine:
    sizes = {"num_blocks": 200, "block_size": 8, "speculate": "off"} | case.sizes | sizes
    engine = engine_for(model(case.family, case.dtype), **sizes)
    assert engine.scheduler.drafter is None
    return engine


@cache
def plain(case: Case = CASES[0]) -> dict[int, Result]:
    return run(without_drafts(case), asked())


Spoil = Callable[[list[int], Random], list[int]]  # from the tokens that will come to drafts


def _one_wrong(coming: list[int], random: Random) -> list[int]:
    place = random.randrange(len(coming) + 1)
    return [*coming[:place], random.randrange(VOCAB_SIZE), *coming[place + 1 :]]


def _with_end(coming: list[int], random: Random) -> list[int]:
    place = random.randrange(len(coming) + 1)
    return [*coming[:place], EOS, *coming[place:]]


SPOILT: dict[str, Spoil] = {
    "right": lambda coming, _: coming,
    "wrong": lambda coming, _: [(token + 1) % VOCAB_SIZE for token in coming],
    "random": lambda _, random: [random.randrange(VOCAB_SIZE) for _ in range(MAX_DRAFTS)],
    "one wrong": _one_wrong,
    "right at times": lambda coming, random: random.choice([coming, []]),
    "cut": lambda coming, random: coming[: random.randrange(len(coming) + 1)],
    "with an end token": _with_end,
    "beyond the end": lambda coming, random: [*coming, EOS, *(random.randrange(VOCAB_SIZE) for _ in range(MAX_DRAFTS))],
}


class Adversary(Drafter):
    """Knows what will come and says something else, in one way or, without ``ways``, in all ways in turn."""

    def __init__(self, case: Case, seed: int, *ways: str) -> None:
        super().__init__()
        self._truth, self._max_model_len = plain(case), case.max_model_len
        self._random = Random(seed)
        self._ways = ways or tuple(SPOILT)

    def room(self, num_rows: int) -> int:
        return num_rows * self.max_drafts

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        assert 0 < most < sequence.max_new_tokens, "the last draft would be followed by nothing"
        assert sequence.num_tokens + most < self._max_model_len
        sample = self._truth[sequence.request.key].samples[sequence.sample_index]
        coming = sample.token_ids[sequence.num_output_tokens :]
        spoilt = SPOILT[self._random.choice(self._ways)]([*coming[:most]], self._random)
        return tuple(spoilt[:most])

    def pays(self, num_rows: int, drafts: object) -> bool:
        return True


def with_drafts(case: Case, seed: int = 0, *ways: str, **sizes: Any) -> Engine:
    sizes = {"num_blocks": 200, "block_size": 8, "speculate": "auto"} | case.sizes | sizes
    engine = engine_for(model(case.family, case.dtype), **sizes)
    assert engine.scheduler.config.max_drafts == MAX_DRAFTS
    engine.scheduler.drafter = Adversary(case, seed, *ways)
    check, schedule = engine.scheduler.check, engine.scheduler.schedule

    def within_budget() -> Schedule:
        made = schedule()
        assert made.num_tokens + made.num_drafts <= engine.config.max_num_batched_tokens
        return made

    engine.scheduler.schedule = within_budget  # type: ignore[method-assign]
    engine.scheduler.check = lambda: (check(), check_labels(engine.scheduler))  # type: ignore[method-assign,assignment,return-value]
    return engine


def test_these_rows_end_in_every_way() -> None:
    """Otherwise the tests below would show less than they claim."""
    samples = [s for case in CASES for result in plain(case).values() for s in result.samples]
    assert {s.finish_reason for s in samples} == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION}
    assert {s.is_complete for s in samples} == {True, False, None}
    assert {s.stop for s in samples} >= {None, "e"}
    assert any(EOS in s.token_ids for s in samples)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_that_are_right_save_steps_and_change_nothing(dtype: str) -> None:
    """A row that only ends with a model's step of its own is not counted otherwise than without drafts."""
    case = Case(dtype=dtype)
    free = [request for request in asked() if not request.params.structured_outputs]
    engine, slow = with_drafts(case, 0, "right", max_num_seqs=4), without_drafts(case, max_num_seqs=4)
    expected = run(slow, free)
    assert expected.items() <= plain(case).items()
    assert run(engine, free) == expected
    assert engine.stats.num_steps < 0.7 * slow.stats.num_steps
    assert engine.stats.num_accepted_tokens > 0.9 * engine.stats.num_drafted_tokens > 0
    for name in ("num_output_tokens", "num_decode_tokens", "num_logits", "num_attended"):
        assert getattr(engine.stats, name) == getattr(slow.stats, name), name


@pytest.mark.parametrize("way", SPOILT)
def test_structured_rows_save_steps_wherever_drafts_are_right_and_keep_their_tokens(way: str) -> None:
    """One row at a time, so that no other row is in the way of its drafts."""
    rows = [request for request in asked() if request.params.structured_outputs]
    engine, slow = with_drafts(CASES[0], 1, way, max_num_seqs=1), without_drafts(max_num_seqs=1)
    assert run(engine, rows).items() <= plain().items()
    run(slow, rows)
    if way in ("right", "beyond the end"):
        assert engine.stats.num_steps < 0.7 * slow.stats.num_steps
    assert engine.stats.num_drafted_tokens > 50
    assert engine.stats.num_forced_tokens == slow.stats.num_forced_tokens
    assert engine.stats.num_output_tokens == slow.stats.num_output_tokens


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_drafts_that_are_wrong_change_nothing(case: Case) -> None:
    engine = with_drafts(case, 0, "wrong", max_num_seqs=4)
    assert run(engine, asked()) == plain(case)
    assert engine.stats.num_drafted_tokens > 500
    assert engine.stats.num_accepted_tokens == 0


policies = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 3, 8, 16]),
        "max_num_seqs": st.integers(1, 7),
        "max_num_batched_tokens": st.integers(4, 64),
        "prefix_caching": st.booleans(),
    }
)
ways = st.one_of(st.just(()), st.sampled_from([(way,) for way in SPOILT]))
any_batch = given(seed=st.integers(0, 1 << 20), ways=ways, spare=st.integers(0, 100), sizes=policies)


def check_any_batch(case: Case, seed: int, ways: tuple[str, ...], spare: int, sizes: dict[str, Any]) -> None:
    num_blocks = -(-(MEMORY + spare) // sizes["block_size"])
    assert run(with_drafts(case, seed, *ways, num_blocks=num_blocks, **sizes), asked()) == plain(case)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
@settings(max_examples=3, deadline=None)
@any_batch
def test_drafts_change_nothing_in_any_batch_with_little_memory(
    case: Case, seed: int, ways: tuple[str, ...], spare: int, sizes: dict[str, Any]
) -> None:
    check_any_batch(case, seed, ways, spare, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=25, deadline=None)
@any_batch
def test_drafts_change_nothing_in_any_batch_with_little_memory_at_length(
    case: Case, seed: int, ways: tuple[str, ...], spare: int, sizes: dict[str, Any]
) -> None:
    check_any_batch(case, seed, ways, spare, sizes)


def test_preempted_after_every_step_equals_undisturbed() -> None:
    """State that comes with a cached prefix has no inputs of drafts that were rejected before."""
    engine = with_drafts(CASES[0], 3, "one wrong", block_size=1, num_blocks=1000, max_num_seqs=6)
    schedule = engine.scheduler.schedule

    def preempting() -> Schedule:
        for sequence in engine.scheduler.running[::-1]:
            engine.scheduler._preempt(sequence)
        return schedule()

    engine.scheduler.schedule = preempting  # type: ignore[method-assign]
    assert run(engine, asked()) == plain()
    assert 2 * engine.stats.num_drafted_tokens > 3 * engine.stats.num_accepted_tokens > 300


def test_a_prompt_of_which_a_step_computes_one_token_has_no_drafts_behind_it() -> None:
    """Beside a decoding row, a budget of 2 leaves one token for a prompt that owes many."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 2}
    assert run(with_drafts(CASES[0], 0, "wrong", **sizes), asked()) == plain()


any_stop = given(seed=st.integers(0, 1 << 20), steps=st.integers(1, 60))


def check_stopped(case: Case, seed: int, steps: int) -> None:
    first = with_drafts(case, seed, max_num_seqs=5)
    done: dict[int, Result] = {}
    for request in asked():
        first.submit(request)
    for _ in range(steps):
        if first.has_work:
            done |= {result.key: replace(result, timings=Timings()) for result in first.step()}
    left = [replace(r, output_token_ids=first.unfinished().get(r.key, ())) for r in asked() if r.key not in done]
    for second in (with_drafts(case, seed + 1), without_drafts(case)):
        assert done | run(second, left) == plain(case)


@settings(max_examples=5, deadline=None)
@any_stop
def test_a_run_that_is_stopped_goes_on_with_or_without_drafts(seed: int, steps: int) -> None:
    check_stopped(CASES[0], seed, steps)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=15, deadline=None)
@any_stop
def test_a_run_that_is_stopped_goes_on_with_or_without_drafts_at_length(case: Case, seed: int, steps: int) -> None:
    check_stopped(case, seed, steps)


@pytest.mark.parametrize("fails", ["", "push", "fill"])
def test_a_constraint_that_fails_behind_drafts_fails_as_it_does_without(fails: str) -> None:
    """With the same error, of the constraint itself and not of a branch."""

    def rows(fails: str) -> list[Request]:
        places = [(40 + i, 90 + i) for i in range(9)]
        params = [SamplingParams(max_tokens=30, structured_outputs=listed(places, fails, at)) for at in range(9)]
        return [Request(at, (9, 30, 77, at), asked) for at, asked in enumerate(params)]

    def results(speculate: str, fails: str, coming: dict[int, Result]) -> dict[int, Result]:
        lists = {"constraints": Lists(), "eos_token_ids": [EOS]}
        engine = engine_for(model("lfm2", "float32"), num_blocks=90, block_size=4, speculate=speculate, parts=lists)
        if (drafter := engine.scheduler.drafter) is not None:
            drafter.room = lambda num_rows: 64  # type: ignore[method-assign]
            drafter.pays = lambda sequences, num_drafts: True  # type: ignore[method-assign]
            drafter.propose = lambda s, most: coming[s.request.key].token_ids[s.num_output_tokens :][:most]  # type: ignore[method-assign]
        found = {result.key: replace(result, timings=Timings()) for result in checked_run(engine, rows(fails))}
        assert bool(engine.stats.num_accepted_tokens) == (speculate == "auto")
        return found

    whole = results("off", "", {})
    assert results("auto", fails, whole) == results("off", fails, {})
