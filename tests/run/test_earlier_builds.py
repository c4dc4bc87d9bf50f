"""Run directories of earlier builds: taken up as they were begun, or refused with the way to go on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from run_helpers import JobMaker, quiet, read_lines, rows_of
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ResumeMismatch
from batchgen.output.rundir import RunDir
from batchgen.run.reports import read_report


def without_columns_key(job: JobMaker) -> None:
    """Let ``job.json`` be that of a build which took every column named like a sampling key as one."""
    path = job.output / "job.json"
    manifest = json.loads(path.read_bytes())
    del manifest["output_keys"]["sampling.columns"]
    del manifest["job"]["sampling"]["columns"]
    path.write_text(json.dumps(manifest))


def test_a_run_whose_columns_were_sampling_values_goes_on_with_them_only(job: JobMaker) -> None:
    job.write([{**row, "max_tokens": 2} for row in rows_of(60)])
    taken = {"columns": ["*"]}
    assert job.run(job.spec(sampling=taken), quiet(max_total_tokens=100)).exit_code == 75
    without_columns_key(job)
    with pytest.raises(ResumeMismatch, match=r"columns max_tokens as sampling values.*--sampling-columns '\*'"):
        job.run()
    assert job.run(job.spec(sampling=taken)).exit_code == 0
    assert max(row["usage"]["completion_tokens"] for row in job.outputs()) == 2


def test_a_run_without_such_columns_goes_on(job: JobMaker) -> None:
    job.write(rows_of(60))
    assert job.run(options=quiet(max_total_tokens=100)).exit_code == 75
    without_columns_key(job)
    assert job.run().exit_code == 0


def test_a_run_of_a_build_without_integers_goes_on_as_it_was_and_with_no_other_weights(job: JobMaker) -> None:
    job.write(rows_of(60))
    assert job.run(options=quiet(max_total_tokens=100)).exit_code == 75
    path = job.output / "job.json"
    manifest = json.loads(path.read_bytes())
    for name in ("weights", "activations"):
        del manifest["output_keys"][f"model.{name}"], manifest["job"]["model"][name]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ResumeMismatch, match=r'model\.weights: was .*, now "int8"'):
        job.run(job.spec(model={"weights": "int8"}))
    assert job.run().exit_code == 0


def test_ids_that_were_compared_as_values_are_compared_as_texts_from_their_first_row_on(job: JobMaker) -> None:
    rows = [{**row, "id": i} for i, row in enumerate(rows_of(80))]
    job.write([*rows, {**rows[0], "id": "3"}])
    spec = job.spec(output={"format": "openai-batch"})
    assert job.run(spec, quiet(max_total_tokens=200)).exit_code == 75
    with closing(sqlite3.connect(job.output / "journal" / "ids.sqlite", isolation_level=None)) as database:
        database.execute("DELETE FROM ids")
        database.executemany("INSERT INTO ids VALUES (?, ?)", [(b"%d" % i, i) for i in range(80)])
        database.execute("PRAGMA user_version = 1")
    assert job.run(spec).exit_code == 3
    assert [(letter["index"], letter["error"]["code"]) for letter in job.errors()] == [(80, "duplicate_id")]


def test_a_retry_of_openai_outputs_without_times_keeps_those_of_the_report(job: JobMaker) -> None:
    job.write(rows_of(10))
    job.run(job.spec(output={"format": "openai-batch", "expected": "answer"}), fails=frozenset({4}))
    path = job.output / "outputs.jsonl"
    lines: list[dict[str, Any]] = read_lines(path)
    for line in lines:
        del line["timings"], line["kept_columns"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    before = read_report(RunDir(job.output))
    assert call(["retry", str(job.output), "-q"], engine_factory=stub_factory()) == 0
    after = read_report(RunDir(job.output))
    assert after["rows"]["done"] == 10
    assert {key: after[key] for key in ("latency_s", "slowest", "accuracy")} == {
        key: before[key] for key in ("latency_s", "slowest", "accuracy")
    }
