"""Overlapping steps against single ones, with a device that hands out ids only when they are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import Device, SomeTokens
from tiny_model import checked_run, engine_for, random_requests, spoil, tiny_model, tokens_of

from batchgen.core.errors import RowErrorCode
from batchgen.core.records import Request, Result, SamplingParams, Timings
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.generation import Generation, TextTools
from batchgen.engine.model_runner import ModelRunner
from batchgen.kernels.inputs import PendingTokens
from batchgen.model.decoder import Decoder

MODEL = tiny_model()
PLAIN = SamplingParams(ignore_eos=True)
KINDS = (
    PLAIN,
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3),
    SamplingParams(temperature=1.0, stop_token_ids=tuple(range(20, 30)), min_tokens=3),
    SamplingParams(temperature=1.0, n=3, stop_token_ids=tuple(range(10, 30))),
    SamplingParams(stop=("any of some tokens",)),
    SamplingParams(temperature=0.7, max_repeats=2),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, n=2, repetition_penalty=0.8, presence_penalty=1.5, stop_token_ids=(20, 21, 22)),
    SamplingParams(temperature=1.0, logprobs=2),
    SamplingParams(prompt_logprobs=1),
    SamplingParams(logit_bias=((20, 9.0), (21, 8.5)), allowed_token_ids=tuple(range(10, 90))),
    SamplingParams(temperature=1.0, bad_words=("see WORDS",), min_tokens=2),
)
WORDS = ((31,), *((i, j) for i in range(128) for j in range(i % 2, 128, 2)))  # odd and even tokens take turns
LONGEST = 46  # tokens of a prompt and its output


def overlapping(
    device: Device, model: Decoder = MODEL, *, num_blocks: int = 200, block_size: int = 4, **sizes: Any
) -> Engine:
    memory = num_blocks * model.config.kv_block_bytes(block_size, model.dtype.itemsize)
    sizes = {"forecast_memory": False} | sizes
    config = EngineConfig(block_size=block_size, kv_cache_memory=memory, **sizes)
    engine = Engine(
        model, config, text=TextTools(lambda _: SomeTokens()), runner=partial(ModelRunner, overlaps=True, fetch=device)
    )
    engine.scheduler.config = replace(engine.scheduler.config, admits_in_batches=True)  # as on a GPU
    return engine


def untimed(results: Iterator[Result]) -> dict[int, Result]:
    found: dict[int, Result] = {}
    for result in results:
        assert result.key not in found, f"request {result.key} was answered twice"
        found[result.key] = replace(result, timings=Timings())
    return found


@cache
def requests_of_every_kind() -> tuple[Request, ...]:
    """Four of each kind, every other one with the same beginning, and two that are scored."""
    requests = []
    for i, request in enumerate(random_requests(4 * len(KINDS), seed=8, prompt=(1, 20), output=(1, 14))):
        prompt = (9, 30, 77, 12, 5, 9, 30, 70, 2, 11, 18, 99) * (i % 2) + request.prompt_token_ids
        params = replace(KINDS[i // 2 % len(KINDS)], max_tokens=request.params.max_tokens)
        requests.append(Request(request.key, prompt, params, bad_words=WORDS if params.bad_words else ()))
    scored = SamplingParams(max_tokens=0, labels=("one", "another"))
    return *requests, *(Request(100 + i, (9, 30, 77, 12, 5 + i), scored, (), ((50, 51), (60,))) for i in range(2))


@cache
def expected() -> dict[int, Result]:
    config = EngineConfig(kv_cache_memory=1 << 22, prefix_caching=False, share_duplicates=False)
    engine = Engine(MODEL, config, text=TextTools(lambda _: SomeTokens()))
    return untimed(engine.run(requests_of_every_kind()))


@st.composite
def sizes_of_an_engine(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of any kind; the pool holds the longest request and often little more."""
    block_size = draw(st.integers(1, 9))
    least = -(-LONGEST // block_size)
    return {
        "block_size": block_size,
        "num_blocks": least + draw(st.integers(0, 2 * least)),
        "max_num_batched_tokens": draw(st.integers(1, 60)),
        "max_num_seqs": draw(st.integers(1, 12)),
        "look_ahead": draw(st.integers(1, 12)),
        "prefix_caching": draw(st.booleans()),
    }


@settings(max_examples=30, deadline=None)
@given(
    sizes=sizes_of_an_engine(),
    order=st.lists(st.integers(0, 4 * len(KINDS) + 1), unique=True, min_size=1, max_size=20),
)
def test_every_result_is_that_of_single_steps(sizes: dict[str, Any], order: list[int]) -> None:
    device = Device()
    engine = overlapping(device, **sizes)
    requests = [requests_of_every_kind()[i] for i in order]
    assert untimed(checked_run(engine, requests)) == {r.key: expected()[r.key] for r in requests}
    assert device.num_waits == device.num_launched <= engine.stats.num_steps
    assert engine.scheduler.pool.num_free == sizes["num_blocks"]


def test_tokens_that_nothing_watches_end_a_row_where_judging_each_would(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, judge = requests_of_every_kind(), Generation._judge
    num_judged = []
    for is_marked in (True, False):
        if not is_marked:
            monkeypatch.setattr(Generation, "take_fast_path", lambda *_: None)
        calls: list[Generation] = []
        engine = overlapping(Device())
        monkeypatch.setattr(Generation, "_judge", lambda g, calls=calls: (calls.append(g), judge(g)))
        assert untimed(checked_run(engine, requests)) == expected()
        num_judged.append((len(calls), engine.stats.num_output_tokens))
    (few, num_tokens), (all_of_them, _) = num_judged
    assert few < all_of_them == num_tokens == num_judged[1][1]


def test_a_step_is_waited_for_once_and_while_the_next_one_runs() -> None:
    device = Device()
    engine = overlapping(device, max_num_batched_tokens=8)
    requests = [Request(key, (9,) * 20 + (30 + key,), replace(PLAIN, max_tokens=12)) for key in range(3)]
    tokens_of(checked_run(engine, requests))
    assert device.num_waits == device.num_launched == engine.stats.num_steps
    assert device.num_ahead == device.num_waits - 1, "all but the last"


def test_nothing_is_computed_behind_a_token_that_is_the_last_by_length() -> None:
    requests = [Request(0, (9, 30), replace(PLAIN, max_tokens=7)), Request(1, (9, 31), replace(PLAIN, max_tokens=1))]
    for sizes in ({}, {"max_model_len": 6}):
        engine, plain = overlapping(Device(), **sizes), engine_for(MODEL, num_blocks=200, block_size=4, **sizes)
        assert tokens_of(checked_run(engine, requests)) == tokens_of(plain.run(requests))
        computed = [e.stats.num_prefill_tokens + e.stats.num_decode_tokens for e in (engine, plain)]
        assert computed[0] == computed[1]
        assert engine.stats.num_steps == plain.stats.num_steps


def test_one_token_is_computed_behind_an_end_token_and_dropped() -> None:
    request = Request(0, (9, 30, 77), replace(PLAIN, max_tokens=12))
    whole = tokens_of(engine_for(MODEL, num_blocks=200, block_size=4).run([request]))[0]
    stop = whole[4]
    engine = overlapping(Device())
    (result,) = checked_run(engine, [replace(request, params=replace(request.params, stop_token_ids=(stop,)))])
    assert result.first.token_ids == whole[: whole.index(stop) + 1]
    assert engine.stats.num_decode_tokens == engine.stats.num_output_tokens == len(result.first.token_ids)
    assert not engine.scheduler.has_work


def test_penalized_rows_overlap_and_go_on_from_an_earlier_run() -> None:
    """Though a penalty counts the token that the host does not know yet; the slots are used again and again."""
    params = replace(PLAIN, repetition_penalty=1.5, frequency_penalty=0.4, temperature=0.5)
    fresh = random_requests(20, seed=4, prompt=(1, 9), output=(8, 14), params=params)
    requests = [replace(r, output_token_ids=(9, 30, 9, *r.prompt_token_ids[:1]) * (r.key % 2)) for r in fresh]
    device = Device()
    results = untimed(checked_run(overlapping(device, max_num_seqs=3), requests))
    assert results == untimed(engine_for(MODEL, num_blocks=200, block_size=4).run(requests))
    assert device.num_ahead > 0.9 * device.num_waits


def test_a_step_with_rows_that_need_the_host_runs_by_itself() -> None:
    params = replace(PLAIN, logprobs=0)
    device = Device()
    plain = Request(0, (9, 30), replace(PLAIN, max_tokens=20))
    engine = overlapping(device)
    requests = [plain, Request(1, (9, 31), replace(params, max_tokens=5))]
    assert untimed(checked_run(engine, requests)) == untimed(
        engine_for(MODEL, num_blocks=200, block_size=4).run(requests)
    )
    assert (engine.stats.num_steps, device.num_waits, device.num_ahead) == (20, 20, 14)


def test_a_row_gone_wrong_is_an_error_row_and_harms_no_other() -> None:
    """Wrong from its prompt on, or from a token it generates: others begin in its memory a step later."""
    model, bad = tiny_model(tie_embedding=False), 100
    spoil(model, bad, torch.nan)
    requests = [Request(99, (9, bad), PLAIN), *random_requests(20, seed=2, params=PLAIN)]
    engine = overlapping(Device(), model, num_blocks=66, max_num_seqs=3)
    results = untimed(checked_run(engine, requests))
    assert results == untimed(engine_for(model, num_blocks=200, block_size=4).run(requests))
    errors = [result.error for result in results.values() if result.error is not None]
    assert {error.code for error in errors} == {RowErrorCode.INTERNAL}
    assert "after token 2 " in errors[0].message
    assert 1 < len(errors) < len(results)


@pytest.mark.parametrize(("order", "wanted"), [(None, [0, 8]), ([1, 0], [8, 0])])
def test_pending_tokens_leave_their_ids_alone_and_give_any_token_for_a_row_gone_wrong(
    order: list[int] | None, wanted: list[int]
) -> None:
    ids, token_ids = torch.tensor([-1, 8]), torch.zeros(2, dtype=torch.int64)
    rows, places = (None, None) if order is None else (torch.tensor([0, 1]), torch.tensor(order))
    PendingTokens(ids, rows, places).into(token_ids)
    assert (ids.tolist(), token_ids.tolist()) == ([-1, 8], wanted)
