"""Standard input as an input: resumed without it, compared where it is given again, never lost to a refusal."""

from __future__ import annotations

import csv
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, files, quiet, rows_of
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ModelError, UsageError
from batchgen.core.storage import commit_staged
from batchgen.run.invocation import RunOptions
from batchgen.run.outcome import Outcome
from batchgen.run.stdin import stage_stdin

ROWS, OTHERS = rows_of(60), rows_of(70)[10:]
OVERWRITE = quiet(overwrite=True)


class Stdin:
    """What the test pipes in: rows, nothing, or a terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def give(self, rows: list[dict[str, Any]]) -> None:
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    def be_a_terminal(self) -> None:
        class Terminal(io.BytesIO):
            def isatty(self) -> bool:
                return True

        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Terminal()))

    def be_closed(self) -> None:
        self._monkeypatch.setattr(sys, "stdin", None)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Stdin:
    return Stdin(monkeypatch)


def run(job: JobMaker, options: RunOptions | None = None, **stub: Any) -> Outcome:
    return job.run(job.spec(input={"path": ["-"]}), options, **stub)


def raising(error: BaseException) -> None:
    raise error


def interrupt(job: JobMaker) -> None:
    assert run(job, quiet(max_total_tokens=300)).exit_code == 75


def expected(job: JobMaker, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs of the same rows from a file."""
    job.write(rows)
    return job.elsewhere(f"reference-{len([*job.folder.iterdir()])}")


def test_rows_that_are_not_piped_in_again_keep_their_format(
    job: JobMaker, stdin: Stdin, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job.spec(input={"path": ["-"], "format": "csv", "id": None}, output={"format": "auto"})
    table = "question\n" + "".join(f"What is {number}?\n" for number in range(30))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.encode())))
    assert job.run(spec, quiet(max_total_tokens=100)).exit_code == 75
    for rows_left in (True, False):  # in the copy that an unfinished run has, and in none
        if not rows_left:
            (job.output / "input.spool").unlink()
        stdin.give([])
        outcome = job.run(spec)
        assert outcome.exit_code == 0
        assert ("already done" in outcome.lines[0]) is not rows_left
        with (job.output / "outputs.csv").open(encoding="utf-8", newline="") as file:
            assert sum(1 for _ in csv.reader(file)) == 31


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_run_keeps_its_copy_of_standard_input(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    assert run(job).exit_code == 0
    assert job.outputs() == expected(job, ROWS)
    assert names(job.output) == {"outputs.jsonl", "report.json", "job.json", "input.spool"}


@pytest.mark.parametrize("given", ["nothing", "the same", "a terminal", "closed"])
def test_a_resume_goes_on_whether_or_not_the_rows_are_given_again(job: JobMaker, stdin: Stdin, given: str) -> None:
    stdin.give(ROWS)
    interrupt(job)
    acts = {"a terminal": stdin.be_a_terminal, "closed": stdin.be_closed}
    acts.get(given, lambda: stdin.give(ROWS if given == "the same" else []))()
    assert run(job).exit_code == 0
    assert job.engines[0].num_pulled < 60
    assert job.outputs() == expected(job, ROWS)


def test_other_rows_that_would_cost_much_are_refused_and_cost_nothing(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    run(job)
    before = files(job.output)
    stdin.give(ROWS[:1])
    with pytest.raises(UsageError, match=r"the input has 1 row that can run, and there are 60 results"):
        run(job)
    assert files(job.output) == before
    stdin.give([])
    assert "already done" in run(job).lines[0]


def test_the_rows_of_a_new_list_that_are_there_are_kept(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    run(job)
    stdin.give([ROWS[7], *OTHERS])
    assert run(job).exit_code == 0
    assert job.engines[0].num_started == 10
    assert job.outputs() == expected(job, [ROWS[7], *OTHERS])
    stdin.give([])
    assert "already done" in run(job).lines[0]


def test_a_run_directory_stands_for_its_job_and_reads_no_standard_input(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    interrupt(job)
    stdin.give(OTHERS)  # as the rest of a loop over folders
    assert call(["run", str(job.output), "-q"], engine_factory=stub_factory()) == 0
    assert job.outputs() == expected(job, ROWS)
    assert call(["run", str(job.output), "-q", "--input", "-"], engine_factory=stub_factory()) == 0
    assert job.outputs() == expected(job, OTHERS)


@pytest.mark.parametrize("rows", [[], ROWS], ids=["nothing", "the same"])
def test_a_finished_run_is_done_for_the_same_rows(job: JobMaker, stdin: Stdin, rows: list[dict[str, Any]]) -> None:
    stdin.give(ROWS)
    run(job)
    before = names(job.output)
    stdin.give(rows)
    assert "already done" in run(job).lines[0]
    assert names(job.output) == before


def test_a_run_of_a_file_is_not_done_for_standard_input(job: JobMaker, stdin: Stdin) -> None:
    job.write(ROWS)
    job.run()
    stdin.give([])
    with pytest.raises(UsageError, match="the input has 0 rows that can run, and there are 60 results"):
        run(job)


def test_a_terminal_is_no_input_to_begin_with(job: JobMaker, stdin: Stdin) -> None:
    stdin.be_a_terminal()
    with pytest.raises(UsageError, match="standard input is a terminal"):
        run(job)
    stdin.be_closed()
    with pytest.raises(UsageError, match="standard input is closed"):
        run(job)
    assert not job.output.exists()


def test_a_copy_that_has_gone_is_asked_for_again(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    interrupt(job)
    (job.output / "input.spool").unlink()
    stdin.give([])
    with pytest.raises(UsageError, match=r"input\.spool is gone; pipe the same rows in again"):
        run(job)
    stdin.give(ROWS)
    interrupt(job)
    stdin.give([])
    assert run(job).exit_code == 0
    assert job.outputs() == expected(job, ROWS)


def test_a_refused_overwrite_leaves_the_old_run_to_resume(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    interrupt(job)
    before = files(job.output)
    stdin.give(OTHERS)
    with pytest.raises(ModelError):
        run(job, OVERWRITE, on_load=lambda: raising(ModelError("model.safetensors is corrupt")))
    assert files(job.output) == before
    stdin.give([])
    assert run(job).exit_code == 0
    assert job.outputs() == expected(job, ROWS)


def test_an_overwrite_runs_the_new_rows(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    interrupt(job)
    stdin.give(OTHERS)
    assert run(job, OVERWRITE).exit_code == 0
    assert job.outputs() == expected(job, OTHERS)


def test_an_overwrite_by_a_job_over_files_takes_the_copy_away(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)
    interrupt(job)
    job.write(ROWS)
    assert job.run(options=quiet(overwrite=True, max_total_tokens=300)).exit_code == 75
    assert "input.spool" not in names(job.output)


def test_a_stop_before_the_job_began_leaves_no_copy(job: JobMaker, stdin: Stdin) -> None:
    stdin.give(ROWS)

    with pytest.raises(KeyboardInterrupt):
        run(job, on_load=lambda: raising(KeyboardInterrupt()))
    assert names(job.output) == set()
    stdin.give(OTHERS)
    run(job)
    assert job.outputs() == expected(job, OTHERS)


def test_stdin_is_copied_to_a_file_that_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "stdin.jsonl"
    stage_stdin(target, io.BytesIO(b"rows"))
    assert not target.exists()
    commit_staged(target)
    assert target.read_bytes() == b"rows"
    assert [path.name for path in tmp_path.iterdir()] == ["stdin.jsonl"]


def test_standard_input_that_cannot_be_read_is_named_as_such(
    stdin: Stdin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Lost(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=Lost(), isatty=lambda: False))
    with pytest.raises(UsageError, match=r"standard input cannot be read: Input/output error$"):
        stage_stdin(tmp_path / "copy")
    assert not [*tmp_path.iterdir()]
