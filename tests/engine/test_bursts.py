"""Bursts of decode steps against single ones: every token is the same, whatever their lengths and wherever rows end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import Device
from test_overlap import (
    KINDS,
    MODEL,
    PLAIN,
    expected,
    overlapping,
    requests_of_every_kind,
    sizes_of_an_engine,
    untimed,
)
from tiny_model import checked_run, engine_for, random_requests, sequence_at, spoil, tiny_model, tokens_of

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine
from batchgen.engine.batch import build_input, inputs_of
from batchgen.engine.bursts import MAX_STEPS, InFlight, Pace, lengthened
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence

SAMPLED = replace(PLAIN, temperature=1.0, seed=3)


class Forced(Pace):
    """Bursts as long as the next of some numbers says, 1 to ``MAX_STEPS``."""

    def __init__(self, lengths: Iterator[int]) -> None:
        super().__init__()
        self._lengths = lengths

    def judge(self, before: InFlight | None) -> None:
        self.num_steps = next(self._lengths)


def lengths_of(seed: int) -> Iterator[int]:
    """Always the same where ``seed`` is a length, else changing at random."""
    rng = random.Random(seed)
    while True:
        yield seed if 1 <= seed <= MAX_STEPS else rng.randint(1, MAX_STEPS)


def bursting(seed: int, **sizes: Any) -> Engine:
    engine = overlapping(Device(), **sizes)
    engine.pace = Forced(lengths_of(seed))
    return engine


def num_schedules(engine: Engine) -> int:
    assert isinstance(engine._fetch, Device)
    return engine._fetch.num_launched


@settings(max_examples=100, deadline=None)
@given(
    sizes=sizes_of_an_engine(),
    seed=st.integers(1, 200),
    order=st.lists(st.integers(0, 4 * len(KINDS) + 1), unique=True, min_size=1, max_size=20),
)
def test_every_result_is_that_of_single_steps(sizes: dict[str, Any], seed: int, order: list[int]) -> None:
    engine = bursting(seed, **sizes)
    requests = [requests_of_every_kind()[i] for i in order]
    assert untimed(checked_run(engine, requests)) == {r.key: expected()[r.key] for r in requests}
    assert num_schedules(engine) <= engine.stats.num_steps
    assert engine.scheduler.pool.num_free == sizes["num_blocks"]


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes_of_an_engine(),
    seed=st.integers(1, 200),
    is_sampled=st.booleans(),
    num_stops=st.integers(0, 12),
    stop_after=st.one_of(st.none(), st.integers(1, 12)),
)
def test_rows_that_end_anywhere_in_a_burst_and_runs_that_stop_give_the_same_tokens(
    sizes: dict[str, Any], seed: int, is_sampled: bool, num_stops: int, stop_after: int | None
) -> None:
    params = replace(SAMPLED if is_sampled else PLAIN, stop_token_ids=tuple(range(num_stops)))
    left = {r.key: r for r in random_requests(12, seed=seed, prompt=(1, 20), output=(1, 26), params=params)}
    whole = tokens_of(engine_for(MODEL, num_blocks=400, block_size=4).run(left.values()))
    answers: dict[int, tuple[int, ...]] = {}
    while left:
        engine = bursting(seed, **sizes)
        for answer in checked_run(engine, until(engine, left.values(), stop_after)):
            answers[answer.key] = answer.token_ids
            del left[answer.key]
        for key, generated in engine.unfinished().items():
            assert whole[key][: len(generated)] == generated
            left[key] = replace(left[key], output_token_ids=generated)
        stop_after = None
    assert answers == whole


def until(engine: Engine, requests: Any, num_steps: int | None) -> list[Request]:
    """The requests; the engine stops itself in that step."""
    step, count = engine.step, 0

    def counted() -> Any:
        nonlocal count
        count += 1
        if count == num_steps:
            engine.stop()
        return step()

    engine.step = counted  # type: ignore[method-assign]
    return list(requests)


def test_a_burst_is_waited_for_once_and_counts_as_its_steps() -> None:
    requests = [Request(key, (9, 30 + key), replace(SAMPLED, max_tokens=40)) for key in range(3)]
    plain, engine = bursting(1), bursting(8)
    assert tokens_of(checked_run(engine, requests)) == tokens_of(checked_run(plain, requests))
    assert num_schedules(plain) == plain.stats.num_steps == engine.stats.num_steps
    assert num_schedules(engine) < plain.stats.num_steps / 4
    names = ("num_decode_tokens", "num_output_tokens", "num_logits", "num_attended", "num_kv_read", "sum_sequences")
    assert [getattr(engine.stats, n) for n in names] == [getattr(plain.stats, n) for n in names]
    (points, singles) = (e.stats.series.to_columns() for e in (engine, plain))
    assert [sum(points[n]) for n in ("steps", "tokens")] == [sum(singles[n]) for n in ("steps", "tokens")]


def test_the_time_of_a_burst_is_its_own_and_not_that_of_the_prompts_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("batchgen.engine.stats.time.monotonic", lambda: now[0])
    engine = bursting(8, max_num_seqs=3, prefix_caching=False)
    forward = engine.runner.forward

    def slow(*given: Any) -> torch.Tensor:
        now[0] += 1.0
        return forward(*given)

    engine.runner.forward = slow  # type: ignore[method-assign]
    engine.submit(Request(0, (9, 30), replace(PLAIN, max_tokens=20)))
    engine.step()
    assert engine.stats.forward_prefill_s == 1.0
    engine.step()  # its first token is known then
    engine.step()
    assert (engine.stats.num_steps, now[0]) == (10, 10.0)
    engine.submit(Request(1, (9, 31), replace(PLAIN, max_tokens=1)))
    engine.step()
    assert engine.stats.forward_prefill_s == pytest.approx(1.0 + 2 / 3), "two of three tokens of one step"


@pytest.mark.parametrize("length", range(1, MAX_STEPS + 1))
def test_an_end_token_at_any_step_of_a_burst_ends_the_row_there(length: int) -> None:
    request = Request(0, (9, 30, 77), replace(SAMPLED, max_tokens=30))
    whole = tokens_of(engine_for(MODEL, num_blocks=200, block_size=4).run([request]))[0]
    for stop in dict.fromkeys(whole):
        engine = bursting(length)
        (result,) = checked_run(engine, [replace(request, params=replace(request.params, stop_token_ids=(stop,)))])
        assert result.token_ids == whole[: whole.index(stop) + 1]
        assert not engine.scheduler.has_work


def test_blocks_filled_in_bursts_are_labelled_once_their_tokens_are_known() -> None:
    first = Request(0, (9, 30, 77), replace(PLAIN, max_tokens=30))
    engine = bursting(8, num_blocks=40, max_num_seqs=3)
    seen: list[int] = []
    learned = engine.scheduler.learned

    def counted(schedule: Schedule) -> None:
        learned(schedule)
        if schedule.num_steps > 1:
            seen.append(len(engine.scheduler.pool._block))

    engine.scheduler.learned = counted  # type: ignore[method-assign]
    (result,) = checked_run(engine, [first])
    *before, last = seen
    assert before == [(4 + n) // 4 for n in range(8, 8 * len(seen), 8)], "behind the prompt and one step"
    assert not last, "the blocks of an answer are forgotten when it ends"
    assert result.token_ids == tokens_of(engine_for(MODEL, num_blocks=40, block_size=4).run([first]))[0]


def test_without_blocks_for_a_burst_single_steps_go_on() -> None:
    """One request fills the pool, the other is preempted: no block is taken that a burst does not fill."""
    requests = [Request(key, (9, 30 + key), replace(SAMPLED, max_tokens=30)) for key in range(4)]
    engine = bursting(8, num_blocks=12, block_size=3)
    assert tokens_of(checked_run(engine, requests)) == tokens_of(
        engine_for(MODEL, num_blocks=200, block_size=4).run(requests)
    )
    assert engine.stats.num_preemptions > 0


def test_a_row_gone_wrong_in_a_burst_is_an_error_row_and_harms_no_other() -> None:
    model, bad = tiny_model(tie_embedding=False), 100
    spoil(model, bad, torch.nan)
    requests = [Request(99, (9, bad), PLAIN), *random_requests(20, seed=2, output=(9, 20), params=PLAIN)]
    expected = untimed(engine_for(model, num_blocks=200, block_size=4).run(requests))
    for length in (2, 5, 8):
        engine = overlapping(Device(), model, num_blocks=66, max_num_seqs=3)
        engine.pace = Forced(lengths_of(length))
        results = untimed(checked_run(engine, requests))
        assert results == expected
        assert 1 < sum(result.error is not None for result in results.values()) < len(results)
        assert num_schedules(engine) < engine.stats.num_steps


@settings(deadline=None)
@given(starts=st.lists(st.integers(0, 40), min_size=1, max_size=6), num_steps=st.integers(2, 8), data=st.data())
def test_the_inputs_of_a_burst_are_those_of_its_steps(starts: list[int], num_steps: int, data: st.DataObject) -> None:
    """Up to each row's last token; behind it they stay there."""
    left = [data.draw(st.integers(1, num_steps)) for _ in starts]
    tokens = [[7] * (start + n) for start, n in zip(starts, left, strict=True)]
    blocks = [range(9 * i, 9 * i + -(-len(t) // 5)) for i, t in enumerate(tokens)]

    def at(step: int) -> Schedule:
        places = [start + min(step, n - 1) for start, n in zip(starts, left, strict=True)]
        rows = zip(tokens, places, blocks, strict=True)
        made = [sequence_at(t[: place + 1], place, b, i) for i, (t, place, b) in enumerate(rows)]
        return Schedule(tuple((sequence, 1) for sequence in made))

    first = at(0)
    burst = Schedule(tuple(zip(first.sequences, left, strict=True)), num_steps=num_steps)
    found = list(inputs_of(burst, 5))
    assert len(found) == num_steps
    for step, inputs in enumerate(found):
        single = build_input(at(step), 5)
        for name in ("positions", "slot_mapping", "cu_seqlens", "conv_slots", "query_blocks", "logits_indices"):
            assert torch.equal(getattr(inputs, name), getattr(single, name)), name
        assert torch.equal(inputs.block_tables, single.block_tables)


def test_bursts_become_longer_while_the_device_is_idle_and_shorter_once_it_is_not() -> None:
    pace = Pace()
    lengths = []
    for is_idle in [True] * 4 + [False] * 200:
        pace.learn(is_idle)
        lengths.append(pace.num_steps)
    assert lengths[:4] == [2, 4, 8, MAX_STEPS]
    assert sorted(lengths[4:], reverse=True) == lengths[4:]
    assert lengths[4] == MAX_STEPS
    assert lengths[-1] == 1


def test_a_device_that_is_never_idle_is_given_single_steps_and_one_that_is_bursts() -> None:
    requests = [Request(key, (9, 30 + key), SamplingParams(max_tokens=60, ignore_eos=True)) for key in range(3)]
    for is_idle in (False, True):
        device = Device(lambda is_idle=is_idle: is_idle)
        engine = overlapping(device)
        tokens_of(checked_run(engine, requests))
        assert (device.num_launched < engine.stats.num_steps / 3) == is_idle
        assert (device.num_launched == engine.stats.num_steps) != is_idle
    assert engine_for(MODEL, num_blocks=200, block_size=4).overlaps is False


def test_only_steps_in_which_plain_rows_owe_one_token_become_bursts() -> None:
    scheduler = engine_for(MODEL, num_blocks=20, block_size=4).scheduler

    def row(num_known: int, plain_until: int = 30) -> Sequence:
        sequence = sequence_at(range(10, 10 + num_known), 4, scheduler.pool.allocate(2), 0)
        sequence.plain_until, sequence.max_state_tokens = plain_until, 30
        return sequence

    decode = Schedule(((row(5), 1), (row(5), 1)))
    others = [
        Schedule(()),
        Schedule(((row(6), 1), (row(5), 1))),  # one owes more than the step computes
        Schedule(((row(6), 2), (row(5), 1))),
        Schedule(((row(5, plain_until=0), 1), (row(5), 1))),
        replace(decode, resumed=(decode.sequences[0],)),  # convolution state is to be restored before the step
    ]
    assert lengthened(decode, scheduler, 1) is decode
    for schedule in others:
        assert lengthened(schedule, scheduler, 8) is schedule
    burst = lengthened(decode, scheduler, 8)
    assert (burst.counts, burst.num_steps, [len(s.block_table) for s in burst.sequences]) == ([8, 8], 8, [3, 3])


def test_a_burst_ends_where_more_than_a_few_rows_do() -> None:
    scheduler = engine_for(MODEL, num_blocks=100, block_size=4).scheduler
    for num_short, num_steps in ((1, 8), (2, 8), (3, 3)):
        rows = [sequence_at(range(10, 15), 4, scheduler.pool.allocate(2), i) for i in range(32)]
        for i, sequence in enumerate(rows):
            sequence.plain_until = sequence.max_state_tokens = 7 if i < num_short else 30
        burst = lengthened(Schedule(tuple((s, 1) for s in rows)), scheduler, 8)
        assert burst.num_steps == num_steps
        assert burst.counts == [3] * num_short + [num_steps] * (32 - num_short)
        for sequence in rows:
            scheduler.pool.free(sequence.block_table)
