"""What biases, allowed tokens, bad words and grammars do to tokens and scores, and which rows they end.

``test_equivalence`` holds that such rows get the same in any batch, whatever stops them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from row_kinds import ALLOWED, BIASES, KINDS, alone, engine_of, run
from structured import GRAMMARS, grammar
from tiny_model import DTYPES, checked_run

from batchgen.core.errors import RowErrorCode
from batchgen.core.records import FinishReason, Request, SamplingParams
from batchgen.engine import Engine

ROWS = KINDS["rules"].requests
PROMPT = (9, 30, 77, 12)


def roomy(rows: str = "rules", dtype: str = "float32", **sizes: Any) -> Engine:
    return engine_of(rows, "lfm2", dtype, room=25, **sizes)


def test_only_allowed_tokens_come_and_no_bad_word_does() -> None:
    found = alone("rules")
    for request in ROWS:
        allowed = request.params.allowed_token_ids
        for sample in found[request.key].samples:
            tokens = sample.token_ids
            assert not allowed or set(tokens) <= {*allowed}
            for word in request.bad_words:
                assert word not in {tokens[i : i + len(word)] for i in range(len(tokens))}
            if allowed == ALLOWED:
                assert sample.finish_reason is FinishReason.LENGTH, "no end token is allowed"
    plain = run(roomy(), [replace(request, bad_words=()) for request in ROWS])
    changed = [r.key for r in ROWS if r.bad_words and plain[r.key].first.token_ids != found[r.key].first.token_ids]
    assert len(changed) > 5, "otherwise bad words have not been met"
    assert any({30, 31} & {*found[r.key].first.token_ids} for r in ROWS if r.params.logit_bias)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_no_token_is_left_is_an_error_row_and_the_others_go_on(temperature: float) -> None:
    params = SamplingParams(max_tokens=5, allowed_token_ids=(20, 21), temperature=temperature)
    stuck = Request(0, (9, 8), params, bad_words=((20,), (21, 21)))
    other = Request(1, (9, 8), params, bad_words=((20,),))
    engine = roomy()
    results = {result.key: result for result in checked_run(engine, [stuck, other])}
    error = results[0].error
    assert error is not None and error.code is RowErrorCode.BAD_PARAM
    told = "allowed_token_ids, bad_words, min_tokens or structured_outputs leave no token to follow token 3"
    assert error.message == f"{told}, or the logits are not finite"
    assert results[1].first.token_ids == (21,) * 5
    assert engine.scheduler.pool.num_free == engine.config.num_blocks


def test_steps_overlap_unless_a_bad_word_depends_on_the_text() -> None:
    """What ``needs_host`` says is held against tokens in ``tests.engine.test_overlap``."""
    engine = roomy()
    params = SamplingParams(allowed_token_ids=ALLOWED, logit_bias=BIASES)
    for bad_words, needs_host in (((), False), (((22,),), False), (((22,), (20, 21)), True)):
        assert engine.submit(Request(0, (9,), params, bad_words=bad_words)) is None
        assert engine.scheduler.waiting.pop().generation.needs_host is needs_host


def test_rows_with_the_same_lists_share_one_set_of_bits() -> None:
    engine = roomy(max_num_seqs=3)
    params = SamplingParams(allowed_token_ids=ALLOWED)
    for key in range(3):
        engine.submit(Request(key, (9, key + 8), replace(params, max_tokens=key + 3)))
    assert len({id(s.generation.rules) for s in engine.scheduler.unfinished()}) == 1


# ---------------------------------------------------------------- grammars


def test_forced_tokens_are_counted_and_free_rows_share_their_batch() -> None:
    """Free rows with draws of their own beside constrained ones, which stay what they are alone."""
    rows = KINDS["structured"].requests
    free = [replace(r, key=2000 + r.key, params=SamplingParams(max_tokens=30, temperature=1.0)) for r in rows]
    engine = roomy("structured")
    found = run(engine, [*rows, *free])
    assert {key: found[key] for key in alone("structured")} == alone("structured")
    assert engine.stats.num_forced_tokens > 50
    assert engine.stats.num_cached_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRAMMARS)
def test_log_probabilities_are_those_of_scoring_the_text_and_change_no_token(name: str, dtype: str) -> None:
    for seed in range(4):
        params = SamplingParams(max_tokens=12 + 9 * seed, temperature=1.0, seed=seed, structured_outputs=grammar(name))
        request = Request(0, PROMPT, params)
        found = run(roomy("structured", dtype), [request])[0]
        told = run(roomy("structured", dtype), [replace(request, params=replace(params, logprobs=2))])[0]
        assert replace(told, samples=(replace(told.first, logprobs=None),)) == found
        text = Request(0, PROMPT + found.first.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=2))
        scores = run(roomy("structured", dtype), [text])[0].prompt_logprobs
        assert scores is not None
        assert [*told.first.logprobs] == [*scores][len(PROMPT) - 1 :]
