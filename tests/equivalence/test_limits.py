"""An answer under a limit is the beginning of that under a larger one, and a record says whether it is the whole of it.

That is what lets a row whose ``max_tokens`` has changed keep its result (``core.identity``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from row_kinds import KINDS, engine_of, run

from batchgen.config.identity import fingerprint, may_go_on, still_holds
from batchgen.core.records import FinishReason, Request, Result

_LARGER = 10_000  # keys of the same rows with twice the limit


def pairs(rows: str) -> dict[int, tuple[Request, Request]]:
    """Each row that generates, and the same with twice the limit, which draws as the first one does."""
    found = {}
    for request in KINDS[rows].requests:
        if not request.labels and request.params.max_tokens:
            twice = replace(request.params, max_tokens=2 * request.params.max_tokens)
            found[request.key] = request, replace(request, key=_LARGER + request.key, rng_key=request.key, params=twice)
    return found


@cache
def results_of(rows: str) -> dict[int, Result]:
    """What all of ``pairs`` get, in one engine."""
    return run(engine_of(rows, "trained", room=30), [request for pair in pairs(rows).values() for request in pair])


def as_record(result: Result) -> dict[str, Any]:
    """What a record says of how an answer ended."""
    usage = {"completion_tokens": result.num_generated_tokens}
    return {"finish_reason": str(result.first.finish_reason), "usage": usage, "token_ids": [*result.first.token_ids]}


@pytest.mark.parametrize("rows", ["greedy", "drawn", "rules", "sharing", "structured"])
def test_a_larger_limit_goes_on_where_a_smaller_one_cut_off(rows: str) -> None:
    found, results = pairs(rows), results_of(rows)
    num_cut = 0
    for key, (small, large) in found.items():
        less, more = results[key], replace(results[_LARGER + key], key=key)
        for short, long in zip(less.samples, more.samples, strict=True):
            assert long.token_ids[: len(short.token_ids)] == short.token_ids
        if small.params.n > 1:
            continue
        limits = small.params.max_tokens, large.params.max_tokens
        names = {fingerprint(key, request.params, request.prompt_token_ids, 0) for request in (small, large)}
        assert len(names) == 1
        assert still_holds(as_record(less), large.params, limits[1]) == (less == more)
        assert still_holds(as_record(more), small.params, limits[0]) == (less == more)
        num_cut += less.first.finish_reason is FinishReason.LENGTH
    assert num_cut > 0, "otherwise no limit was met"


@pytest.mark.parametrize("rows", ["greedy", "drawn", "rules", "structured"])
def test_a_row_that_was_cut_off_goes_on_behind_the_tokens_of_its_record(rows: str) -> None:
    found, first = pairs(rows), results_of(rows)
    asked = []
    for key, (_, large) in found.items():
        tokens = may_go_on(as_record(first[key]), large.params, large.params.max_tokens)
        if tokens:
            asked.append(replace(large, output_token_ids=tokens))
    again = run(engine_of(rows, "trained", room=30), asked)
    assert again and again == {key: first[key] for key in again}
