"""``outputs.csv``: a spreadsheet of the rows with what the model gave, which is no source of anything."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, Shell, quiet, rows_of, updating

from batchgen.output.formats.delimited import CsvFormat
from batchgen.run.merge import merge

ROWS = [{**row, "note": note} for row, note in zip(rows_of(4), ["a;b", 'say "hi"', "two\nlines", None], strict=True)]


def table(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter, strict=True))


@pytest.mark.parametrize("has_id", [True, False])
def test_a_table_has_the_inputs_columns_and_then_the_answers(job: JobMaker, has_id: bool) -> None:
    job.write(ROWS)
    keys = {"columns": ["*"], **({} if has_id else {"id": None})}
    records = job.elsewhere("lines", job.spec(input=keys))
    job.run(job.spec(input=keys, output={"format": "csv"}))
    found = table(job.output / "outputs.csv")
    kept = ["question", "answer", "note"] if has_id else ["input_id", "question", "answer", "note"]
    assert list(found[0]) == [*(["id"] if has_id else []), *kept, "text", "finish_reason"]
    for row, record in zip(found, records, strict=True):
        assert row == {name: "" if record[name] is None else str(record[name]) for name in row}


def test_columns_named_like_fields_of_vectors_and_of_records_stay_in_their_places(job: JobMaker) -> None:
    job.write([{"label": "a", "question": "Why?", "score": 2, "text": "t", "zz": 3}])
    job.run(job.spec(input={"id": None, "columns": ["*"]}, output={"format": "csv"}))
    header = (job.output / "outputs.csv").read_text().splitlines()[0]
    assert header == "label,question,score,input_text,zz,text,finish_reason"


def test_what_no_cell_can_hold_is_json_text() -> None:
    file = io.BytesIO()
    record = {"id": 1, "index": 0, "text": "", "parsed": {"ü": [1]}, "n": 2.5, "on": True, "l": ["a"], "timings": {}}
    CsvFormat(has_id=True, has_bom=False).write(file, [json.dumps(record).encode()])
    assert file.getvalue().decode() == 'id,n,on,l,text,parsed\r\n1,2.5,true,"[""a""]",,"{""ü"": [1]}"\r\n'


def test_a_table_in_another_encoding_becomes_one_that_spreadsheets_open(job: JobMaker) -> None:
    path = job.folder / "rows.csv"
    path.write_bytes("id;question\n1;Größe\n".encode("cp1252"))
    keys = {"path": [str(path)], "encoding": "cp1252", "columns": ["*"]}
    assert job.run(job.spec(input=keys, output={"format": "csv"})).exit_code == 0
    assert (job.output / "outputs.csv").read_bytes().startswith("\ufeffid;question;text".encode())
    assert table(job.output / "outputs.csv", ";")[0]["question"] == "Größe"


def test_a_job_without_results_has_a_header(job: JobMaker) -> None:
    job.write([{"id": 1, "question": ""}])
    job.run(job.spec(output={"format": "csv"}))
    assert (job.output / "outputs.csv").read_text() == "id,text,finish_reason\n"


# ---------------------------------------------------------------- what came in, and batchgen cat


def written(job: JobMaker, *paths: Path, **output: str) -> str:
    """The name of the file of outputs of a job over these inputs."""
    keys = {"path": [str(path) for path in paths], "id": None}
    spec = job.spec(input=keys, output={"format": "auto", **output})
    assert job.run(spec, quiet(overwrite=True)).exit_code == 0
    (path,) = job.output.glob("outputs.*")
    return path.name


def test_outputs_are_what_came_in_unless_the_job_says(job: JobMaker) -> None:
    sheet, columns, lines = job.folder / "a.csv", job.folder / "b.parquet", job.write(rows_of(2))
    sheet.write_text("question\nWhy?\n", encoding="utf-8")
    pq.write_table(pa.table({"question": ["Why?"]}), columns)
    assert written(job, lines) == "outputs.jsonl"
    assert written(job, sheet) == "outputs.csv"
    assert written(job, columns) == "outputs.parquet"
    assert written(job, sheet, columns) == "outputs.jsonl"
    assert written(job, sheet, format="jsonl") == "outputs.jsonl"
    assert json.loads((job.output / "job.json").read_text())["job"]["output"]["format"] == "jsonl"


@pytest.mark.parametrize(
    ("name", "content", "keys", "delimiter"),
    [
        ("a.csv", "id;question\n1;a,b\n2;c\n", {}, ";"),
        ("a.tsv", "id\tquestion\n1\ta,b\n2\tc\n", {}, "\t"),
        ("a.csv", "id¦question\n1¦a,b\n2¦c\n", {"delimiter": "¦"}, "¦"),
    ],
)
def test_a_table_of_answers_has_the_delimiter_of_the_input_in_each_way_to_it(
    job: JobMaker, shell: Shell, name: str, content: str, keys: dict[str, str], delimiter: str
) -> None:
    sheet = job.folder / name
    sheet.write_text(content, encoding="utf-8")
    keys = {"path": [str(sheet)], "columns": ["*"], **keys}
    spec = job.spec(input=keys, output={"format": "csv"})
    assert job.run(spec, quiet(max_total_tokens=1)).exit_code != 0
    assert job.run(spec).exit_code == 0
    whole = (job.output / "outputs.csv").read_bytes()
    assert whole.decode().startswith(delimiter.join(["id", "question", "text", "finish_reason"]))
    assert [row["question"] for row in table(job.output / "outputs.csv", delimiter)] == ["a,b", "c"]
    assert shell("cat", job.output).out.encode() == whole
    job.run(job.spec(input=keys, output={"format": "jsonl"}), updating())
    assert shell("cat", job.output, "--format", "csv").out.encode() == whole
    for number in (1, 2):
        job.run(
            job.spec(input=keys, output={"format": "csv", "path": f"{job.folder}/{number}"}), quiet(shard=(number, 2))
        )
    merge([job.folder / "1", job.folder / "2"], job.folder / "merged")
    assert (job.folder / "merged" / "outputs.csv").read_bytes() == whole


def test_tables_with_different_delimiters_become_one_with_commas(job: JobMaker) -> None:
    one, other = job.folder / "a.csv", job.folder / "b.tsv"
    one.write_text("question;n\nWhy?;1\n", encoding="utf-8")
    other.write_text("question\tn\nWhy?\t1\n", encoding="utf-8")
    assert written(job, one, other) == "outputs.csv"
    assert (job.output / "outputs.csv").read_text().startswith("question,n,text,")


@pytest.mark.parametrize("name", ["sheet.csv", "sheet.*", "sheet.csv.gz"])
def test_a_table_has_the_mark_of_utf_8_of_its_input_once_that_is_gone_too(
    job: JobMaker, shell: Shell, name: str
) -> None:
    content = "\ufeffquestion\nWhy?\n".encode()
    sheet = job.folder / name.replace("*", "csv")
    sheet.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert written(job, job.folder / name) == "outputs.csv"
    whole = (job.output / "outputs.csv").read_bytes()
    assert whole.startswith("\ufeffquestion,".encode())
    sheet.unlink()
    assert shell("cat", job.output).out.encode() == whole


def test_cat_prints_the_outputs_as_their_file_has_them_or_in_the_format_asked_for(job: JobMaker, shell: Shell) -> None:
    job.write(ROWS)
    files = {}
    for form in ("jsonl", "csv", "parquet"):
        job.run(job.spec(output={"format": form}), updating())
        files[form] = (job.output / f"outputs.{form}").read_bytes()
        plain = shell("cat", job.output).out
        assert plain == shell("cat", job.output, "--format", "csv" if form == "csv" else "jsonl").out
        assert form == "parquet" or plain.encode() == files[form]
    assert shell("cat", job.output, "--format", "csv").out.encode() == files["csv"]


def test_cat_prints_the_fields_asked_for_in_their_order(job: JobMaker, shell: Shell) -> None:
    job.write(ROWS)
    job.run()
    text = job.outputs()[0]["text"]
    lines = shell("cat", job.output, "--columns", "text,id").out.splitlines()
    assert lines[0] == json.dumps({"text": text, "id": "q-0"}, ensure_ascii=False)
    rows = shell("cat", job.output, "--columns", "text,usage,id", "--format", "csv").out
    assert rows.startswith("text,usage,id\r\n") and '"{""prompt_tokens"": ' in rows
    names = {"txt": '(did you mean "text"?)', "choices": "(known: answer, fingerprint, finish_reason, id, "}
    for name, known in names.items():  # "choices" is a word that users have for labels
        said = shell("cat", job.output, "--columns", name, code=2).err
        assert f"--columns: no record has a field '{name}' {known}" in said


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_cat_shows_lines_of_any_length_whole_on_a_terminal(
    job: JobMaker, shell: Shell, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    job.write([{"id": f"q-{i}", "question": "Why?", "note": "€" * num} for i, num in enumerate((50_000, *[9000] * 9))])
    job.run(job.spec(output={"format": form}))
    plain = shell("cat", job.output, "--columns", "id,note").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shell("cat", job.output, "--columns", "id,note").out == plain.replace("\r\n", "\n")


def test_outputs_that_were_cut_at_a_line_are_an_error_and_edited_ones_are_read(job: JobMaker, shell: Shell) -> None:
    job.write(ROWS)
    job.run(fails=frozenset({1}))
    before, path, errors = job.folder / "before", job.output / "outputs.jsonl", job.output / "errors.jsonl"
    shutil.copytree(job.output, before)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'{"id"')])
    cut = len(ROWS) - 1
    lost = f"{path} or errors.jsonl is not as its run wrote it: {cut} lines with {cut} of {len(ROWS)} rows"
    assert lost in shell("cat", job.output, code=1).err
    for pair in ([before, job.output], [job.output, before]):
        compared = shell("report", pair[0], "--compare", pair[1])
        assert f"answers are not compared: {lost}" in compared.err
        assert "equal answers" not in compared.out
    first, second, *others = whole.splitlines(keepends=True)
    foreign = first.replace(b'"index": 0', b'"index": 10')
    alike = first.rstrip().ljust(len(second) - 1) + b"\n"  # the size of the file stays
    assert foreign != first and len(alike) == len(second)
    edits = [([second, second, *others], -1), ([first, first, second, *others], 0), ([foreign, second, *others], -1)]
    for lines, held in [*edits, ([first, alike, *others], -1)]:
        path.write_bytes(b"".join(lines))
        lines_held = f"{len(lines) + 1} lines with {len(ROWS) + held} of {len(ROWS)} rows"
        assert lines_held in shell("cat", job.output, code=1).err
    path.write_bytes(whole)
    failed = errors.read_bytes()
    errors.write_bytes(failed * 2)
    lines_held = f"{len(ROWS) + 1} lines with {len(ROWS)} of {len(ROWS)} rows"
    assert lines_held in shell("cat", job.output, code=1).err
    errors.write_bytes(failed)
    path.write_bytes(whole.replace(b"stop", b"edited"))
    assert len(shell("cat", job.output).out.splitlines()) == len(ROWS) - 1
    errors.unlink()
    assert len(shell("cat", job.output).out.splitlines()) == len(ROWS) - 1
    path.write_bytes(whole + first)
    assert f"{len(ROWS)} lines with {len(ROWS) - 1} of" in shell("cat", job.output, code=1).err
    path.unlink()
    compared = shell("report", before, "--compare", job.output)
    lost = f"{path} was removed: restore it, or run the job again"
    assert f"not compared: {lost}" in compared.err
    assert lost in shell("cat", job.output, code=2).err


def test_records_that_were_lost_or_removed_are_an_error_with_its_remedy(job: JobMaker, shell: Shell) -> None:
    job.write(ROWS)
    job.run(job.spec(output={"format": "parquet"}))
    before = job.folder / "before"
    shutil.copytree(job.output, before)
    (segment,) = (job.output / "journal").glob("*/*.seg")
    segment.write_bytes(segment.read_bytes()[:-40])
    lost = f"is damaged: {len(ROWS) - 1} of {len(ROWS)} rows can be read; read outputs.parquet itself, or run with --up"
    assert lost in shell("cat", job.output, code=1).err
    compared = shell("report", before, "--compare", job.output)
    assert f"answers are not compared: {segment.parent} {lost}" in compared.err
    assert "equal answers" not in compared.out
    assert job.run(job.spec(output={"format": "parquet"})).lines[0].startswith("already done")
    job.run(job.spec(output={"format": "parquet"}), updating())
    assert sum(engine.num_started for engine in job.engines) == 1
    assert shell("cat", job.output).out
    shutil.rmtree(job.output / "journal")
    said = shell("cat", job.output, code=2).err
    assert "which was removed or lacks its job.json: read outputs.parquet itself, or run with --overwrite" in said


def test_cat_prints_the_columns_of_a_table_as_its_file_names_them(job: JobMaker, shell: Shell) -> None:
    job.write([{"id": "a", "question": "Why?", "score": "mine"}])
    job.run(job.spec(classify={"labels": ["yes", "no"]}, output={"format": "csv"}))
    (row,) = table(job.output / "outputs.csv")
    lines = shell("cat", job.output, "--columns", "score,input_score,usage").out.splitlines()
    assert lines[0] == "score,input_score,usage"
    assert lines[1].startswith(f'{row["score"]},mine,"{{')


def test_cat_says_where_there_is_nothing_to_print(job: JobMaker, shell: Shell) -> None:
    said = shell("cat", job.folder, code=2).err
    assert "no outputs in" in said and "not a run directory" in said
    job.write(rows_of(30))
    job.run(options=quiet(max_total_tokens=100))
    assert "the run is not finished: see batchgen status" in shell("cat", job.output, code=2).err
