"""Pipelines of Ray Data: rows get what a run gives them, in full batches, and a lost actor loses and doubles none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import is_inside
from run_helpers import ENVIRONMENT, MODEL, JobMaker, quiet, read_lines

import batchgen.ray
from batchgen.core.errors import UsageError
from batchgen.output.rundir import RunDir
from batchgen.ray import Generator, generate
from batchgen.run.job import run_job
from batchgen.run.reports import read_report

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # Ray warns of its own names
QUESTIONS = MODEL.parent / "questions.jsonl"
JOB: dict[str, Any] = {
    "model": str(MODEL),
    "prompt": "{question}",
    "sampling": {"max_tokens": 24, "temperature": 0.7},
    "key": "row",
    "engine": {"max_num_seqs": 64},
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, with a cluster of two CPUs."""
    if not is_inside():
        yield None
        return
    os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]  # of what Ray starts
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def rows() -> list[dict[str, Any]]:
    """Sample questions, two that cannot run among them."""
    found = [{"row": number, **row} for number, row in enumerate(read_lines(QUESTIONS))]
    found[7]["question"] = ""
    found[99]["question"] = None
    return found


def answered_by_a_run(folder: Path) -> tuple[dict[int, Any], float]:
    """Text or error code by row, and the mean number of sequences a step."""
    job = JobMaker(folder)
    job.write(rows())
    spec = job.spec(
        model={"path": str(MODEL)},
        input={"prompt": "{question}", "id": None},
        sampling=JOB["sampling"],
        engine={**JOB["engine"], "threads": 1},
    )
    run_job(spec, quiet())
    found = {row["index"]: row["text"] for row in read_lines(job.output / "outputs.jsonl")}
    found |= {row["index"]: row["code"] for row in read_lines(job.output / "errors.jsonl")}
    return found, read_report(RunDir(job.output))["occupancy"]["sequences"]


def watched(act: Callable[[Any], object]) -> type[Generator]:
    """A generator of which ``act`` sees the engine after each batch; a local class, which Ray carries by value."""

    class Watched(Generator):
        async def __call__(self, batch: Any) -> Any:
            found = await super().__call__(batch)
            act(self._rows)
            return found

    return Watched


def text_or_code(found: list[dict[str, Any]]) -> dict[int, Any]:
    return {row["row"]: row["text"] if row["error"] is None else row["error"].split(":")[0] for row in found}


def test_rows_of_a_pipeline_get_what_a_run_gives_in_batches_as_full(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, mean_batch = answered_by_a_run(tmp_path)
    file = tmp_path / "stats.json"

    def note(engine: Any) -> None:
        file.write_text(json.dumps([engine.stats.steps_s, engine.stats.sequences_s]))

    monkeypatch.setattr(batchgen.ray, "Generator", watched(note))
    found = generate(ray.data.read_json(str(tmp_path / "input.jsonl")), **JOB).take_all()
    assert len(found) == len(alone) == 300
    assert text_or_code(found) == alone
    steps_s, sequences_s = json.loads(file.read_text())
    assert sequences_s / steps_s >= 0.8 * mean_batch
    print(f"mean batch {sequences_s / steps_s:.1f}, of a run {mean_batch:.1f}")


def test_a_killed_actor_loses_and_doubles_no_row(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = answered_by_a_run(tmp_path)
    mark, kill = tmp_path / "killed", signal.SIGKILL

    def die_once(engine: Any) -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), kill)

    monkeypatch.setattr(batchgen.ray, "Generator", watched(die_once))
    found = generate(ray.data.read_json(str(tmp_path / "input.jsonl")), workers=2, **JOB).take_all()
    assert mark.exists()
    assert len(found) == 300
    assert text_or_code(found) == alone


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_batches_of_other_formats_are_taken(ray: Any, batch_format: str) -> None:
    few = [{"row": number, "ids": [1, 9 + number], "text": "own"} for number in range(3)]
    job = {**JOB, "prompt": None, "input": {"prompt_token_ids": "ids"}, "sampling": {"max_tokens": 3}}
    ds = ray.data.from_items(few).map_batches(
        Generator,
        fn_constructor_kwargs=job,
        batch_size=2,
        batch_format=batch_format,
        num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    found = ds.take_all()
    assert sorted(row["row"] for row in found) == [0, 1, 2]
    assert all(row["error"] is None and row["prompt_tokens"] == 2 and row["input_text"] == "own" for row in found)


def test_an_impossible_job_is_refused_before_anything_starts(ray: Any) -> None:
    with pytest.raises(UsageError, match="name a column of unique values as key"):
        generate(ray.data.from_items(rows()), **{**JOB, "key": None})
