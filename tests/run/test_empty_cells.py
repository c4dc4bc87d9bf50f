"""A cell without text is told of in every form of input, and an error row where the prompt has nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, quiet, rows_of, text_model
from stub_engine import stub_factory

import batchgen
from batchgen.cli.main import call
from batchgen.core.errors import ExitCode
from batchgen.output.rundir import RunDir
from batchgen.plan.dry_run import make_plan, render_plan
from batchgen.report.tables import render_report
from batchgen.run.reports import read_report

TABLE = [("a", "first"), ("b", None), (None, "third"), (None, None), ("e", "fifth")]
PROMPT = "{title}: what is {body}?"
Row = dict[str, Any]


def rows(empty: Any) -> list[Row]:
    return [{"title": title or empty, "body": body or empty} for title, body in TABLE]


def csv(folder: Path) -> Path:
    lines = ["title,body", *(f"{title or ''},{body or ''}" for title, body in TABLE)]
    return _written(folder / "rows.csv", "\n".join(lines))


def jsonl(empty: Any) -> Callable[[Path], Path]:
    return lambda folder: _written(folder / "rows.jsonl", "\n".join(map(json.dumps, rows(empty))))


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows(None)), folder / "rows.parquet")
    return folder / "rows.parquet"


def dataframe(empty: Any) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        pandas = pytest.importorskip("pandas")
        return pandas.DataFrame([{name: value or empty for name, value in row.items()} for row in rows(None)])

    return made


FORMS: dict[str, Callable[[Path], Any]] = {
    "CSV": csv,
    "JSONL, null": jsonl(None),
    "JSONL, empty": jsonl(""),
    "JSONL, blank": jsonl(" \n"),
    "JSONL, NaN": jsonl(float("nan")),
    "Parquet": parquet,
    "DataFrame, None": dataframe(None),
    "DataFrame, NaN": dataframe(float("nan")),
    "list": lambda folder: rows(None),
}


def _written(path: Path, text: str) -> Path:
    path.write_text(text + "\n", encoding="utf-8")
    return path


def generated(given: Any, prompt: str | None = PROMPT) -> batchgen.Run:
    return batchgen.generate(
        given, model=text_model(), prompt=prompt, input={"chat_template": "none"}, engine_factory=stub_factory([])
    )


@pytest.mark.filterwarnings("ignore:.* failed")
@pytest.mark.parametrize("form", FORMS)
def test_an_empty_cell_is_the_same_in_every_form_of_input(form: str, tmp_path: Path) -> None:
    run = generated(FORMS[form](tmp_path))
    assert [row["index"] for row in run.rows] == [0, 1, 2, 4]
    assert [(row["index"], row["code"]) for row in run.errors] == [(3, "empty_prompt")]
    assert run.report["empty_fields"] == {"body": 1, "title": 1}


@pytest.mark.filterwarnings("ignore:.* failed")
def test_a_text_that_is_empty_is_an_error_row_in_a_list_or_series_too() -> None:
    pandas = pytest.importorskip("pandas")
    for empty in ("", " ", None, float("nan")):
        for texts in ([{"prompt": "a"}, {"prompt": empty}], pandas.DataFrame({"prompt": ["a", empty]})):
            assert [(row["index"], row["code"]) for row in generated(texts, None).errors] == [(1, "empty_prompt")]


def test_the_only_field_of_a_template_that_is_empty_is_no_prompt(job: JobMaker) -> None:
    job.write([*rows_of(2), {"id": "x", "question": ""}, {"id": "y", "question": None}])
    outcome = job.run(job.spec(input={"prompt": "Is this comment kind? {question}"}))
    assert outcome.exit_code == ExitCode.ROWS_FAILED
    assert [error["message"] for error in job.errors()] == ["question, which the prompt's template names, is empty"] * 2


def test_plan_run_and_report_count_rows_with_an_empty_field(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write([{**row, "note": "" if number % 3 else "so"} for number, row in enumerate(rows_of(12))])
    prompt = {"prompt": "{question} {note}"}
    plan = make_plan(job.spec(input=prompt))
    assert plan["empty_fields"] == {"note": 8}
    assert "empty        note in 8 rows, whose prompts are made without it" in render_plan(plan)
    outcome = job.run(job.spec(input=prompt))
    assert "8 rows ran with an empty note in the prompt" in outcome.lines
    assert "8 rows ran with an empty note in the prompt" in render_report(read_report(RunDir(job.output)))
    whole = make_plan(job.spec())
    assert whole["empty_fields"] == {} and "empty" not in render_plan(whole)


def test_rows_of_several_invocations_and_reused_ones_are_counted_once(job: JobMaker) -> None:
    job.write([{**row, "note": ""} for row in rows_of(40)])
    spec = job.spec(input={"prompt": "{question} {note}"})
    while job.run(spec, quiet(max_total_tokens=200)).exit_code == ExitCode.STOPPED:
        pass
    assert read_report(RunDir(job.output))["empty_fields"] == {"note": 40}
    job.write([{**row, "note": ""} for row in rows_of(44)])
    job.run(spec)  # the input has grown
    assert read_report(RunDir(job.output))["empty_fields"] == {"note": 44}
    job.elsewhere("second", job.spec(input={"prompt": "{question} {note}"}, output={"reuse": [str(job.output)]}))
    assert read_report(RunDir(job.folder / "second"))["empty_fields"] == {"note": 44}


def test_null_in_a_template_is_no_text(job: JobMaker) -> None:
    spec = job.spec(input={"prompt": "{question} {note}", "columns": ["question"]})
    made = []
    for name, note in (("null", None), ("empty", "")):
        job.write([{**rows_of(1)[0], "note": note}])
        made.append(job.elsewhere(name, spec))
    assert made[0] == made[1]
    assert call(["plan", str(job.toml()), "--prompt", "{question} {note}"]) == 0
