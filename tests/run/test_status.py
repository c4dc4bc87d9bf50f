"""What ``batchgen status`` says of a run in every state, from another process."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, Shell, finish, quiet, rows_of, start, until_rows_are_done, updating

from batchgen.core.errors import BatchgenError, ExitCode, StorageError, UsageError
from batchgen.output.rundir import RunDir
from batchgen.run import status as status_module
from batchgen.run.invocation import RunOptions
from batchgen.run.progress import read_progress
from batchgen.run.reports import read_report
from batchgen.run.status import read_status, render_status, watch_status


def test_a_running_run_is_watched_from_outside_to_its_end_and_not_disturbed(job: JobMaker) -> None:
    job.write(rows_of(40))
    process = start(["run", job.toml()], step_s=0.05)
    until_rows_are_done(process, job.output, 5)
    status = read_status(job.output)
    assert status["state"] == "running"
    assert status["holder"]["pid"] == process.pid
    assert status["rows"]["total"] == 40
    assert 0 < status["rows"]["done"] < 40
    assert status["tokens"]["completion"] > 0
    assert f"process {process.pid}" in render_status(status)
    *states, last = [found["state"] for found in watch_status(job.output, interval_s=0.1)]
    assert finish(process)[0] == 0
    assert ({*states}, last) == ({"running"}, "finished")


def test_a_finished_run_shows_what_its_report_says_and_without_one_no_tokens(job: JobMaker, shell: Shell) -> None:
    job.write([*rows_of(5), "{"])
    job.run()
    status = read_status(job.output)
    assert status["state"] == "finished"
    assert status["rows"] == {"total": 6, "done": 5, "failed": 1, "left": 0}
    assert "finished" in render_status(status).splitlines()[0]
    keys = {"state", "rows", "tokens", "tokens_per_s", "eta_s", "holder", "updated_at"}
    assert shell("status", job.output, "--json").json.keys() >= keys

    (job.output / "report.json").unlink()
    status = read_status(job.output)
    assert status["rows"]["done"] == 5 and status["tokens"] is None
    assert "tokens" not in render_status(status)


def test_watching_a_stopped_run_waits_until_it_goes_on_and_ends(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["stopped", "stopped", "running", "running", "stopped", "running"])
    monkeypatch.setattr(status_module, "read_status", lambda folder: {"state": next(states)})
    seen = [found["state"] for found in watch_status(job.output, 0.0)]
    assert seen == ["stopped", "stopped", "running", "running", "stopped"]
    monkeypatch.setattr(status_module, "START_S", -1.0)
    monkeypatch.setattr(status_module, "read_status", lambda folder: {"state": "stopped"})
    assert len(list(watch_status(job.output, 0.0))) == 1
    monkeypatch.setattr(status_module, "START_S", 1e9)
    monkeypatch.setattr(status_module, "read_status", lambda folder: {"state": "finished"})
    assert len(list(watch_status(job.output, 0.0))) == 1


def test_a_stopped_run_says_why_what_to_do_and_how_many_rows_are_half_done(job: JobMaker) -> None:
    job.write(rows_of(60))
    (said, *_) = job.run(options=quiet(max_total_tokens=200)).lines
    status = read_status(job.output)
    assert status["state"] == "stopped"
    assert status["rows"]["done"] + status["rows"]["left"] == 60
    assert "max total tokens of 200" in render_status(status)
    assert "run again to resume" in render_status(status)
    assert f"{status['rows']['half_done']} half done and saved" in said
    assert f"{status['rows']['half_done']} half done, " in render_status(status)
    job.run()
    assert "half_done" not in read_status(job.output)["rows"]


def test_a_process_that_stands_still_is_said_to(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(40))
    process = start(["run", job.toml()], step_s=0.05)
    until_rows_are_done(process, job.output, 2)
    status = read_status(job.output)
    assert status["silent_s"] < 10 and "last progress" not in render_status(status)
    process.send_signal(signal.SIGSTOP)
    found = {**(read_progress(job.output) or {}), "updated_at": "2026-01-02T03:04:05+00:00"}
    monkeypatch.setattr("batchgen.run.status.read_progress", lambda folder: found)
    assert re.search(
        r"running: generating, last progress \d+d .*ago: the process or its machine may be hung",
        render_status(read_status(job.output)),
    )
    found["pid"] = 1
    assert "last progress" not in render_status(read_status(job.output)), "of an invocation before this one"
    process.kill()
    process.communicate()


def test_a_killed_run_shows_what_its_journal_holds(job: JobMaker) -> None:
    job.write(rows_of(40))
    process = start(["run", job.toml()], step_s=0.05)
    until_rows_are_done(process, job.output, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status = read_status(job.output)
    assert (status["state"], status["holder"]) == ("interrupted", None)
    assert 5 <= status["rows"]["done"] < 40
    assert status["tokens"] is None and "tokens  " not in render_status(status)
    status["rows"] |= {"total": None, "left": None}  # killed before it was known
    assert f"rows    total not known yet: {status['rows']['done']} done, 0 failed" in render_status(status)


def test_a_crashed_run_is_failed(job: JobMaker) -> None:
    job.write(rows_of(60))
    with pytest.raises(RuntimeError):
        job.run(crashes_at=20)
    assert read_status(job.output)["state"] == "failed"


def test_a_run_stopped_before_its_first_row_says_so(job: JobMaker) -> None:
    job.write(rows_of(5))
    process = start(["run", job.toml(), "--max-runtime", "1s"], load_s=30)
    assert finish(process)[0] == 75
    said = render_status(read_status(job.output))
    assert "stopped (max runtime of 1.0 s); it was still loading the model: give it more time" in said
    assert job.run().exit_code == 0


def test_a_run_whose_time_ends_while_it_reads_its_input_says_to_give_it_more(job: JobMaker) -> None:
    (job.folder / "rows.jsonl").touch()
    os.mkfifo(pipe := job.folder / "pipe")
    writer = os.open(pipe, os.O_RDWR)
    process = start(["run", job.toml(), "--max-runtime", "1s", "--input", "-", "--input-format", "jsonl"], stdin=pipe)
    code, said = finish(process)
    os.close(writer)
    assert (code, said.count("it was still reading standard input: give it more time")) == (75, 1), said


def test_a_run_that_an_error_ended_says_which(job: JobMaker) -> None:
    job.write(rows_of(600))
    with pytest.raises(BatchgenError):
        job.run(before_step=lambda step: job.write(rows_of(5)) if step == 3 else None)
    said = render_status(read_status(job.output)).splitlines()[0]
    assert "failed: " in said
    assert f"{job.input} has changed" in said
    assert "; run again to resume" not in said


def test_an_unfinished_update_of_a_finished_run_is_told_of(job: JobMaker) -> None:
    job.write(rows_of(30))
    job.run(fails=frozenset(range(20)))
    assert job.run(options=updating(max_total_tokens=70)).exit_code == 75
    status = read_status(job.output)
    said = render_status(status).splitlines()[0]
    assert said.endswith("; run again to resume; the outputs are from the previous job")
    assert status["rows"]["done"] >= 10


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        read_status(tmp_path)
    file = tmp_path / "questions.jsonl"
    file.touch()
    with pytest.raises(UsageError, match=r"questions\.jsonl is not a run directory"):
        read_status(file)


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Plain data with another value at a path of keys."""
    if not path:
        return value
    return {key: changed(item, path[1:], value) if key == path[0] else item for key, item in tree.items()}


def paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield (key,)
        yield from ((key, *path) for path in paths(value))


def test_another_value_in_progress_or_report_stops_nothing_that_reads_them(job: JobMaker) -> None:
    """They inform: rows are counted in the journal and the outputs."""
    job.write([*rows_of(40), "{"])
    job.run(options=quiet(max_total_tokens=200))
    known = json.loads((job.output / "progress.json").read_bytes())
    values = itertools.cycle(("x", 3, None, [], {}, float("inf")))  # each key with one, of each of its kinds
    for path, value in zip(paths(known), values, strict=False):
        (job.output / "progress.json").write_text(json.dumps(changed(known, path, value)))
        assert render_status(read_status(job.output))
    (job.output / "progress.json").write_text(json.dumps(known))
    job.run()
    report = json.loads((job.output / "report.json").read_bytes())
    for path, value in zip(paths(report), values, strict=False):
        (job.output / "report.json").write_text(json.dumps(changed(report, path, value)))
        assert read_status(job.output)["rows"]["failed"] == 1 or path[0] == "rows"
        with suppress(UsageError):
            read_report(RunDir(job.output))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"version": 1, "rows": 3}', '{"version": 1, "spent": "'])
def test_progress_that_no_run_wrote_is_set_aside(job: JobMaker, content: str) -> None:
    job.write(rows_of(40))
    job.run(options=quiet(max_total_tokens=200))
    (job.output / "progress.json").write_text(content)
    assert job.run(options=RunOptions()).exit_code == ExitCode.OK
    assert len(job.outputs()) == 40


@pytest.mark.parametrize("name", ["report.json", "progress.json", "errors.jsonl"])
def test_a_pipe_in_place_of_what_informs_is_not_waited_for(job: JobMaker, name: str) -> None:
    job.write(rows_of(5))
    job.run()
    (job.output / name).unlink(missing_ok=True)
    os.mkfifo(job.output / name)
    assert read_status(job.output)["rows"]["done"] == 5
    assert job.run().exit_code == ExitCode.OK
    with suppress(UsageError):
        read_report(RunDir(job.output))


def test_the_name_of_a_folder_steers_no_terminal(job: JobMaker) -> None:
    job.write(rows_of(3))
    folder = job.folder / "two\nlines\x1b[2J"
    job.run(job.spec(output={"path": str(folder)}))
    assert render_status(read_status(folder)).startswith(f"{job.folder}/two\\nlines\\x1b[2J: finished")


def test_a_run_that_a_full_disk_has_ended_has_failed(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(60))
    job.run(options=quiet(max_total_tokens=200))

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(self, mode, *args, **kwargs)

    opened = Path.open
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(Path, "open", full)
        job.run()
    status = read_status(job.output)
    assert status["state"] == "failed"
    assert "No space left" in status["reason"]
    assert job.run().exit_code == ExitCode.OK
