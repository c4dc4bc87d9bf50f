"""A job with a model of every family: plan, run, an orderly stop and resume, preemption, report; all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from families import RAW, raw_config
from repeats import slow
from run_helpers import MODEL, JobMaker, quiet, rows_of, without_timings
from stub_engine import StubEngine
from tiny_model import write_checkpoint

from batchgen.cli.main import cli
from batchgen.config.job import JobSpec
from batchgen.core.records import FinishReason, Request, Result, Sample
from batchgen.run.job import run_job
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import ModelInfo

VOCAB_SIZE = json.loads((MODEL / "config.json").read_bytes())["vocab_size"]
COUNT = 12


# By default the family of the sample model, and one of another kind of layers.
@pytest.fixture(params=[name if name in ("lfm2", "qwen3_moe") else slow(name) for name in RAW])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder of the family, with random weights and the sample model's tokenizer."""
    folder = tmp_path / request.param
    write_checkpoint(folder, **raw_config(request.param, vocab_size=VOCAB_SIZE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def spec(job: JobMaker, folder: Path, output: str, **engine: int) -> JobSpec:
    model, sampling = {"path": str(folder), "dtype": "float32"}, {"max_tokens": 24, "ignore_eos": True}
    return job.spec(model=model, output={"path": str(job.folder / output)}, sampling=sampling, engine=engine)


def test_a_job_is_planned_stopped_resumed_and_reported(folder: Path, job: JobMaker) -> None:
    job.write(rows_of(COUNT))
    whole = run_job(spec(job, folder, "whole"), quiet())
    assert whole.exit_code == 0
    expected = without_timings(job.folder / "whole" / "outputs.jsonl")
    assert len(expected) == COUNT
    assert all(record["usage"]["completion_tokens"] == 24 for record in expected)

    stopped = spec(job, folder, "stopped", max_num_seqs=3, max_num_batched_tokens=19, block_size=8)
    codes = []
    while not codes or codes[-1] == 75:
        codes.append(run_job(stopped, quiet(max_total_tokens=170)).exit_code)
    assert codes[:2] == [75, 75]
    assert codes[-1] == 0
    assert without_timings(job.folder / "stopped" / "outputs.jsonl") == expected

    flags = ["--model", folder, "--input", job.input, "--prompt", "{question}", "--max-tokens", "24", "--json"]
    planned = CliRunner().invoke(cli, ["plan", *map(str, flags)])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["rows"]["good"] == COUNT


# ---------------------------------------------------------------- labels and their scores


class ChoosingEngine(StubEngine):
    """Likes the label with the fewest tokens best."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in reversed(list(requests)):
            scores = tuple(-float(len(tokens)) for tokens in request.labels)
            best = Sample(min(request.labels, key=len), FinishReason.STOP)
            means = (-1.0,) * len(scores)
            yield Result(request.key, 5, (best,), label_logprobs=scores, label_means=means)


def choosing(spec: JobSpec, model: ModelInfo) -> LoadedEngine:
    return LoadedEngine(ChoosingEngine(), {"dtype": "float32", "device": "stub"}, 1)


def test_the_labels_of_the_job_or_of_the_row_come_back_with_their_scores(job: JobMaker) -> None:
    rows: list[dict[str, Any]] = [{**row, "label": "mine", "sampling": {}} for row in rows_of(3)]
    rows[1]["sampling"]["labels"] = ["zzzzzz", "q"]
    rows[2]["sampling"]["labels"] = ["only one"]
    job.write(rows)
    spec = job.spec(classify={"labels": ["a", "zzzz"]}, input={"columns": ["label"]})
    run_job(spec, engine_factory=choosing)
    first, second = job.outputs()
    assert (first["label"], [*first["scores"]]) == ("a", ["a", "zzzz"])
    assert (second["label"], [*second["scores"]]) == ("q", ["zzzzzz", "q"])
    assert second["score"] == second["scores"]["q"] > second["scores"]["zzzzzz"]
    assert second["input_label"] == "mine"
    (error,) = job.errors()
    assert error["code"] == "bad_param" and error["message"].startswith("labels = ['only one'] must be a list of 2")
