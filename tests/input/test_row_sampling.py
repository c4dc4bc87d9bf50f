"""Sampling values of rows: a table holds them as text, and a column ``sampling`` may be no sampling at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from input_helpers import VOCAB_SIZE, read_bytes
from run_helpers import JobMaker

from batchgen.config.job import InputSpec
from batchgen.core.records import Cursor, Row, SamplingParams
from batchgen.input.requests import RequestBuilder
from batchgen.run.invocation import RunOptions
from batchgen.text.tokenizer import Tokenizer

JOB = SamplingParams(max_tokens=32, seed=5)


def asked(tokenizer: Tokenizer, columns: dict[str, Any]) -> Any:
    """The sampling values that a row asks for, or the code and message of its error."""
    sizes = {"max_model_len": 999, "vocab_size": VOCAB_SIZE}
    builder = RequestBuilder(InputSpec(path=("a",), prompt="q", chat_template="none"), JOB, tokenizer, **sizes)
    [(row, _)] = builder.build([Row(0, "a", 1, {"q": "Hi", **columns}, Cursor(0, 0, 1, 1))])
    return f"{row.error.code}: {row.error.message}" if row.error else row.params


def with_values(**values: Any) -> SamplingParams:
    return replace(JOB, **values)


def test_a_table_gives_rows_values_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = b'q,sampling\r\na,"{""max_tokens"": 3, ""stop"": ""5""}"\r\nb,\r\n'
    rows = [row for row in read_bytes(tmp_path, table, "rows.csv") if row.error is None]
    found = [asked(tokenizer, row.columns) for row in rows]
    assert found == [with_values(max_tokens=3, stop=("5",)), JOB]


@pytest.mark.parametrize("value", [{"max_tokens": 4}, '{"max_tokens": 4}', ' {"max_tokens":4}\n'])
def test_sampling_is_an_object_or_the_text_of_one(tokenizer: Tokenizer, value: Any) -> None:
    assert asked(tokenizer, {"sampling": value}) == with_values(max_tokens=4)


@pytest.mark.parametrize("value", [None, "", {}, "{}", "weekly", "every {n} rows", 44_100, 0.5, True, ["a"], "[1]"])
def test_a_column_that_gives_no_key_a_value_is_data(tokenizer: Tokenizer, value: Any) -> None:
    assert asked(tokenizer, {"sampling": value}) == JOB


@pytest.mark.parametrize(
    "value",
    ['{"max_tokens": 4', "{'max_tokens': 4}", [{"max_tokens": 4}], "max_tokens=4", "temperature: 0.5", ["seed = 4"]],
)
def test_what_gives_a_key_a_value_in_another_way_is_not_passed_over(tokenizer: Tokenizer, value: Any) -> None:
    said = asked(tokenizer, {"sampling": value})
    assert said.startswith("bad_type: column 'sampling' gives sampling values, but is not an object")


@pytest.mark.parametrize("value", ['{"max_token": 4}', {"max_token": 4}])
def test_an_unknown_key_in_it_is_refused(tokenizer: Tokenizer, value: Any) -> None:
    assert asked(tokenizer, {"sampling": value}).startswith("bad_param: not a sampling key: 'max_token'")


def test_a_key_of_jobs_is_refused_as_such(tokenizer: Tokenizer) -> None:
    said = "bad_param: generation_config is a key of jobs: a row gives the values themselves"
    assert asked(tokenizer, {"sampling": {"generation_config": "auto"}}) == said


def test_a_run_says_at_its_start_that_the_column_is_data(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write([{"id": "a", "question": "q"}, {"id": "b", "question": "q", "sampling": "weekly"}])
    assert job.run(options=RunOptions()).exit_code == 0
    assert "the column 'sampling' holds plain data, not sampling values: 'weekly'" in capsys.readouterr().err
