"""What a user does when a job or its input has changed, each case done with the command line, and what is refused.

``test_histories`` holds that outputs are those of a fresh run and that no result is computed twice, in any order of
such cases; here each one is named, with what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, files, read_lines, rows_of, timeless, toml_of, write_lines
from stub_engine import StubEngine, stub_factory

from batchgen.cli.main import call
from batchgen.core.records import Row
from batchgen.run.job import run_job
from batchgen.run.results import ResultSink

Rows = list[dict[str, Any]]
Said = tuple[int, int, str]  # exit code, rows computed, what was said


class Folder:
    """A folder with a job over rows in files, and its runs."""

    def __init__(self, job: JobMaker, capsys: pytest.CaptureFixture[str], num_rows: int = 40) -> None:
        self.job, self.path, self._capsys = job, job.output, capsys
        self.data = job.folder / "data"
        self.data.mkdir()
        self.keys: dict[str, dict[str, Any]] = {
            "model": {"path": job.spec().model.path},
            "input": {"path": "data/*.jsonl", "id": "id", "prompt": "{question}", "chat_template": "none"},
            "sampling": {"max_tokens": 8},
            "output": {"path": str(self.path)},
        }
        self.rows = rows_of(num_rows)
        self.write(self.rows)
        self.write_job()

    def write(self, rows: Rows, num_files: int = 2) -> None:
        """The input: rows in as many files."""
        for path in self.data.iterdir():
            path.unlink()
        for number in range(num_files):
            part = rows[number * len(rows) // num_files : (number + 1) * len(rows) // num_files]
            write_lines(self.data / f"{number}.jsonl", part)

    def write_job(self, **sections: dict[str, Any]) -> None:
        """The job file, with other keys."""
        for name, keys in sections.items():
            self.keys[name] = self.keys.get(name, {}) | keys
        (self.job.folder / "job.toml").write_text(toml_of(self.keys), encoding="utf-8")

    def command(self, *words: str, engines: list[StubEngine] | None = None, **stub: Any) -> tuple[int, str]:
        """Exit code of a command and what it said; ``run`` and the job file come first."""
        self._capsys.readouterr()
        code = call(words, engine_factory=stub_factory(engines, **stub))
        out, err = self._capsys.readouterr()
        return code, out + err

    def run(self, *flags: str, what: str | None = None, **stub: Any) -> Said:
        """Run the job, or a folder."""
        engines: list[StubEngine] = []
        code, said = self.command("run", what or str(self.job.folder / "job.toml"), *flags, engines=engines, **stub)
        assert "Traceback" not in said
        return code, sum(engine.num_started for engine in engines), said

    def assert_fresh(self) -> None:
        """Outputs and errors are those of a run in another folder."""
        other = self.job.folder / "fresh"
        code, _, said = self.run("--output", str(other), "--overwrite")
        assert code in (0, 3), said
        names = [{path.name for path in folder.glob("*.jsonl")} for folder in (self.path, other)]
        assert names[0] == names[1]
        for name in names[0]:
            found = [[*map(timeless, read_lines(folder / name))] for folder in (self.path, other)]
            assert found[0] == found[1], name


@pytest.fixture
def folder(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> Folder:
    """Forty rows in two files, of which all are done."""
    found = Folder(job, capsys)
    assert found.run()[:2] == (0, 40)
    return found


def cut_off(folder: Folder) -> int:
    """How many answers ``max_tokens`` cut off."""
    return sum(row["finish_reason"] == "length" for row in read_lines(folder.path / "outputs.jsonl"))


# ---------------------------------------------------------------- what a user does


def test_a_job_that_is_done_is_done(folder: Folder) -> None:
    before = files(folder.path)
    code, computed, said = folder.run()
    assert (code, computed) == (0, 0) and "already done" in said
    assert {**files(folder.path), "job.json": b""} == {**before, "job.json": b""}  # which learns that files are settled


def more(rows: Rows) -> Rows:
    return [*rows, *({"id": f"new-{i}", "question": f"And {i}?"} for i in range(20))]


def edited(rows: Rows) -> Rows:
    return [row | {"question": "Another?"} if i == 7 else row for i, row in enumerate(rows)]


def test_a_changed_input_is_taken_up_and_only_what_is_new_is_computed(folder: Folder) -> None:
    folder.write(rows := [*edited(folder.rows), {"id": "new", "question": "Why?"}])
    code, computed, said = folder.run()
    assert (code, computed) == (0, 2), said
    assert "input changed: 39 rows kept, 2 to compute" in said
    records = read_lines(folder.path / "outputs.jsonl")
    num_tokens = sum(row["usage"]["completion_tokens"] for row in records if "reused" not in row["timings"])
    assert f"{len(rows)} rows done, 39 of them kept\n" in said
    assert f"2 rows computed, {num_tokens} tokens out in " in said
    folder.assert_fresh()


def test_a_pass_that_was_killed_counts_the_rows_that_it_kept(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(edited(folder.rows))
    keep, kept = ResultSink.keep, []

    def kill_after_twenty(sink: ResultSink, row: Row, record: Mapping[str, Any]) -> None:
        if len(kept) == 20:
            raise SystemExit
        kept.append(row.index)
        keep(sink, row, record)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(ResultSink, "keep", kill_after_twenty)
        folder.run()
    assert "input changed: 39 rows kept, 1 to compute" in folder.run()[2]
    folder.assert_fresh()


def test_the_delimiter_that_was_found_may_be_named(job: JobMaker) -> None:
    sheet = job.folder / "rows.csv"
    sheet.write_text("question;note\nWhy?;1\nWho?;2\n", encoding="utf-8")
    keys = {"path": [str(sheet)], "id": None}
    assert job.run(job.spec(input=keys)).exit_code == 0
    outcome = job.run(job.spec(input={**keys, "delimiter": ";"}))
    assert outcome.exit_code == 0 and "already done" in outcome.lines[0]
    manifest = json.loads((job.output / "job.json").read_text())
    assert manifest["fingerprints"]["input"]["files"][0]["delimiter"] == ";", "by which another one is another input"


def test_files_may_come_and_a_limit_may_rise(folder: Folder) -> None:
    folder.write_job(input={"limit": 30})
    assert folder.run("--update")[:2] == (0, 0)
    folder.write_job(input={"limit": 35})
    assert folder.run()[:2] == (0, 5)
    folder.write(rows_of(60), num_files=3)
    folder.write_job(input={"limit": 60})
    assert folder.run()[:2] == (0, 25)
    folder.assert_fresh()


def test_a_row_that_failed_for_the_machine_runs_again_with_update(job: JobMaker, capsys: Any) -> None:
    folder = Folder(job, capsys)
    assert folder.run(fails=frozenset({2, 5}))[:2] == (3, 40)
    code, computed, said = folder.run()
    assert (code, computed) == (3, 0) and "--update" in said
    assert folder.run("--update")[:2] == (0, 2)
    folder.assert_fresh()


@pytest.mark.parametrize("token_ids", [False, True])
def test_answers_that_were_cut_off_run_with_more(folder: Folder, token_ids: bool) -> None:
    folder.write_job(output={"token_ids": token_ids})
    folder.run("--update")
    num_cut = cut_off(folder)
    folder.write_job(sampling={"max_tokens": 16})
    assert folder.run()[0] == 2
    engines: list[StubEngine] = []
    code, said = folder.command("run", str(folder.job.folder / "job.toml"), "--update", engines=engines)
    assert code == 0 and f"job changed: {40 - num_cut} rows kept, {num_cut} to compute" in said
    assert engines[0].num_started == num_cut > 5
    lengths = [row["usage"]["completion_tokens"] for row in read_lines(folder.path / "outputs.jsonl")]
    behind = 8 * num_cut if token_ids else 0  # an answer goes on behind the tokens that it has
    assert engines[0].stats.num_output_tokens == sum(length for length in lengths if length > 8) - behind
    folder.assert_fresh()


def test_answers_that_were_cut_off_come_with_the_advice_that_an_update_computes_them(folder: Folder) -> None:
    advice = "raise max_tokens where it is set, in the job or in rows; --update computes what that changes"
    assert advice in folder.run("--overwrite")[2]


@pytest.mark.parametrize(
    ("keys", "num_computed"),
    [
        ({"input": {"prompt": "{question} Say it."}}, 40),
        ({"sampling": {"temperature": 1.0}}, 40),
        ({"sampling": {"seed": 3}}, 0),
        ({"input": {"columns": []}}, 0),
        ({"output": {"format": "parquet"}}, 0),
        ({"output": {"format": "openai-batch"}}, 0),
        ({"output": {"token_ids": True}}, 40),
    ],
    ids=lambda value: (
        "-".join(f"{key}" for keys in value.values() for key in keys) if isinstance(value, dict) else None
    ),
)
def test_another_job_is_refused_with_what_changed_and_update_keeps_what_cannot_differ(
    folder: Folder, keys: dict[str, dict[str, Any]], num_computed: int
) -> None:
    before = files(folder.path)
    folder.write_job(**keys)
    [(section, [name])] = [(section, [*values]) for section, values in keys.items()]
    code, computed, said = folder.run()
    if name != "format":  # which changes no record: it needs no --update
        assert (code, computed) == (2, 0) and f"{section}.{name}: was" in said and "--update" in said
        assert files(folder.path) == before
    code, out = folder.command("plan", str(folder.job.folder / "job.toml"))
    assert code == 0 and f"{40 - num_computed} kept, {num_computed} to compute" in out
    assert folder.run("--update")[:2] == (0, num_computed)


@pytest.mark.parametrize(
    ("section", "name", "now", "was"),
    [
        ("model", "quantization", "w8a16", "none"),
        ("model", "dtype", "float32", "auto"),
        ("model", "device", "cuda", "auto"),
        ("engine", "kv_cache_dtype", "int8", "auto"),
    ],
)
def test_an_update_to_other_numerics_or_back_computes_all_rows_and_says_why(
    folder: Folder, section: str, name: str, now: str, was: str
) -> None:
    for value in (now, was):
        folder.write_job(**{section: {name: value}})
        kept = 40 if (name, value) == ("device", "auto") else 0  # until it is loaded, it may resolve as before
        planned = f"{kept} kept, {40 - kept} to compute"
        assert planned in folder.command("plan", str(folder.job.folder / "job.toml"))[1]
        code, computed, said = folder.run("--update")
        assert (code, computed) == (0, 40) and said.count("no row of") == 1 and " can be kept: " in said, said
        assert "already done" in folder.run()[2]
    folder.assert_fresh()


def test_an_update_on_another_device_than_auto_was_before_computes_all_rows(folder: Folder) -> None:
    on_cuda = {"dtype": "bfloat16", "device": "cuda"}
    folder.write([*folder.rows, {"id": "new", "question": "Why?"}])
    before = files(folder.path)
    assert folder.run(numerics=on_cuda)[0] == 2
    assert files(folder.path) == before and not (folder.path / "journal").exists(), "a refused run leaves nothing new"
    assert folder.run("--update", numerics=on_cuda)[0] == 0
    assert json.loads((folder.path / "job.json").read_bytes())["fingerprints"]["numerics"] == on_cuda
    records = read_lines(folder.path / "outputs.jsonl")
    assert len(records) == 41 and not any("reused" in record["timings"] for record in records)


def test_a_truncated_input_is_refused_while_an_update_is_interrupted(folder: Folder) -> None:
    folder.write_job(input={"prompt": "{question} Say it."})
    code, _, said = folder.run("--update", "--max-total-tokens", "60")
    assert code == 75 and "max total tokens of 60)" in said
    folder.write(folder.rows[:30])
    code, computed, said = folder.run()
    assert (code, computed) == (2, 0) and "the input has 30 rows that can run, and there are 40 rows before" in said


def test_a_folder_stands_for_its_own_job(folder: Folder) -> None:
    assert "already done" in folder.run(what=str(folder.path))[2]
    folder.write([*folder.rows, {"id": "new", "question": "Why?"}])
    (folder.job.folder / "job.toml").unlink()
    code, computed, said = folder.run(what=str(folder.path))
    assert (code, computed) == (0, 1), said
    moved = folder.path.rename(folder.path.with_name("moved"))
    code, computed, said = folder.run("--max-tokens", "16", "--update", what=str(moved))
    assert code == 0 and computed > 5 and not folder.path.exists(), said


def test_an_update_in_which_nothing_is_new_loads_no_model(folder: Folder) -> None:
    folder.write(folder.rows[::-1])
    engines: list[StubEngine] = []
    code, said = folder.command("run", str(folder.job.folder / "job.toml"), engines=engines)
    assert (code, engines) == (0, []), said
    assert "loading" not in said
    folder.assert_fresh()


def test_a_return_to_the_job_of_outputs_that_were_removed_is_no_loss(folder: Folder) -> None:
    folder.write(more(folder.rows))
    assert folder.run("--max-total-tokens", "100")[0] == 75
    folder.write(folder.rows)
    (folder.path / "outputs.jsonl").unlink()
    assert folder.run()[0] == 0
    folder.assert_fresh()


def test_a_job_that_was_given_up_goes_when_an_older_one_finishes(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(job, capsys)
    assert folder.run("--max-total-tokens", "60")[0] == 75
    assert folder.run("--max-total-tokens", "60", "--update", "--max-tokens", "3")[0] == 75
    assert folder.run("--update")[0] == 0
    before = files(folder.path)
    code, said = folder.command("report", str(folder.path))
    assert code == 0 and "unfinished" not in said
    assert folder.run(what=str(folder.path))[:2] == (0, 0)
    assert {**files(folder.path), "job.json": b""} == {**before, "job.json": b""}  # which learns that files are settled
    folder.assert_fresh()


def test_the_date_of_a_folder_stays_until_it_is_begun_anew(folder: Folder) -> None:
    created_at = json.loads((folder.path / "job.json").read_bytes())["created_at"]
    folder.write(edited(folder.rows))
    folder.run()
    assert json.loads((folder.path / "job.json").read_bytes())["created_at"] == created_at
    folder.run("--overwrite")
    assert json.loads((folder.path / "job.json").read_bytes())["created_at"] >= created_at


def test_outputs_that_were_edited_are_no_results_and_never_replaced_unasked(folder: Folder) -> None:
    path = folder.path / "outputs.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"finish_reason"', '"ended"', 1), encoding="utf-8")
    code, computed, said = folder.run()
    assert (code, computed) == (0, 0) and "outputs.jsonl was edited since, --update replaces it" in said
    said = folder.command("plan", str(folder.job.folder / "job.toml"))[1]
    assert "0 kept, 40 to compute" in said and said.rstrip().endswith("--update")
    folder.write(edited(folder.rows))
    before = files(folder.path)
    code, computed, said = folder.run()
    assert (code, computed) == (2, 0) and "edited" in said and "--update" in said
    assert files(folder.path) == before
    assert folder.run("--update")[:2] == (0, 40)
    folder.assert_fresh()


def test_rows_of_standard_input_stay_and_a_folder_needs_no_pipe(job: JobMaker, tmp_path: Path) -> None:
    job.write(rows_of(6))
    spec = job.spec(input={"path": ["-"]})
    lines = [json.dumps(row).encode() + b"\n" for row in rows_of(6)]
    made: list[StubEngine] = []
    assert run_job(spec, lines=lines, engine_factory=stub_factory(made)).exit_code == 0
    assert (job.output / "input.spool").is_file()
    assert call(["run", str(job.output), "--max-tokens", "20", "--update"], engine_factory=stub_factory(made)) == 0
    assert len(job.outputs()) == 6


# ---------------------------------------------------------------- what is refused


def another_glob(folder: Folder) -> None:
    (folder.job.folder / "other").mkdir()
    rows = [{"id": f"o-{i}", "question": f"What else, {i}?"} for i in range(40)]
    for number in range(2):
        write_lines(folder.job.folder / "other" / f"{number}.jsonl", rows[number::2])
    folder.write_job(input={"path": "other/*.jsonl"})


NONE_LEFT = "the input has 0 rows that can run, and there are 40 results; 0 of 40 results would be left"
ACCIDENTS: dict[str, tuple[Callable[[Folder], object], str]] = {
    "missing mount": (
        lambda folder: (folder.data / "1.jsonl").unlink(),
        "the input has 1 file, was 2; 20 of 40 results would be left: fix the input, or continue",
    ),
    "cut at 70 percent": (
        lambda folder: folder.write(folder.rows[:28]),
        "the input has 28 rows that can run, and there are 40 results; 28 of 40 results would be left",
    ),
    "emptied column": (lambda folder: folder.write([row | {"question": ""} for row in folder.rows]), NONE_LEFT),
    "renamed column": (
        lambda folder: folder.write([{"id": row["id"], "asked": row["question"]} for row in folder.rows]),
        "question",
    ),
    "empty input": (lambda folder: folder.write([]), NONE_LEFT),
    "another glob": (another_glob, "most rows have changed; 0 of 40 results would be left"),
    "lower limit": (lambda folder: folder.write_job(input={"limit": 39}), "input.limit: was (not set), now 39"),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_an_input_that_has_lost_much_is_refused_with_the_counts(folder: Folder, name: str) -> None:
    before, (accident, counts) = files(folder.path), ACCIDENTS[name]
    accident(folder)
    code, computed, said = folder.run()
    assert (code, computed) == (2, 0), said
    assert counts in said
    assert len([line for line in said.splitlines() if re.match("batchgen", line)]) <= 2
    assert files(folder.path) == before
    assert not (folder.path / "journal").exists()
    folder.run("--update")
    if name == "renamed column":  # which no flag makes good
        assert files(folder.path) == before
    else:
        folder.assert_fresh()


@pytest.mark.parametrize(
    ("rows", "is_refused"),
    [
        (rows_of(36), False),  # 90 %
        (rows_of(35), True),
        ([*rows_of(20), *({"id": f"o{i}", "question": f"Else {i}?"} for i in range(20))], False),  # 50 % are kept
        ([*rows_of(19), *({"id": f"o{i}", "question": f"Else {i}?"} for i in range(21))], True),
        (rows_of(4000), False),  # more is no loss
    ],
    ids=["nine tenths", "fewer", "half", "less than half", "a hundred times"],
)
def test_how_much_may_be_lost_unasked(folder: Folder, rows: Rows, is_refused: bool) -> None:
    folder.write(rows)
    flags = ["--max-total-tokens", "40"] if len(rows) > 1000 else []
    assert folder.run(*flags)[0] == (2 if is_refused else 75 if flags else 0)


def test_of_a_few_rows_any_may_go(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(job, capsys, num_rows=19)
    folder.run()
    folder.write(rows_of(40)[30:])
    assert folder.run()[:2] == (0, 10)
