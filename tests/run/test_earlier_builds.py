"""Run directories of earlier builds: taken up as they were begun, or refused with the way to go on."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, quiet, read_lines, rows_of, without_timings
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ResumeMismatch
from batchgen.output.manifest import Manifest
from batchgen.output.publish import identity
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


def test_a_run_begun_with_another_default_of_what_changed_outputs_then_goes_on(job: JobMaker) -> None:
    job.write(rows_of(60))
    assert job.run(options=quiet(max_total_tokens=100)).exit_code == 75
    path = job.output / "job.json"
    manifest = json.loads(path.read_bytes())
    manifest["output_keys"]["model.batch_invariant"] = manifest["job"]["model"]["batch_invariant"] = False
    path.write_text(json.dumps(manifest))
    assert job.run(options=quiet(max_total_tokens=100)).exit_code == 75
    assert identity(RunDir(job.output).read_manifest()) == identity(Manifest.from_bytes(json.dumps(manifest).encode()))
    assert job.run().exit_code == 0
    assert len(job.outputs()) == 60
    path.write_text(json.dumps(manifest))
    assert job.run().exit_code == 0, "a finished one is not begun with another job either"


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


FORMATS = {"jsonl": "jsonl", "parquet": "parquet", "openai-batch": "jsonl"}


def without_keys(job: JobMaker, *keys: str) -> None:
    """Let ``job.json`` be that of a build that knew no such keys."""
    path = job.output / "job.json"
    manifest = json.loads(path.read_bytes())
    for key in keys:
        section, _, name = key.partition(".")
        del manifest["output_keys"][key], manifest["job"][section][name]
    path.write_text(json.dumps(manifest))


def kept_names(job: JobMaker, form: str) -> set[frozenset[str]]:
    """The names of the columns kept in each row."""
    rows = without_timings(job.output / f"outputs.{FORMATS[form]}")
    kept = [row.get("kept_columns", row) for row in rows]
    return {frozenset(name for name, value in row.items() if value in ("r", "c", {"p": 1})) for row in kept}


@pytest.mark.parametrize(
    ("form", "unknown", "names"),
    [
        ("jsonl", [], {"input_reasoning", "input_complete", "input_parsed"}),
        ("jsonl", ["output.parse_json"], {"input_reasoning", "complete", "parsed"}),
        ("parquet", ["output.parse_json", "output.split_reasoning"], {"reasoning", "complete", "parsed"}),
        ("openai-batch", ["output.parse_json", "output.split_reasoning"], {"reasoning", "complete", "parsed"}),
    ],
)
def test_columns_named_like_newer_fields_keep_the_names_the_run_began_with(
    job: JobMaker, form: str, unknown: list[str], names: set[str]
) -> None:
    job.write([{**row, "reasoning": "r", "complete": "c", "parsed": {"p": 1}} for row in rows_of(60)])
    spec = job.spec(input={"keep_columns": ["*"]}, output={"format": form, "expected": "reasoning"})
    assert job.run(spec, quiet(max_total_tokens=1)).exit_code == 75
    shutil.rmtree(job.output / "journal")
    without_keys(job, *unknown)
    for limit in (100, 200):  # what the first resume writes into job.json is what the second one finds
        assert job.run(spec, quiet(max_total_tokens=limit)).exit_code == 75
    assert job.run(spec, fails=frozenset({58})).exit_code == 3
    assert call(["retry", str(job.output), "-q"], engine_factory=stub_factory()) == 0
    assert kept_names(job, form) == {frozenset(names)}
    report = read_report(RunDir(job.output))
    assert (report["accuracy"]["total"], "structured" in report) == (60, False)
    path = next(job.output.glob("outputs.*"))
    if form == "parquet":
        assert not any(field.metadata for field in pq.read_schema(path) if field.name in names)
    if form == "openai-batch":
        choices = [line["response"]["body"]["choices"][0] for line in read_lines(path)]
        assert {*choices[0], *choices[0]["message"]}.isdisjoint({"complete", "parsed", "reasoning_content"})


def test_an_earlier_run_is_not_resumed_with_newer_fields(job: JobMaker) -> None:
    job.write(rows_of(60))
    assert job.run(options=quiet(max_total_tokens=100)).exit_code == 75
    without_keys(job, "output.parse_json")
    with pytest.raises(ResumeMismatch, match=r"output\.parse_json: was \(not there\), now true"):
        job.run(job.spec(output={"parse_json": True}))


def test_columns_named_like_newer_sampling_keys_are_none_in_a_run_that_took_all_columns(job: JobMaker) -> None:
    later = {"response_format": "markdown", "guided_choice": "none", "logit_bias": "left", "normalize": "no"}
    job.write([{**row, **later, "preset": None, "max_tokens": 2} for row in rows_of(60)])
    spec = job.spec(sampling={"columns": ["*"]})
    assert job.run(spec, replace(quiet(), max_error_rate=0.0)).exit_code == 3
    assert {error["code"] for error in job.errors()} == {"bad_param"}
    shutil.rmtree(job.output / "journal")
    without_keys(job, *(f"sampling.{name}" for name in ("structured_outputs", "logit_bias", "normalize")))
    assert job.run(spec, quiet(max_total_tokens=100)).exit_code == 75
    assert job.run(spec, fails=frozenset({58})).exit_code == 3
    assert call(["retry", str(job.output), "-q"], engine_factory=stub_factory()) == 0
    assert max(row["usage"]["completion_tokens"] for row in job.outputs()) == 2
