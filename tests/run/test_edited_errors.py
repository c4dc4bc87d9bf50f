"""``retry`` holds errors.jsonl against the rows without a result, and ids against those given out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, quiet, read_lines, rows_of
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import StorageError, UsageError
from batchgen.core.shard import WHOLE, Shard
from batchgen.output import finalize
from batchgen.run import invocation
from batchgen.run import retry as retry_module
from batchgen.run.invocation import RunOptions
from batchgen.run.retry import retry_job

FAILED = frozenset({1, 3, 5})
Letters = list[dict[str, Any]]


FORMS = ["jsonl", "parquet", "openai-batch"]


def letters_of(job: JobMaker, form: str = "jsonl", shard: Shard = WHOLE) -> Letters:
    """The dead letters of a run of 8 rows of which some failed."""
    job.write(rows_of(8))
    spec = job.spec(output={"format": form})
    job.run(spec, RunOptions(progress="quiet", shard=shard), fails=FAILED)
    job.engines = []
    return job.errors()


def rewrite(job: JobMaker, letters: list[dict[str, Any] | str]) -> None:
    lines = [letter if isinstance(letter, str) else json.dumps(letter) for letter in letters]
    (job.output / "errors.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def retry(job: JobMaker, **stub: Any) -> int:
    return call(["retry", str(job.output), "-q"], engine_factory=stub_factory(job.engines, **stub))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def nested(levels: int) -> str:
    return '{"index": 1, "source": "s", "line": 2, "row": ' + "[" * levels + "]" * levels + "}"


REFUSED: dict[str, tuple[Callable[[Letters], list[Any]], str]] = {
    "a line deleted": (lambda found: [found[0], found[2]], "lacks the line of failed row 3:"),
    "lines deleted": (lambda found: found[2:], "lacks the line of failed row 1, 3:"),
    "all deleted": (lambda found: [], "lacks the line of failed row 1, 3, 5:"),
    "a line twice": (lambda found: [*found, found[0]], "line 4: row 1 is there twice"),
    "of a row with a result": (lambda found: [found[0] | {"index": 0}, *found[1:]], "line 1: row 0 has not failed"),
    "added for a row with a result": (lambda found: [*found, found[0] | {"index": 2}], "line 4: row 2 has not failed"),
    "of no row": (lambda found: [*found, found[0] | {"index": 99}], "line 4: row 99 is no row of this run"),
    "of the row after the last": (lambda found: [*found, found[0] | {"index": 8}], "line 4: row 8 is no row of this"),
    "a vast index": (lambda found: [found[0] | {"index": 10**30}, *found[1:]], "line 1: not a line as written"),
    "a negative index": (lambda found: [found[0] | {"index": -1}, *found[1:]], "line 1: not a line as written"),
    "a boolean index": (lambda found: [found[0] | {"index": True}, *found[1:]], "line 1: not a line as written"),
    "a text as index": (lambda found: [found[0] | {"index": "1"}, *found[1:]], "line 1: not a line as written"),
    "no index": (lambda found: [{"row": {}}, *found], "line 1: not a line as written"),
    "no row": (lambda found: [*found[:2], {**found[2], "row": None} | {"code": "?"}], 'line 3: its "code" or'),
    "the row taken out": (
        lambda found: [*found[:2], {name: value for name, value in found[2].items() if name != "row"}],
        "line 3: not a line as written",
    ),
    "a line number that is none": (lambda found: [found[0] | {"line": "2"}, *found[1:]], "line 1: not a line"),
    "a source that is none": (lambda found: [found[0] | {"source": None}, *found[1:]], "line 1: not a line"),
    "no JSON": (lambda found: [*found[:2], "{"], "line 3: not valid JSON"),
    "no object": (lambda found: [*found, "5"], "line 4: the line is a number, not a JSON object"),
    "nested by hundreds": (lambda found: [nested(300), *found[1:]], "line 1: nested more than 101 levels deep"),
    "nested by a hundred thousand": (lambda found: [nested(100_000), *found[1:]], "line 1: nested more than 101"),
    "a number of 5,000 digits": (lambda found: ['{"index": ' + "9" * 5000 + "}", *found], "more than 4300 digits"),
}


@pytest.mark.parametrize("edit", list(REFUSED), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_edit_that_would_lose_or_repeat_a_row_is_refused_before_anything_is_run(
    job: JobMaker, capsys: pytest.CaptureFixture[str], edit: str, form: str
) -> None:
    change, message = REFUSED[edit]
    letters = letters_of(job, form)
    if form == "openai-batch":
        letters = [letter | {"code": letter["error"]["code"]} for letter in letters]
        for letter in letters:
            del letter["error"]
    rewrite(job, change(letters))
    before = content(job.output)
    assert retry(job) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "errors.jsonl" in said
    assert "bug" not in said
    assert (content(job.output), job.engines) == (before, [])
    assert not (job.output / "retry").exists()


def test_a_deleted_file_is_refused_too_and_once_put_right_the_retry_goes_on(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = letters_of(job)
    (job.output / "errors.jsonl").unlink()
    assert retry(job) == 2
    assert "lacks the line of failed row 1, 3, 5: put it back" in capsys.readouterr().err
    rewrite(job, letters)
    assert retry(job) == 0
    assert [row["index"] for row in job.outputs()] == list(range(8))


def test_rows_of_other_shards_are_neither_missed_nor_taken(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    letters = letters_of(job, shard=Shard(2, 2))
    rewrite(job, [letters[0] | {"index": 2}, *letters[1:]])
    assert retry(job) == 2
    assert "row 2 is no row of this run" in capsys.readouterr().err
    rewrite(job, letters)
    assert retry(job) == 0
    assert [row["index"] for row in job.outputs()] == [1, 3, 5, 7]


def test_blank_lines_a_byte_order_mark_and_another_order_of_lines_do_no_harm(job: JobMaker) -> None:
    letters = letters_of(job)
    rewrite(job, ["\ufeff" + json.dumps(letters[2]), "", json.dumps(letters[0]) + "\r", letters[1], " "])
    assert retry(job, fails=frozenset({3})) == 3
    assert [row["index"] for row in job.outputs()] == [0, 1, 2, 4, 5, 6, 7]
    assert job.errors() == letters[1:2]


def test_only_the_row_counts_for_what_is_run(job: JobMaker) -> None:
    letters = letters_of(job)
    rewrite(job, [letter | {"id": "other", "code": "?", "message": [], "more": 1} for letter in letters])
    assert retry(job) == 0
    assert [row["id"] for row in job.outputs()] == [f"q-{index}" for index in range(8)]


def test_a_line_that_was_no_json_may_be_mended_as_text(job: JobMaker) -> None:
    job.write([*rows_of(3), '{"id": 3, "question": "Who'])
    assert job.run().exit_code == 3
    [letter] = job.errors()
    assert letter["message"] == "not valid JSON: Invalid control character at character 27"
    rewrite(job, [letter | {"row": letter["row"] + '?"}'}])
    assert retry(job) == 0
    assert [row["index"] for row in job.outputs()] == [0, 1, 2, 3]


def test_a_row_of_a_hundred_levels_can_be_retried(job: JobMaker) -> None:
    deep: Any = "end"
    for _ in range(99):
        deep = [deep]
    job.write([{"id": "a", "question": "Why?", "deep": deep}])
    job.run(fails=frozenset({0}))
    assert retry(job) == 0


def test_outputs_that_were_edited_are_refused(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    letters_of(job)
    lines = read_lines(job.output / "outputs.jsonl")
    (job.output / "outputs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0]]))
    assert retry(job) == 1
    assert "holds row 0 twice; was it edited?" in capsys.readouterr().err


def interrupted(job: JobMaker, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    """A retry that ends as it calls a function."""

    def failing(*args: object, **kwargs: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing)
        with pytest.raises(StorageError):
            retry_job(job.output, quiet(), {}, engine_factory=stub_factory(fails=frozenset({3})))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("where", "name"), [(retry_module, "finalize_retry"), (finalize, "commit_errors"), (invocation, "write_report")]
)
def test_a_retry_interrupted_between_its_files_goes_on(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, form: str
) -> None:
    letters = letters_of(job, form)
    interrupted(job, monkeypatch, where, name)
    assert retry(job) == 3
    assert job.engines == []
    assert job.errors() == letters[1:2]
    report = json.loads((job.output / "report.json").read_bytes())
    assert report["rows"] == {"total": 8, "done": 7, "failed": 1}


def test_lines_deleted_while_a_retry_is_interrupted_are_missed(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = letters_of(job)
    interrupted(job, monkeypatch, finalize, "commit_errors")
    rewrite(job, [letters[0], letters[2]])  # row 1 and 5 have results by now, row 3 has none
    with pytest.raises(UsageError, match="lacks the line of failed row 3:"):
        retry_job(job.output, quiet(), {})
    rewrite(job, letters[1:])
    assert retry(job) == 3


def test_a_row_mended_in_an_interrupted_retry_is_run_as_mended(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = letters_of(job)
    interrupted(job, monkeypatch, retry_module, "finalize_retry")
    letters[1]["row"]["question"] = "Mended?"
    rewrite(job, list(letters))
    assert retry(job) == 0
    assert job.engines[0].num_pulled == 1
    assert [row["index"] for row in job.outputs()] == list(range(8))


def test_a_retry_that_goes_on_knows_the_ids_it_has_given_out(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = letters_of(job)
    interrupted(job, monkeypatch, retry_module, "finalize_retry")
    letters[1]["row"]["id"] = "q-1"  # which is that of a row this retry has run
    rewrite(job, list(letters))
    assert retry(job) == 3
    assert [letter["error"] if "error" in letter else letter["code"] for letter in job.errors()] == ["duplicate_id"]


def test_a_run_without_a_report_can_be_retried(job: JobMaker) -> None:
    letters_of(job)
    (job.output / "report.json").unlink()
    assert retry(job) == 0
    assert json.loads((job.output / "report.json").read_bytes())["rows"]["done"] == 8


# ---------------------------------------------------------------- ids


def kept_ids(job: JobMaker, custom_ids: list[str]) -> Letters:
    """A run of rows that keep a column custom_id, the last of them failed."""
    rows = [row | {"custom_id": name} for row, name in zip(rows_of(len(custom_ids)), custom_ids, strict=True)]
    job.write(rows)
    job.run(job.spec(input={"keep_columns": ["custom_id"]}), fails=frozenset({len(rows) - 1}))
    return job.errors()


def test_a_kept_column_custom_id_is_not_taken_for_the_id_and_hides_no_duplicate(job: JobMaker) -> None:
    (letter,) = kept_ids(job, ["q-2", "b", "c"])
    letter["row"]["id"] = "q-0"
    rewrite(job, [letter])
    assert retry(job) == 3
    assert [letter["code"] for letter in job.errors()] == ["duplicate_id"]
    letter["row"]["id"] = "q-2"
    rewrite(job, [letter])
    assert retry(job) == 0
    assert [row["id"] for row in job.outputs()] == ["q-0", "q-1", "q-2"]


def test_ids_of_one_text_are_one_custom_id(job: JobMaker) -> None:
    job.write([{"id": name, "question": "Why?"} for name in (5, "5", 6)])
    job.run(job.spec(output={"format": "openai-batch"}))
    assert [row["custom_id"] for row in job.outputs()] == ["5", "6"]
    (letter,) = job.errors()
    assert (letter["index"], letter["error"]["code"]) == (1, "duplicate_id")


def test_a_mended_id_cannot_become_a_custom_id_that_is_taken(job: JobMaker) -> None:
    job.write([{"id": 5, "question": "Why?"}, {"id": 6, "question": "How?"}])
    job.run(job.spec(output={"format": "openai-batch"}), fails=frozenset({1}))
    (letter,) = job.errors()
    letter["row"]["id"] = "5"
    rewrite(job, [letter])
    assert retry(job) == 3
    assert [row["custom_id"] for row in job.outputs()] == ["5"]


def test_a_row_known_by_its_position_shares_no_custom_id(job: JobMaker) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Why?"}}
    job.write([line, {"prompt": "How?"}, {"prompt": "Who?"}])
    spec = job.spec(output={"format": "openai-batch"})
    job.run(replace(spec, input=replace(spec.input, id=None, prompt=None)))
    assert [row["custom_id"] for row in job.outputs()] == ["1", "2"]
    (letter,) = job.errors()
    assert letter["error"] == {"code": "duplicate_id", "message": "row 0 already has the id '1'"}


def test_a_begun_run_with_ids_does_not_become_one_whose_ids_are_texts(job: JobMaker) -> None:
    job.write([{"id": name, "question": "Why?"} for name in (5, "5", *range(10, 40))])
    with pytest.raises(RuntimeError):
        job.run(crashes_at=5)
    with pytest.raises(UsageError, match=r'output\.format: was "jsonl", now "openai-batch"'):
        job.run(job.spec(output={"format": "openai-batch"}))
    assert job.run().exit_code == 0


def test_a_begun_run_without_ids_may_become_openai_batch(job: JobMaker) -> None:
    job.write(rows_of(40))
    specs = [job.spec(output={"format": name}) for name in ("jsonl", "openai-batch")]
    begun, changed = (replace(spec, input=replace(spec.input, id=None)) for spec in specs)
    with pytest.raises(RuntimeError):
        job.run(begun, crashes_at=5)
    assert job.run(changed).exit_code == 0
    assert len(job.outputs()) == 40
