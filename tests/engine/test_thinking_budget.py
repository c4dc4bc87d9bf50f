"""Budgets of thoughts: where the marker comes, whatever else is asked for, and that no way to run a row moves it.

That nothing of it depends on the batch, or on where a row goes on, is shown in ``tests/equivalence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from late_device import Device
from structured import EOS, VOCAB_SIZE, ids_of, parts
from tiny_model import checked_run, engine_for, tiny_model

from batchgen.core.errors import RowErrorCode
from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.core.structured import canonical
from batchgen.engine import Engine
from batchgen.engine.generation import TextTools

MODEL = tiny_model(vocab_size=VOCAB_SIZE)
MARKER = ids_of("</think>")  # several tokens of this vocabulary
PROMPT = (1, 6, *ids_of("so <think>"))
FREE = SamplingParams(max_tokens=30, ignore_eos=True)
AFTER = canonical({"regex": "[a-c]{4,9}", "after": "</think>"})


def engine(**sizes: Any) -> Engine:
    more = {name: sizes.pop(name) for name in ("overlaps", "fetch") if name in sizes}
    return engine_for(MODEL, **{"num_blocks": 200, "block_size": 4, "parts": parts(**more)} | sizes)


def run(made: Engine, asked: Sequence[Request]) -> dict[int, Result]:
    return {r.key: replace(r, timings=Timings()) for r in checked_run(made, asked)}


def answer(params: SamplingParams, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Result:
    """Of a row by itself."""
    return run(engine(prefix_caching=False, max_num_seqs=1), [Request(0, prompt, params, **fields)])[0]


def test_the_marker_follows_exactly_so_many_tokens_of_thought_and_then_the_answer() -> None:
    free = answer(FREE).first.token_ids
    for budget in (0, 1, 7, 20):
        found = answer(replace(FREE, thinking_token_budget=budget)).first.token_ids
        assert found[: budget + len(MARKER)] == free[:budget] + MARKER
        rest = replace(FREE, max_tokens=30 - budget - len(MARKER))
        assert found[budget + len(MARKER) :] == answer(rest, PROMPT + found[: budget + len(MARKER)]).first.token_ids
    assert answer(replace(FREE, thinking_token_budget=30)).first.token_ids == free


def test_markers_of_rows_side_by_side_are_their_own() -> None:
    """Each at another of its tokens; with log-probabilities, for which they are sampled."""
    budgets = [replace(FREE, thinking_token_budget=budget, logprobs=1) for budget in range(4)]
    found = run(engine(), [Request(key, PROMPT, params) for key, params in enumerate(budgets)])
    assert [replace(found[key], key=0) for key in range(4)] == [*map(answer, budgets)]


def test_max_tokens_cuts_the_marker_too() -> None:
    whole = answer(replace(FREE, thinking_token_budget=5))
    for limit in range(1, 30):
        found = answer(replace(FREE, thinking_token_budget=5, max_tokens=limit))
        assert (found.first.token_ids, found.first.finish_reason) == (
            whole.first.token_ids[:limit],
            FinishReason.LENGTH,
        )


def test_an_answer_that_opens_no_thoughts_is_left_alone() -> None:
    prompt = (1, 6, *ids_of("so"))
    closed = (*PROMPT, *MARKER)
    for asked in (prompt, closed):
        assert answer(replace(FREE, thinking_token_budget=0), asked) == answer(FREE, asked)


def test_thoughts_that_the_model_opens_are_counted_from_there() -> None:
    opening = ids_of("<think>")
    found = answer(replace(FREE, thinking_token_budget=4), (1, 6), output_token_ids=opening).first.token_ids
    assert found[: len(opening)] == opening
    assert found[len(opening) + 4 :][: len(MARKER)] == MARKER


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_token_ids": tuple(range(20, 60))},
        {"logit_bias": tuple((token, -100.0) for token in sorted(set(MARKER)))},
        {"min_tokens": 25, "ignore_eos": False, "stop_token_ids": (MARKER[0],)},
        {"repetition_penalty": 1.4, "frequency_penalty": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"bad_words": ("</",)},
        {"structured_outputs": AFTER, "ignore_eos": False},
    ],
    ids=lambda more: next(iter(more)),
)
def test_the_marker_comes_whatever_rules_say_and_its_log_probabilities_change_no_token(more: dict[str, Any]) -> None:
    words = (MARKER[:1], MARKER[1:2]) if "bad_words" in more else ()
    params = replace(FREE, thinking_token_budget=6, **more)
    found = answer(params, bad_words=words)
    assert found.error is None and found.first.token_ids[6 : 6 + len(MARKER)] == MARKER
    assert set(words).isdisjoint({(token,) for token in found.first.token_ids[6 + len(MARKER) :]})
    if "structured_outputs" in more:
        assert (
            set(found.first.token_ids[6 + len(MARKER) :]) <= {*ids_of("abc"), *ids_of("ab"), EOS}
            or found.first.is_complete
        )
    told = answer(replace(params, logprobs=1), bad_words=words)
    assert replace(told, samples=(replace(told.first, logprobs=None),)) == found
    assert told.first.logprobs is not None and [one.token_id for one in told.first.logprobs] == [*found.first.token_ids]


def test_steps_overlap_again_once_thoughts_are_over() -> None:
    device = Device()
    made = engine(overlaps=True, fetch=device, prefix_caching=False)
    params = replace(FREE, thinking_token_budget=4)
    assert run(made, [Request(0, PROMPT, params)])[0] == answer(params)
    assert device.num_ahead == 30 - 4 - len(MARKER) - 1
    assert made.stats.num_forced_tokens == len(MARKER)


def test_an_engine_without_a_tokenizer_answers_with_an_error_row() -> None:
    made = engine_for(MODEL, num_blocks=20, block_size=4, parts={"text": TextTools()})
    error = run(made, [Request(0, PROMPT, replace(FREE, thinking_token_budget=0))])[0].error
    assert error is not None and error.code is RowErrorCode.BAD_PARAM
    assert error.message == "thinking_token_budget needs a tokenizer, which this engine lacks: give it one"
