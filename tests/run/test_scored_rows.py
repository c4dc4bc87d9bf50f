"""Choices travel from a row to the engine and its scores back into the row's record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from run_helpers import JobMaker, rows_of
from stub_engine import StubEngine

from batchgen.config.job import JobSpec
from batchgen.core.records import FinishReason, Request, Result
from batchgen.run.backend import Backend
from batchgen.run.job import run_job
from batchgen.run.loader import ModelInfo


class ChoosingEngine(StubEngine):
    """Likes the choice with the fewest tokens best."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in reversed(list(requests)):
            scores = tuple(-float(len(tokens)) for tokens in request.choices)
            best = min(request.choices, key=len)
            means = (-1.0,) * len(scores)
            yield Result(request.key, 5, best, FinishReason.STOP, choice_logprobs=scores, choice_means=means)


def choosing(spec: JobSpec, model: ModelInfo) -> Backend:
    return Backend(ChoosingEngine(), {"dtype": "float32", "device": "stub"}, 1)


def test_the_choices_of_the_job_or_of_the_row_come_back_with_their_scores(job: JobMaker) -> None:
    rows: list[dict[str, Any]] = [{**row, "sampling": {}} for row in rows_of(3)]
    rows[1]["choices"] = ["zzzzzz", "q"]
    rows[2]["choices"] = ["only one"]
    job.write(rows)
    spec = job.spec(sampling={"choices": ["a", "zzzz"], "columns": ["choices"]}, input={"keep_columns": ["choices"]})
    run_job(spec, engine_factory=choosing)
    first, second = job.outputs()
    assert (first["text"], [choice["text"] for choice in first["choices"]]) == ("a", ["a", "zzzz"])
    assert (second["text"], [choice["text"] for choice in second["choices"]]) == ("q", ["zzzzzz", "q"])
    assert second["choices"][1]["logprob"] > second["choices"][0]["logprob"]
    assert second["input_choices"] == ["zzzzzz", "q"]
    (error,) = job.errors()
    assert error["code"] == "bad_param" and error["message"].startswith("choices = ['only one'] must be a list of 2")
