"""From measured steps to a time: the fit, the schedule played out, and what is expected of output lengths."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from late_device import Device
from run_helpers import JobMaker, rows_of
from tiny_model import engine_for, random_requests, tiny_model

from batchgen.config.embed import EmbedSpec
from batchgen.config.job import JobSpec
from batchgen.core.records import Request, SamplingParams
from batchgen.core.shard import WHOLE
from batchgen.engine import Engine
from batchgen.engine.schedule import Schedule
from batchgen.engine.sizes import SchedulerConfig
from batchgen.input.ids import UniqueIds
from batchgen.input.source import RowRange, open_source
from batchgen.input.validator import RowValidator
from batchgen.kernels.inputs import PendingTokens
from batchgen.plan.calibrate import CostModel, StepCost, _Probe, calibrate
from batchgen.plan.estimate import ExpectedLengths, Forecast
from batchgen.plan.simulation import StepWork
from batchgen.plan.survey import Lengths, Survey
from batchgen.run.loader import read_model

SIZES = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, block_size=16, num_blocks=400, max_model_len=512)
A_SECOND_A_STEP = StepCost((1.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def cost_model(cost: StepCost = A_SECOND_A_STEP) -> CostModel:
    return CostModel(SIZES, look_ahead=64, cost=cost)


def test_a_fit_gives_back_the_cost_that_made_the_steps() -> None:
    true = StepCost((0.01, 0.001, 0.0005, 0.0002, 0.0003, 0.00001))
    works = [StepWork(n, min(n, 40), n * k) for n in (1, 4, 16, 30, 60, 100, 128, 256, 512) for k in (1, 10, 100)]
    fitted = StepCost.fit([(work, true.step_s(work)) for work in works])
    for work in works:
        assert fitted.step_s(work) == pytest.approx(true.step_s(work), rel=0.02)


def test_a_fit_never_makes_a_cost_negative() -> None:
    fitted = StepCost.fit([(StepWork(n, n, n), 1.0 / n) for n in (1, 2, 4, 8)])
    assert min(fitted.weights) >= 0


def test_one_row_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    assert cost_model().simulated_s([(Lengths(10, 20, True), 5)]) == 5


@pytest.mark.parametrize(("tokens_per_sample", "steps"), [(1.0, 12), (1.5, 8), (2.0, 6), (2.4, 5), (50.0, 1)])
def test_forced_tokens_take_no_step_of_their_own(tokens_per_sample: float, steps: int) -> None:
    rows = [(Lengths(10, 20, False), 12)]
    assert cost_model().simulated_s(rows, tokens_per_sample=tokens_per_sample) == steps
    assert cost_model().engine_s([rows[0][0]], 1, ExpectedLengths("known", (12,), tokens_per_sample)) == steps


def test_a_prompt_beyond_the_budget_takes_several_steps() -> None:
    assert cost_model().simulated_s([(Lengths(200, 1, True), 1)]) == 4  # 200 tokens in chunks of 64


def test_rows_beyond_the_sample_are_charged_at_its_rate() -> None:
    sample = [Lengths(8, 32, True)] * 64
    lengths = ExpectedLengths("fixed")
    whole = cost_model().engine_s(sample, 64, lengths)
    assert cost_model().engine_s(sample, 640, lengths) == pytest.approx(10 * whole, rel=0.1)


def test_a_shared_beginning_is_charged_once() -> None:
    rows = [(Lengths(64, 1, True), 1)] * 8
    apart, together = cost_model().simulated_s(rows), cost_model().simulated_s(rows, shared=48)
    assert apart == 8  # each prompt fills a step
    assert together < apart


def test_a_row_that_can_never_run_costs_nothing() -> None:
    assert cost_model().simulated_s([(Lengths(512, 1, True), 1)]) == 0


def test_lengths_of_rows_that_all_ended_are_taken_as_they_are() -> None:
    found = ExpectedLengths.observed([3, 5, 10], [])
    assert found is not None
    assert found.values == (3, 5, 10)


def test_unfinished_rows_raise_the_expected_length() -> None:
    found = ExpectedLengths.observed([10] * 10, [30] * 10)
    assert found is not None
    assert sum(found.values) / len(found.values) == pytest.approx(40, rel=0.05)


def test_where_no_row_ended_nothing_is_claimed() -> None:
    assert ExpectedLengths.observed([], [100]) is None


def test_fixed_rows_are_reckoned_at_their_length_whatever_is_expected() -> None:
    lengths = ExpectedLengths.around("given", 5)
    assert lengths.of_row(0, 40, True) == 40
    assert lengths.of_row(0, 40, False) == 5


def surveyed(job: JobMaker, rows: list[dict[str, Any]]) -> Survey:
    job.write(rows)
    spec = job.spec()
    where = replace(spec.input, prompt=None, prompt_token_ids="prompt_token_ids")
    info = read_model(spec)
    selected = RowRange(open_source(where), WHOLE)
    survey = Survey(RowValidator(where, info.builder(replace(spec, input=where)), UniqueIds()), 512)
    survey.take(selected.read())
    return survey


def test_what_the_engine_computes_once_is_not_reckoned_twice(job: JobMaker) -> None:
    shared = list(range(100, 164))  # two blocks
    rows = [{"id": i, "prompt_token_ids": [*shared, 200 + i]} for i in range(8)]
    found = surveyed(job, [*rows, *({**row, "id": f"again-{row['id']}"} for row in rows)])
    assert (found.num_good, found.computed_rows) == (16, 8)
    assert found.shared_tokens_per_row == pytest.approx(7 * 64 / 8, abs=1)


def test_a_row_that_only_scores_choices_is_played_out_too() -> None:
    assert cost_model().simulated_s([(Lengths(10, 0, True), 0)]) == 1


def test_every_sample_of_a_row_counts_among_its_output(job: JobMaker) -> None:
    rows = [
        {"id": i, "prompt_token_ids": [5, i + 6], "sampling": {"n": 3, "temperature": t}} for i, t in ((0, 1), (1, 0))
    ]
    found = surveyed(job, [{**row, "max_tokens": 10} for row in rows])
    assert found.outputs.total() == 3 + 1  # greedy samples are all alike


def test_identical_rows_that_are_sampled_are_all_reckoned(job: JobMaker) -> None:
    rows = [{"id": i, "prompt_token_ids": [5, 6, 7], "sampling": {"temperature": 1.0}} for i in range(4)]
    assert surveyed(job, rows).computed_rows == 4


def calibrated(spec: JobSpec, seconds: float) -> Forecast:
    info = read_model(spec)
    spec = info.resolved(spec)
    rows = RowRange(open_source(spec.input), WHOLE)
    survey = Survey(RowValidator(spec.input, info.builder(spec), UniqueIds()), 512)
    survey.take(rows.read())
    return calibrate(spec, info, survey, began=time.monotonic(), seconds=seconds)


def test_calibration_counts_forced_tokens(job: JobMaker) -> None:
    """Two texts of ten tokens or more, of which one is sampled, or none where the text is known from the beginning."""
    for choices, tokens_per_sample in ((["yes, it certainly is", "no, it is certainly not"], 8), (["nothing else"], 2)):
        job.write(rows_of(20))
        spec = job.spec(sampling={"max_tokens": 40, "structured_outputs": {"choice": choices}}, engine={"threads": 1})
        found = calibrated(spec, 0.1)
        assert found.lengths.values
        assert found.lengths.tokens_per_sample >= tokens_per_sample


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_calibration_runs_real_steps_and_estimates_the_job(job: JobMaker, max_tokens: int) -> None:
    job.write(rows_of(5))
    spec = job.spec(engine={"threads": 1}, sampling={"max_tokens": max_tokens})
    found = calibrated(spec, 0.5)
    assert found.lengths.basis == "5 sampled rows run to their end"
    assert found.estimate is not None
    assert 0 < found.estimate.engine_s < found.estimate.wall_s


def test_calibration_runs_texts_as_a_job_for_vectors_does(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, asked = Engine.submit, []

    def noted(self: Engine, request: Request) -> Any:
        asked.append(request)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit", noted)
    job.write(rows_of(5))
    spec = replace(job.spec(engine={"threads": 1}), sampling=SamplingParams(), embed=EmbedSpec("last"))
    found = calibrated(spec, 0.1)
    assert found.estimate is not None
    assert found.estimate.engine_s > 0
    assert len(asked) > 5
    assert {(request.pooling, request.params.max_tokens) for request in asked} == {("last", 0)}


@pytest.mark.parametrize("parts", [{}, {"overlaps": True, "fetch": Device()}], ids=["one by one", "overlapping"])
def test_steps_are_timed_with_their_own_work(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(30, seed=1, params=SamplingParams(ignore_eos=True))
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 24}
    engine = engine_for(tiny_model(), num_blocks=90, block_size=8, parts=parts, **sizes)
    launched, forward = [], engine.runner.run

    def run(schedule: Schedule, pending: PendingTokens | None) -> torch.Tensor:
        launched.append(StepWork.of(schedule))
        return forward(schedule, pending)

    monkeypatch.setattr(engine.runner, "run", run)
    probe = _Probe(engine)
    probe.run(requests, time.monotonic() + 60)
    probe.run(requests, time.monotonic())
    assert [work for work, _ in probe.steps] == launched
    assert sum(work.logits for work in launched) >= sum(request.params.max_tokens for request in requests)
    assert not engine.flush() and not engine.has_work
