"""``outputs.csv``: a spreadsheet of the rows with what the model gave, which is no source of anything."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from run_helpers import JobMaker, rows_of

from batchgen.output.formats.delimited import CsvFormat
from batchgen.run.invocation import RunOptions

ROWS = [{**row, "note": note} for row, note in zip(rows_of(4), ["a;b", 'say "hi"', "two\nlines", None], strict=True)]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, strict=True))


@pytest.mark.parametrize("has_id", [True, False])
def test_a_table_has_the_inputs_columns_and_then_the_answers(job: JobMaker, has_id: bool) -> None:
    job.write(ROWS)
    keys = {"columns": ["*"], **({} if has_id else {"id": None})}
    job.run(job.spec(input=keys, output={"path": str(job.folder / "lines")}))
    job.run(job.spec(input=keys, output={"format": "csv"}))
    records = [json.loads(line) for line in (job.folder / "lines" / "outputs.jsonl").read_text().splitlines()]
    found = table(job.output / "outputs.csv")
    kept = ["question", "answer", "note"] if has_id else ["input_id", "question", "answer", "note"]
    assert list(found[0]) == [*(["id"] if has_id else []), *kept, "text", "finish_reason"]
    for row, record in zip(found, records, strict=True):
        assert row == {name: "" if record[name] is None else str(record[name]) for name in row}


def test_what_no_cell_can_hold_is_json_text() -> None:
    file = io.BytesIO()
    record = {"id": 1, "index": 0, "text": "", "parsed": {"ü": [1]}, "n": 2.5, "on": True, "l": ["a"], "timings": {}}
    CsvFormat(has_id=True, has_answer=False, has_bom=False).write(file, [json.dumps(record).encode()])
    assert file.getvalue().decode() == 'id,n,on,l,text,parsed\r\n1,2.5,true,"[""a""]",,"{""ü"": [1]}"\r\n'


@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_a_mark_of_the_input_stands_in_the_output_too(job: JobMaker, mark: str) -> None:
    path = job.folder / "rows.csv"
    path.write_text(f"{mark}id;question\n1;é\n", encoding="utf-8")
    job.run(job.spec(input={"path": [str(path)]}, output={"format": "csv"}))
    assert (job.output / "outputs.csv").read_text(encoding="utf-8").startswith(f"{mark}id,")


def test_a_table_in_another_encoding_becomes_one_that_spreadsheets_open(job: JobMaker) -> None:
    path = job.folder / "rows.csv"
    path.write_bytes("id;question\n1;Größe\n".encode("cp1252"))
    keys = {"path": [str(path)], "encoding": "cp1252", "columns": ["*"]}
    assert job.run(job.spec(input=keys, output={"format": "csv"})).exit_code == 0
    assert (job.output / "outputs.csv").read_bytes().startswith("\ufeffid,question,text".encode())
    assert table(job.output / "outputs.csv")[0]["question"] == "Größe"


def test_a_job_without_results_has_a_header(job: JobMaker) -> None:
    job.write([{"id": 1, "question": ""}])
    job.run(job.spec(output={"format": "csv"}))
    assert (job.output / "outputs.csv").read_text() == "id,text,finish_reason\n"


def test_the_format_may_change_and_nothing_is_computed_again(job: JobMaker) -> None:
    job.write(ROWS)
    job.run(job.spec(output={"format": "csv"}))
    for name in ("jsonl", "csv"):
        job.run(job.spec(output={"format": name}), RunOptions(progress="quiet", update=True))
        assert [path.name for path in job.output.glob("outputs.*")] == [f"outputs.{name}"]
        assert not job.engines, "a run begins the list anew"


def test_a_choice_stands_beside_its_probability_and_no_column_of_that_name_is_lost() -> None:
    file = io.BytesIO()
    choices = [{"text": "a", "prob": 0.25}, {"text": "b", "prob": 0.75}]
    rows = [{"id": 1, "text": "b", "prob": "own", "choices": choices, "finish_reason": "stop"}]
    CsvFormat(has_id=False, has_answer=False, has_bom=False).write(file, [json.dumps(row).encode() for row in rows])
    assert file.getvalue().decode() == "input_prob,text,prob,finish_reason\r\nown,b,0.75,stop\r\n"
    file = io.BytesIO()
    more = json.dumps({"prob": "own", "input_prob": "other", **rows[0]}).encode()
    CsvFormat(has_id=False, has_answer=False, has_bom=False).write(file, [more])
    expected = "input_input_prob,input_prob,text,prob,finish_reason\r\nown,other,b,0.75,stop\r\n"
    assert file.getvalue().decode() == expected
    file = io.BytesIO()
    CsvFormat(has_id=False, has_answer=False, has_bom=False).write(file, [b'{"text": "b", "prob": "own"}'])
    assert file.getvalue().decode() == "prob,text\r\nown,b\r\n"
