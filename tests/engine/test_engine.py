"""The engine's promises to its caller, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import structured
import torch
from families import EOS
from tiny_model import checked_run, engine_for, random_requests, solo, spoil, tiny_model, tokens_of

from batchgen.core.errors import RowError, RowErrorCode, TokenizerError, UsageError
from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.engine import Engine, EngineConfig, admission
from batchgen.engine.block_pool import extend_block_hashes
from batchgen.engine.generation import TextTools
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.schedule import Schedule
from batchgen.kernels.inputs import StepOutput
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model
from batchgen.text.stop_strings import StopStrings

MODEL = tiny_model()
PROMPT = (9, 30, 77, 12, 5)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
NO_TOKEN = "token id 128 is not among the model's 128"


def run_one(request: Request, model: Decoder = MODEL, **config: int) -> Result:
    (result,) = Engine(model, EngineConfig(kv_cache_memory=1 << 20, **config)).run([request])
    return result


@pytest.fixture(scope="module")
def undisturbed() -> tuple[int, ...]:
    """Twelve greedy tokens after ``PROMPT``."""
    return run_one(Request(0, PROMPT, GREEDY)).first.token_ids


def test_the_end_token_ends_unless_ignored(undisturbed: tuple[int, ...]) -> None:
    end = undisturbed[3]
    engine = Engine(MODEL, EngineConfig(kv_cache_memory=1 << 20), eos_token_ids=[end])
    heeding, ignoring = Request(0, PROMPT, replace(GREEDY, ignore_eos=False)), Request(1, PROMPT, GREEDY)
    results = {r.key: r for r in engine.run([heeding, ignoring])}
    assert results[0].first.token_ids == undisturbed[: undisturbed.index(end) + 1]
    assert results[0].first.finish_reason == FinishReason.STOP
    assert results[1].first.token_ids == undisturbed


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Request(1, (9,) * 10, GREEDY), RowErrorCode.TOO_LONG, ["10", "8"]),
        (Request(1, (9,) * 9, GREEDY), RowErrorCode.TOO_LONG, ["9", "8"]),
        (Request(1, (), GREEDY), RowErrorCode.EMPTY_PROMPT, []),
        *((Request(1, (9, token), GREEDY), RowErrorCode.BAD_PARAM, [str(token)]) for token in (-1, 128, 2**40)),
        *((Request(1, (9,), GREEDY, (token,)), RowErrorCode.BAD_PARAM, [str(token)]) for token in (-1, 128)),
        *(
            (replace(Request(1, (9,), GREEDY), **given), RowErrorCode.BAD_PARAM, [NO_TOKEN])
            for given in (
                {"params": replace(GREEDY, allowed_token_ids=(9, 128))},
                {"params": replace(GREEDY, logit_bias=((9, 1.0), (128, 1.0)))},
                {"bad_words": ((9, 128),)},
            )
        ),
        (Request(1, (9,), replace(GREEDY, stop=("x",))), RowErrorCode.BAD_PARAM, ["tokenizer"]),
        (
            Request(1, (9,), SamplingParams(labels=("a", ""), by="mean"), labels=((9,), ())),
            RowErrorCode.BAD_PARAM,
            ["labels: one of the texts has no tokens"],
        ),
    ],
    ids=str,
)
def test_a_row_that_can_never_run_is_an_error_row_and_harms_no_other(
    request_: Request, code: RowErrorCode, words: list[str], undisturbed: tuple[int, ...]
) -> None:
    engine = Engine(MODEL, EngineConfig(kv_cache_memory=1 << 20, max_model_len=9))
    results = {r.key: r for r in engine.run([Request(0, PROMPT, GREEDY), request_])}
    error = results[1].error
    assert error is not None and error.code == code
    assert all(word in error.message for word in words)
    assert results[1].timings == Timings()
    assert results[0].first.token_ids == undisturbed[:4]


def test_what_the_pool_can_never_hold_is_an_error_row_before_it_starts() -> None:
    engine = engine_for(MODEL, num_blocks=3, block_size=4)
    requests = [Request(0, PROMPT, GREEDY), Request(1, PROMPT, replace(GREEDY, max_tokens=8))]
    results = {r.key: r for r in engine.run(requests)}
    error = results[0].error
    assert error is not None and error.code == RowErrorCode.TOO_LONG
    assert "16" in error.message and "12" in error.message
    assert len(results[1].first.token_ids) == 8


def test_a_request_that_was_done_already_is_answered_at_once(undisturbed: tuple[int, ...]) -> None:
    engine = Engine(MODEL, EngineConfig(kv_cache_memory=1 << 20))
    done = engine.submit(Request(0, PROMPT, GREEDY, undisturbed))
    assert done is not None
    assert (done.first.token_ids, done.first.finish_reason) == (undisturbed, FinishReason.LENGTH)
    ended = engine.submit(Request(1, PROMPT, replace(GREEDY, ignore_eos=False), (50, EOS)))
    assert ended is not None
    assert ended.first.finish_reason == FinishReason.STOP
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("overlaps", [False, True], ids=["single", "overlapping"])
@pytest.mark.parametrize("stop_after", [5, 11])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, min_p=0.01)], ids=["greedy", "sampled"]
)
def test_stopped_and_resumed_gives_the_tokens_of_an_undisturbed_run(
    stop_after: int, params: SamplingParams, overlaps: bool
) -> None:
    """A step in flight when the stop comes is booked: its tokens are a result, or tokens to go on from."""
    requests = random_requests(14, seed=stop_after, params=params)
    expected = solo(MODEL, requests)
    answers: dict[int, tuple[int, ...]] = {}
    engines = 0
    while len(answers) < len(requests):
        engine = engine_for(
            MODEL,
            num_blocks=40,
            block_size=4,
            max_num_seqs=5,
            max_num_batched_tokens=11,
            look_ahead=3,
            parts={"overlaps": overlaps},
        )
        steps = iter(range(stop_after))
        plain_step = engine.step

        def step(
            engine: Engine = engine, steps: Iterator[int] = steps, plain_step: object = plain_step
        ) -> list[Result]:
            if next(steps, None) is None:
                engine.stop()
            return plain_step()  # type: ignore[operator, no-any-return]

        engine.step = step  # type: ignore[method-assign]
        answers.update(tokens_of(engine.run([r for r in requests if r.key not in answers])))
        engine.scheduler.check()
        assert engine.overlap is None or not engine.overlap.pending
        partial = engine.unfinished()
        assert partial.keys().isdisjoint(answers)
        for key, tokens in partial.items():
            assert expected[key][: len(tokens)] == tokens
            assert tokens
        requests = [replace(r, output_token_ids=partial.get(r.key, r.output_token_ids)) for r in requests]
        engines += 1
        assert engines < 500
    assert answers == expected
    assert engines > 2


def test_tokens_of_a_request_not_yet_readmitted_survive_a_second_stop() -> None:
    """A resumed request that is still waiting when the next stop comes keeps what it had."""
    engine = engine_for(MODEL, num_blocks=40, block_size=4, max_num_seqs=1)
    first, second = Request(0, PROMPT, replace(GREEDY, max_tokens=40)), Request(1, PROMPT, GREEDY, (50, 51))
    engine.submit(first)
    engine.submit(second)
    engine.step()
    assert engine.unfinished()[1] == (50, 51)


class Pulled(list[Request]):
    """Requests that are counted as they are taken."""

    count = 0

    def __iter__(self) -> Iterator[Request]:
        for request in super().__iter__():
            self.count += 1
            yield request


LARGE = [Request(key, (key + 9, 10), GREEDY, num_row_chars=100 << 20) for key in range(40)]


@pytest.mark.parametrize(
    ("requests", "max_num_seqs", "look_ahead", "most"),
    [(random_requests(60, seed=0), 3, 5, 3 + 5), (LARGE, 9, 30, 9)],
    ids=["any rows", "large rows"],
)
def test_requests_are_pulled_only_as_far_as_looked_ahead_and_as_their_memory_is_there(
    requests: list[Request], max_num_seqs: int, look_ahead: int, most: int
) -> None:
    source = Pulled(requests)
    engine = engine_for(MODEL, num_blocks=100, block_size=4, max_num_seqs=max_num_seqs, look_ahead=look_ahead)
    for done, _ in enumerate(engine.run(source), 1):
        assert source.count - done <= most
    assert done == len(requests)
    assert engine.stats.max_running == max_num_seqs


def test_a_request_can_be_answered_from_within_the_source() -> None:
    """The source may look at earlier results before it gives the next request (a feedback loop), without deadlock."""
    seen: list[int] = []

    def source() -> Iterator[Request]:
        for key in range(4):
            yield Request(key, PROMPT, GREEDY)
            assert len(seen) <= key + 1

    engine = engine_for(MODEL, num_blocks=100, block_size=4, look_ahead=1)
    for result in engine.run(source()):
        seen.append(result.key)
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("overlaps", [False, True], ids=["single", "overlapping"])
def test_a_request_may_follow_from_a_result_when_the_source_has_no_other(overlaps: bool) -> None:
    answers: list[Result] = []

    def source() -> Iterator[Request | None]:
        prompt = PROMPT
        for key in range(3):
            yield Request(key, prompt, GREEDY, turn=key, num_turns=3)
            while len(answers) == key:
                yield None
            prompt = (*prompt, *answers[key].first.token_ids, 8)

    engine = engine_for(MODEL, num_blocks=100, block_size=4, parts={"overlaps": overlaps})
    for result in engine.run(source()):
        answers.append(result)
    for result in answers[1:]:
        before = answers[result.key - 1]
        assert result.num_prompt_tokens == before.num_prompt_tokens + len(before.first.token_ids) + 1
        cached = before.num_prompt_tokens + len(before.first.token_ids) - 1
        assert result.timings.cached_tokens == cached // 4 * 4


def test_tokens_behind_the_end_of_an_answer_are_left_to_the_next_turn(undisturbed: tuple[int, ...]) -> None:
    engine = Engine(MODEL, EngineConfig(kv_cache_memory=1 << 20))
    params = replace(GREEDY, stop_token_ids=(undisturbed[2],))
    first = undisturbed.index(undisturbed[2])
    done = engine.submit(Request(0, PROMPT, params, undisturbed))
    assert done is not None
    assert (done.first.token_ids, done.first.finish_reason) == (undisturbed[: first + 1], FinishReason.STOP)


def test_times_are_consistent() -> None:
    engine = engine_for(MODEL, num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=9)
    results = list(engine.run(random_requests(15, seed=2, prompt=(1, 20))))
    for result in results:
        t = result.timings
        assert min(t.queue_s, t.prefill_s, t.decode_s) >= 0
        assert t.queue_s + t.prefill_s == pytest.approx(t.ttft_s)
        assert t.ttft_s + t.decode_s == pytest.approx(t.total_s)
        assert t.tpot_s * max(1, len(result.first.token_ids) - 1) == pytest.approx(t.decode_s)
    assert sum(r.timings.preemptions for r in results) == engine.stats.num_preemptions > 0


def test_what_is_counted_adds_up() -> None:
    requests = random_requests(15, seed=2, prompt=(1, 20))
    engine = engine_for(MODEL, num_blocks=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=9)
    results = list(engine.run(requests))
    stats = engine.stats
    assert stats.num_preemptions == 0
    assert stats.num_output_tokens == sum(len(r.first.token_ids) for r in results)
    assert stats.num_prefill_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert stats.num_logits == stats.num_output_tokens
    assert stats.num_decode_tokens == stats.num_output_tokens - len(requests)
    assert stats.max_running == 4
    assert set(stats.phase_s) == {"schedule", "forward", "sample", "update"}
    lengths = [r.num_prompt_tokens + len(r.first.token_ids) - 1 for r in results]
    assert stats.num_attended == sum(n * (n + 1) // 2 for n in lengths)
    assert stats.sum_experts == 0
    assert stats.num_window_attended == stats.num_window_read == 0


def test_what_is_attended_and_read_through_a_window_is_counted_by_itself() -> None:
    model = tiny_model(model_type="lfm3")
    assert model.config.window == 20
    engine = engine_for(model, num_blocks=20, block_size=8, max_num_seqs=1, max_num_batched_tokens=9)
    list(engine.run([Request(0, tuple(range(10, 33)), SamplingParams(max_tokens=10, ignore_eos=True))]))
    steps = [9, 18, 23, *range(24, 33)]  # tokens computed at the end of each: chunks of the prompt, then one by one
    assert engine.stats.num_window_attended == sum(min(position + 1, 20) for position in range(32))
    assert engine.stats.num_window_read == sum(min(end, 20) for end in steps)
    assert engine.stats.num_kv_read == sum(steps)


def test_the_experts_of_every_step_are_counted_by_its_tokens() -> None:
    engine = engine_for(tiny_model(model_type="lfm2_moe"), num_blocks=20, block_size=4, max_num_seqs=2)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    list(engine.run(Request(key, (9, 10 + key, 11), params) for key in range(2)))
    assert engine.stats.num_steps == 3  # of six prompt tokens, then two and two of output, and 2 of 6 experts a token
    assert engine.stats.sum_experts == pytest.approx(sum(1 - (4 / 6) ** tokens for tokens in (6, 2, 2)))


def test_logits_of_scored_tokens_are_counted_too() -> None:
    request = Request(0, (9, 10, 11, 12, 13), SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True))
    engine = engine_for(MODEL, num_blocks=20, block_size=4)
    list(engine.run([request]))
    assert engine.stats.num_logits == 3 + 4, (
        "those that chose a token, and those before each prompt token but the first"
    )


BAD = 100  # a token whose embedding is not finite


def spoiled_model(value: float, dtype: torch.dtype) -> Decoder:
    model = tiny_model(dtype, tie_embedding=False)
    spoil(model, BAD, value)
    return model


@pytest.mark.parametrize("budget", [64, 9])
@pytest.mark.parametrize("max_tokens", [3, 0])
def test_what_a_row_gone_wrong_has_computed_is_taken_over_by_no_other(budget: int, max_tokens: int) -> None:
    """A value that is not finite may spoil positions before it, which another row begins with too."""
    engine = engine_for(
        spoiled_model(torch.nan, torch.float32), num_blocks=16, block_size=4, max_num_batched_tokens=budget
    )
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=None if max_tokens else 0)
    request = Request(0, (*range(9, 17), BAD, *range(20, 30)), params)
    (result,) = checked_run(engine, [request])
    assert result.error is not None
    hashes: list[bytes] = []
    extend_block_hashes(hashes, request.prompt_token_ids, 4)
    assert engine.scheduler.pool.find(hashes) == []
    (result,) = checked_run(engine, [replace(request, prompt_token_ids=(*range(9, 17), *range(20, 30)))])
    assert result.error is None
    assert len(engine.scheduler.pool.find(hashes)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_gone_wrong_is_an_error_and_leaves_nothing(value: float, dtype: torch.dtype, temperature: float) -> None:
    """Its blocks and slots, full of NaN, are used by others afterwards and beside it."""
    model = spoiled_model(value, dtype)
    params = SamplingParams(temperature=temperature, ignore_eos=True, seed=1)
    good = [
        replace(r, prompt_token_ids=tuple(t if t != BAD else 99 for t in r.prompt_token_ids))
        for r in random_requests(12, seed=5, prompt=(1, 30), output=(1, 12), params=params)
    ]
    alone = [next(iter(engine_for(model, num_blocks=9, block_size=8).run([request]))) for request in good]
    expected = {r.key: r.first.token_ids for r in alone if r.error is None and BAD not in r.first.token_ids}
    bad = [
        Request(1000 + n, (9,) * n + (BAD,) + (10,) * (23 - n), replace(params, max_tokens=9)) for n in range(0, 24, 4)
    ]
    mixed = [request for pair in zip(bad, good[::2], good[1::2], strict=True) for request in pair]
    engine = engine_for(model, num_blocks=16, block_size=5, max_num_seqs=4, max_num_batched_tokens=11)
    results = {r.key: r for r in checked_run(engine, mixed)}
    assert len(results) == len(mixed)
    for request in bad:
        error = results[request.key].error
        assert error is not None
        assert error.code == RowErrorCode.INTERNAL
        assert "not finite" in error.message
        assert results[request.key].samples == ()
    for key, tokens in expected.items():
        assert results[key].first.token_ids == tokens
    assert len(expected) > 6


class EndsAt:
    """A stand-in for what looks for stop strings: the text of a token is its number."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.text = ""

    def push(self, token_id: int) -> str | None:
        self.text += f"{token_id} "
        return next((stop for stop in self.stop if stop in self.text), None)


def stopping_engine() -> Engine:
    return Engine(MODEL, EngineConfig(kv_cache_memory=1 << 20), text=TextTools(EndsAt))


def test_a_stop_string_ends_with_stop_and_is_named(undisturbed: tuple[int, ...]) -> None:
    stop = f"{undisturbed[3]} {undisturbed[4]} "  # across the border of two tokens
    (result,) = stopping_engine().run([Request(0, PROMPT, replace(GREEDY, stop=("nothing", stop)))])
    assert (result.first.token_ids, result.first.finish_reason, result.first.stop) == (
        undisturbed[:5],
        FinishReason.STOP,
        stop,
    )


def test_a_stop_string_does_not_count_before_min_tokens(undisturbed: tuple[int, ...]) -> None:
    params = replace(GREEDY, stop=(f"{undisturbed[1]} ",), min_tokens=6)
    (result,) = stopping_engine().run([Request(0, PROMPT, params)])
    assert len(result.first.token_ids) >= 6


def test_a_resumed_request_finds_a_stop_string_that_began_before_it_was_stopped(undisturbed: tuple[int, ...]) -> None:
    stop = f"{undisturbed[3]} {undisturbed[4]} "
    request = Request(0, PROMPT, replace(GREEDY, stop=(stop,)), undisturbed[:4])
    (result,) = stopping_engine().run([request])
    assert (result.first.token_ids, result.first.stop) == (undisturbed[:5], stop)
    done = stopping_engine().submit(replace(request, output_token_ids=undisturbed[:5]))
    assert done is not None
    assert (done.first.token_ids, done.first.finish_reason, done.first.stop) == (
        undisturbed[:5],
        FinishReason.STOP,
        stop,
    )


@pytest.mark.parametrize("num_resumed", [0, 4], ids=["begun", "resumed"])
def test_a_text_that_fails_for_stop_strings_ends_its_row_only(num_resumed: int, undisturbed: tuple[int, ...]) -> None:
    class Fails(EndsAt):
        def push(self, token_id: int) -> str | None:
            super().push(token_id)
            if len(self.text.split()) == 3 and "fails" in self.stop:
                raise TokenizerError("no text")
            return None

    engine = Engine(MODEL, EngineConfig(kv_cache_memory=1 << 20), text=TextTools(Fails))
    failing = Request(0, PROMPT, replace(GREEDY, stop=("fails",)), undisturbed[:num_resumed])
    results = {r.key: r for r in checked_run(engine, [failing, Request(1, PROMPT, replace(GREEDY, stop=("x",)))])}
    assert results[0].error == RowError(RowErrorCode.INTERNAL, "no text")
    assert results[1].first.token_ids == undisturbed


def test_an_engine_with_tools_for_text_looks_for_stop_strings() -> None:
    tokenizer = structured.tokenizer()
    text = TextTools(partial(StopStrings, tokenizer))
    engine = Engine(load_model(str(structured.MODEL)), EngineConfig(kv_cache_memory=1 << 20), text=text)
    chat = [{"role": "user", "content": 'Write "silver" in capital letters.'}]
    (prompt,) = tokenizer.encode_batch([*tokenizer.render_chats([chat])], add_special_tokens=False)
    assert not isinstance(prompt, TokenizerError)
    asked = SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, stop=("LV",))
    results = {r.key: r for r in engine.run(Request(key, tuple(prompt), params) for key, params in enumerate(asked))}
    assert tokenizer.decode(results[0].first.token_ids) == "SILVER"
    assert (results[1].first.finish_reason, results[1].first.stop) == (FinishReason.STOP, "LV")


def test_identical_requests_do_not_pile_up_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that only wait for the result of another have a bound of their own."""
    monkeypatch.setattr(admission, "_MAX_FOLLOWERS", 9)
    source = Pulled(Request(key, PROMPT, GREEDY) for key in range(300))
    engine = engine_for(MODEL, num_blocks=100, block_size=4, max_num_seqs=2, look_ahead=7)
    most, keys = 0, []
    step = engine.step

    def watched() -> list[Result]:
        nonlocal most
        most = max(most, engine.duplicates.num_waiting)
        assert source.count <= len(keys) + 9 + 2
        return step()

    engine.step = watched  # type: ignore[method-assign]
    for result in engine.run(source):
        keys.append(result.key)
    assert sorted(keys) == list(range(300))
    assert 7 < most <= 9
    assert engine.stats.num_output_tokens == 12
    assert engine.stats.num_shared_requests == 299


def test_equal_requests_in_a_row_leave_those_behind_them_running_beside() -> None:
    long = [Request(key, PROMPT, replace(GREEDY, max_tokens=40)) for key in range(30)]
    others = [Request(30 + key, (key + 9, 10), replace(GREEDY, max_tokens=20)) for key in range(4)]
    engine = engine_for(MODEL, num_blocks=100, block_size=4, max_num_seqs=4, look_ahead=5)
    assert len(list(engine.run([*long, *others]))) == 34
    assert engine.stats.max_running == 4
    assert engine.stats.num_steps < 60, "one after the other they take as long together"


def test_samples_begin_anew_whatever_tokens_a_request_brings() -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, n=3, ignore_eos=True)
    asked = [Request(5, PROMPT, params), Request(5, PROMPT, params, (3, 4, 5, 6))]
    results = [next(iter(engine_for(MODEL, num_blocks=20, block_size=4).run([request]))) for request in asked]
    assert results[0].samples == results[1].samples


class Interrupted(ModelRunner):
    """Runs one step, and is interrupted in the next, once its kernels have run."""

    num_runs = 0

    def run(self, schedule: Schedule) -> StepOutput:
        found = super().run(schedule)
        self.num_runs += 1
        if self.num_runs == 2:
            raise KeyboardInterrupt
        return found


@pytest.mark.parametrize("where", ["forward", "end"])
def test_an_engine_that_was_interrupted_within_a_step_gives_no_wrong_tokens_and_loses_no_row(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has moved convolution states on, and its tokens are not known: run again, it would move them twice."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = Engine(MODEL, runner=Interrupted if where == "forward" else ModelRunner)
    request = Request(0, PROMPT, SamplingParams(max_tokens=5))
    if where == "end":
        monkeypatch.setattr(engine.duplicates, "end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine.run([request]))
    for requests in ([], [replace(request, key=1)]):
        with pytest.raises(UsageError, match="interrupted and the engine's state is undefined; create a new engine"):
            list(engine.run(requests))
