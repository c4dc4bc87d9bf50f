"""From a sample of rows to the time of a job: rates of steps, and what is expected of output lengths."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from run_helpers import JobMaker, rows_of

from batchgen.config.job import JobSpec
from batchgen.config.output import EmbedSpec
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import WHOLE
from batchgen.engine import Engine
from batchgen.engine.stats import EngineStats, Point
from batchgen.input.ids import RowValidator, UniqueIds
from batchgen.input.source import RowRange, open_source
from batchgen.plan.calibrate import _Rates, calibrate
from batchgen.plan.estimate import ExpectedLengths, Forecast, Survey
from batchgen.run.loader import ModelInfo, read_model


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


def surveyed(spec: JobSpec, info: ModelInfo) -> Survey:
    with closing(UniqueIds()) as ids:
        survey = Survey(RowValidator(spec.input, info.builder(spec), ids), 512)
        survey.take(RowRange(open_source(spec.input), WHOLE).read())
    return survey


def test_every_sample_of_a_row_counts_among_its_output(job: JobMaker) -> None:
    rows = [
        {"id": i, "prompt_token_ids": [5, i + 6], "sampling": {"n": 3, "temperature": t}} for i, t in ((0, 1), (1, 0))
    ]
    job.write({**row, "max_tokens": 10} for row in rows)
    spec = job.spec(input={"prompt": None, "prompt_token_ids": "prompt_token_ids"})
    assert surveyed(spec, read_model(spec)).outputs.total() == 3 + 1  # greedy samples are all alike


def calibrated(spec: JobSpec, seconds: float) -> Forecast:
    info = read_model(spec)
    spec = info.resolved(spec)
    return calibrate(spec, info, surveyed(spec, info), began=time.monotonic(), seconds=seconds)


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


def test_calibration_ends_in_time_and_expects_what_it_has_seen(job: JobMaker) -> None:
    job.write(rows_of(5))
    spec = job.spec(engine={"threads": 1}, sampling={"max_tokens": 400, "ignore_eos": True})
    found = calibrated(spec, 0.05)
    assert found.lengths.basis == "fixed by the job"
    assert found.estimate is not None and found.estimate.engine_s > 0


def test_a_job_that_only_scores_labels_is_calibrated_too(job: JobMaker) -> None:
    job.write(rows_of(5))
    found = calibrated(job.spec(engine={"threads": 1}, classify={"labels": ["yes", "no"]}), 0.5)
    assert found.estimate is not None and found.estimate.engine_s > 0


def stats_of(steps: list[tuple[float, int, int, int]]) -> EngineStats:
    """The counts of steps of (seconds, tokens of prompts, others, sequences), from the instant 10 on."""
    stats, at = EngineStats(), 10.0
    for span_s, prefill, decode, sequences in steps:
        stats.series.add(Point(at, span_s, 1, prefill + decode, prefill, sequences, 0.1))
        at += span_s
    return stats


def test_prompts_and_answers_have_rates_of_full_steps_and_the_end_counts_once() -> None:
    steps = [(9.0, 1, 1, 1), (2.0, 20, 0, 8), (2.0, 10, 10, 8), (1.0, 0, 8, 8), (0.5, 0, 4, 4), (0.7, 0, 2, 2)]
    rates = _Rates.of(stats_of(steps), began_at=10.0)
    assert rates.prefill_s == pytest.approx(3.0 / 30), "the step before is of the warm-up"
    assert rates.decode_s == pytest.approx(2.5 / 22)
    assert (rates.tail_s, rates.tail_tokens) == (pytest.approx(0.7), 2)


def test_a_job_that_is_its_sample_takes_what_the_sample_took() -> None:
    rates = _Rates.of(stats_of([(2.0, 20, 0, 8), (1.0, 0, 8, 8), (0.7, 0, 2, 2)]), began_at=0.0)
    assert rates.prefill_s * 20 + rates.decode_s * (10 - rates.tail_tokens) + rates.tail_s == pytest.approx(3.7)
