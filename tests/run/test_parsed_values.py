"""Jobs whose texts are JSON: the value beside the text in every format, over markers, samples, resumes and retries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import THINKING
from input_helpers import write_tokenizer
from repeats import slow
from run_helpers import REPOSITORY, JobMaker, quiet, rows_of, updating
from stub_engine import answer_with

from batchgen.cli.main import call
from batchgen.config.job import JobSpec
from batchgen.core.errors import ResumeMismatch
from batchgen.core.records import Request
from batchgen.output.rundir import RunDir
from batchgen.run.reports import read_report
from batchgen.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "of": {"type": "string"}}, "required": ["n"]}
FORMATS = ("jsonl", "parquet", "openai-batch")


def value(index: int) -> dict[str, Any]:
    return {"n": index, "of": "é"}


@pytest.fixture(autouse=True)
def answers(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is answered with reasoning, which quotes JSON, and its ``value``, in bytes."""
    tokenizer = Tokenizer.load(write_tokenizer(job.folder / "tokenizer", chat_template=THINKING))

    def text_of(asked: Request) -> str:
        thought = '<think>{"n": 0}</think>\n' if asked.params.max_tokens > 100 else ""
        return thought + json.dumps(value(asked.key), ensure_ascii=False)

    answer_with(monkeypatch, tokenizer, text_of)


def spec_of(job: JobMaker, asked: Any = None, **sections: Any) -> JobSpec:
    output = {"path": str(job.output), "parse": ["json"], **sections.pop("output", {})}
    asked = {"json": SCHEMA} if asked is None else asked
    sampling = {"max_tokens": 100, "structured_outputs": json.dumps(asked), **sections.pop("sampling", {})}
    return job.spec(model={"tokenizer": str(job.folder / "tokenizer")}, output=output, sampling=sampling, **sections)


def parsed_of(job: JobMaker) -> list[Any]:
    rows = job.outputs()
    if "response" in rows[0]:
        return [row["response"]["body"]["choices"][0]["message"]["parsed"] for row in rows]
    return [row["parsed"] for row in rows]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("splits", [False, True])
def test_the_value_is_that_of_what_follows_the_marker(job: JobMaker, form: str, splits: bool) -> None:
    job.write(rows_of(5))
    output = {"format": form, "parse": ["json", "reasoning"] if splits else ["json"]}
    job.run(spec_of(job, {"json": SCHEMA, "after": "</think>"}, output=output, sampling={"max_tokens": 500}))
    assert parsed_of(job) == [value(i) for i in range(5)]


@pytest.mark.parametrize(("splits", "found"), [(False, None), (True, value(0))])
def test_the_value_of_a_free_row_is_that_of_its_text(job: JobMaker, splits: bool, found: Any) -> None:
    job.write(rows_of(1))
    output = {"parse": ["json", "reasoning"] if splits else ["json"]}
    job.run(spec_of(job, {}, output=output, sampling={"max_tokens": 500}))
    assert parsed_of(job) == [found]


def test_a_row_with_a_marker_of_its_own_is_parsed_behind_it(job: JobMaker) -> None:
    asked = {"json": SCHEMA, "after": "/think>"}
    job.write([{**rows_of(1)[0], "sampling": {"structured_outputs": asked, "max_tokens": 500}}])
    job.run(spec_of(job, {}))
    assert parsed_of(job) == [value(0)]


def test_a_table_has_the_types_of_the_values_and_rows_cut_off_have_no_value(job: JobMaker) -> None:
    job.write([{**row, "sampling": {"max_tokens": 5 if i % 2 else 100}} for i, row in enumerate(rows_of(6))])
    job.run(spec_of(job, output={"format": "parquet"}))
    table = pq.read_table(job.output / "outputs.parquet")
    assert table.schema.field("parsed").type == pa.struct([("n", pa.int64()), ("of", pa.string())])
    assert table["parsed"].to_pylist() == [None if i % 2 else value(i) for i in range(6)]
    assert table["complete"].to_pylist() == [not i % 2 for i in range(6)]


@pytest.mark.parametrize("form", ["parquet", slow("openai-batch")])
def test_a_resumed_and_an_updated_run_have_the_values_of_an_undisturbed_one(job: JobMaker, form: str) -> None:
    job.write(rows_of(30))
    spec = spec_of(job, output={"format": form})
    job.run(spec, fails=frozenset({3, 28}))
    assert job.run(spec, updating()).exit_code == 0
    assert parsed_of(job) == [value(i) for i in range(30)]
    job.output = job.folder / "resumed"
    spec = spec_of(job, output={"format": form})
    assert job.run(spec, quiet(max_total_tokens=800)).exit_code == 75
    with pytest.raises(ResumeMismatch, match=r'output\.parse: was \["json"\], now \[\]'):
        job.run(spec_of(job, output={"format": form, "parse": []}))
    assert job.run(spec).exit_code == 0
    assert parsed_of(job) == [value(i) for i in range(30)]


@pytest.mark.parametrize("form", [slow("jsonl"), "parquet", slow("openai-batch")])
def test_merged_shards_have_the_values_and_types_of_the_whole_run(job: JobMaker, form: str) -> None:
    job.write(rows_of(12))
    folders = job.shards(spec_of(job, output={"format": form}))
    assert call(["merge", *map(str, folders), "-o", str(job.output)]) == 0
    assert parsed_of(job) == [value(i) for i in range(12)]


def test_samples_have_values_of_their_own(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run(spec_of(job, {}, sampling={"n": 2, "temperature": 1.0}))
    for index, row in enumerate(job.outputs()):
        assert [sample["parsed"] for sample in row["samples"]] == [value(index), None]  # the stub's second is cut off


def test_without_the_key_there_is_no_value(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run(spec_of(job, output={"parse": []}))
    assert [("parsed" in row, row["complete"]) for row in job.outputs()] == [(False, True)] * 2


def test_the_sample_job_makes_a_table_of_rows_that_fit_its_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((REPOSITORY / "sample_data" / "order.schema.json").read_bytes())
    assert call(["run", str(REPOSITORY / "jobs" / "extract.toml"), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    table = pq.read_table(tmp_path / "out" / "outputs.parquet")
    item = pa.struct([("name", pa.string()), ("color", pa.string()), ("quantity", pa.int64())])
    kind = table.schema.field("parsed").type
    assert {field.name: field.type for field in kind} == {
        **{"customer": pa.string(), "city": pa.null(), "items": pa.list_(pa.field("element", item))},
        **{"budget": pa.int64(), "urgent": pa.bool_()},
    }
    rows = table.to_pylist()
    assert len(rows) == 20 and len({row["text"] for row in rows}) > 10
    for row in rows:
        assert (row["complete"], row["finish_reason"]) == (True, "stop")
        assert json.loads(row["text"]) == row["parsed"]
        jsonschema.validate(row["parsed"], schema)
    found = read_report(RunDir(tmp_path / "out"))["structured"]
    assert (found["samples"], found["incomplete"]) == (20, 0)
    assert found["forced_share"] > 0.3
