"""Identical greedy requests are computed once, within bounded memory; nothing else is taken for identical."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import FinishReason, Request, Result, Sample, SamplingParams
from batchgen.engine import duplicates
from batchgen.engine.duplicates import Duplicates
from batchgen.engine.sequence import RequestState

PROMPT = (9, 10, 11)
GREEDY = Request(0, PROMPT, SamplingParams(max_tokens=5))


def result_of(request: Request, tokens: tuple[int, ...] = (20, 21), **more: Any) -> Result:
    sample = Sample(tokens, FinishReason.STOP, more.pop("stop", None), more.pop("logprobs", None))
    samples = () if "error" in more else (sample,)
    return Result(request.key, len(request.prompt_token_ids), **{"samples": samples} | more)


def test_an_identical_request_waits_and_gets_the_result_under_its_own_key() -> None:
    known = Duplicates()
    leader, twins = RequestState(GREEDY), [RequestState(replace(GREEDY, key=key)) for key in (7, 8)]
    assert known.begin(leader)
    assert [known.begin(twin) for twin in twins] == [False, False]
    assert known.num_waiting == 2
    results = known.end(leader, result_of(GREEDY, stop="\n"))
    assert [(r.key, r.first.token_ids, r.first.stop, r.first.finish_reason) for r in results] == [
        (key, (20, 21), "\n", FinishReason.STOP) for key in (7, 8)
    ]
    assert all(r.timings.cached_tokens == 3 and r.timings.total_s >= 0 for r in results)
    assert (known.num_waiting, known.num_shared) == (0, 2)


def test_a_later_one_is_answered_from_memory() -> None:
    known = Duplicates()
    leader = RequestState(GREEDY)
    assert known.answered(RequestState(GREEDY)) is None
    known.begin(leader)
    assert known.answered(RequestState(GREEDY)) is None
    known.end(leader, result_of(GREEDY))
    answer = known.answered(RequestState(replace(GREEDY, key=12)))
    assert answer is not None
    assert (answer.key, answer.first.token_ids, answer.num_prompt_tokens) == (12, (20, 21), 3)
    assert known.num_shared == 1


def test_an_error_is_passed_on_to_those_that_wait_and_to_nobody_else() -> None:
    known = Duplicates()
    leader, twin = RequestState(GREEDY), RequestState(replace(GREEDY, key=7))
    known.begin(leader)
    known.begin(twin)
    error = RowError(RowErrorCode.INTERNAL, "not finite")
    (result,) = known.end(leader, result_of(GREEDY, (), error=error))
    assert (result.key, result.error) == (7, error)
    assert known.answered(RequestState(replace(GREEDY, key=8))) is None
    assert known.begin(RequestState(replace(GREEDY, key=8))), "the next one is computed anew"


SAMPLED = SamplingParams(max_tokens=5, temperature=0.5)


@pytest.mark.parametrize(
    "other",
    [
        replace(GREEDY, prompt_token_ids=(9, 10)),
        replace(GREEDY, prompt_token_ids=(9, 10, 12)),
        *(
            replace(GREEDY, params=replace(GREEDY.params, **change))
            for change in (
                *({"max_tokens": 6}, {"min_tokens": 1}, {"n": 2}, {"logprobs": 0}, {"prompt_logprobs": 0}),
                *({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}),
                *({"stop": ("x",)}, {"stop_token_ids": (3,)}, {"ignore_eos": True}, {"max_repeats": 3}),
                *({"logit_bias": ((3, 1.0),)}, {"allowed_token_ids": (3,)}, {"bad_words": ("x",)}),
                *({"by": "mean"}, {"structured_outputs": "x"}),
            )
        ),
        replace(GREEDY, params=replace(GREEDY.params, labels=("a", "b")), labels=((1,), (2,))),
        *(replace(GREEDY, prompt_token_ids=PROMPT[:n], labels=((11,),)) for n in (2, 3)),
        replace(GREEDY, bad_words=((1, 2),)),
    ],
    ids=str,
)
def test_whatever_can_change_an_answer_makes_a_request_another_one(other: Request) -> None:
    known = Duplicates()
    leader = RequestState(GREEDY)
    assert known.begin(leader)
    assert known.begin(RequestState(replace(other, key=1)))
    known.end(leader, result_of(GREEDY))
    assert known.answered(RequestState(replace(other, key=2))) is None


def test_the_seed_and_earlier_tokens_make_no_difference_to_a_greedy_answer() -> None:
    known = Duplicates()
    assert known.begin(RequestState(GREEDY))
    assert not known.begin(RequestState(replace(GREEDY, key=1, params=replace(GREEDY.params, seed=9))))
    assert not known.begin(RequestState(replace(GREEDY, key=2, output_token_ids=(20,))))


def test_sampled_requests_are_never_shared() -> None:
    known = Duplicates()
    groups = [RequestState(Request(key, PROMPT, SAMPLED)) for key in range(3)]
    assert all(known.begin(group) for group in groups)
    assert known.end(groups[0], result_of(groups[0].request)) == []
    assert known.answered(groups[1]) is None
    assert known.num_waiting == known.num_shared == 0


@pytest.mark.parametrize(
    "more", [{"logprobs": (object(),)}, {"prompt_logprobs": (object(),)}, {"samples": (Sample(), Sample())}]
)
def test_large_results_are_not_remembered(more: dict[str, Any]) -> None:
    assert remembered([GREEDY], result_of(GREEDY, **more)) == []


def remembered(requests: list[Request], *results: Result) -> list[int]:
    """Which requests are answered from memory once each has had its result."""
    known = Duplicates()
    for request, result in zip(requests, results, strict=True):
        group = RequestState(request)
        known.begin(group)
        known.end(group, result)
    assert not known._under_way
    return [request.key for request in requests if known.answered(RequestState(request))]


def test_memory_is_bounded_by_tokens_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MAX_REMEMBERED_TOKENS", 1000)
    requests = [Request(key, (9, key), SamplingParams()) for key in range(50)]
    found = remembered(requests, *(result_of(r, (5,) * (50 if r.key < 49 else 450)) for r in requests))
    assert found == [47, 48, 49]  # 50, 50 and 450 tokens, and what 150 take beside each of the three


@pytest.mark.parametrize("more", [{"label_logprobs": (-1.0,) * 600}, {"vector": bytes(4 * 4800)}])
def test_scores_of_labels_and_vectors_count_towards_the_bound(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "MAX_REMEMBERED_TOKENS", 10_000)
    requests = [Request(key, (9, key), SamplingParams(), labels=((3,), (4,))) for key in range(10)]
    assert remembered(requests, *(result_of(r, (3,), **more) for r in requests)) == [
        8,
        9,
    ]  # 8 tokens a score, 1 a number
