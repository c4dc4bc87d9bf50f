"""Rows that were cut off run again under other values; the other rows keep their bytes, and it is all repeatable."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, finish, quiet, rows_of, start, without_timings
from stub_engine import stub_factory

from batchgen.core.errors import ExitCode, ResumeMismatch, UsageError
from batchgen.run.invocation import Outcome
from batchgen.run.retry import retry_job

SAMPLED = {"max_tokens": 3, "temperature": 1.0, "seed": 7}


def again(folder: Path, where: str = "length", engines: list[Any] | None = None, **values: Any) -> Outcome:
    flags = {"sampling": values} if values else {}
    return retry_job(folder, quiet(), flags, engine_factory=stub_factory(engines), where=where)


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """The records by index, timings aside; of OpenAI's shape by the position in the file."""
    found = without_timings(next(folder.glob("outputs.*")))
    return {record.get("index", number): record for number, record in enumerate(found)}


def retried(record: dict[str, Any]) -> dict[str, Any] | None:
    found = record.get("retried")
    return json.loads(found) if isinstance(found, str) else found


def num_cut_off(found: dict[int, dict[str, Any]]) -> int:
    """How many records say of any sample that it is cut off."""
    return sum('"finish_reason": "length"' in json.dumps(record) for record in found.values())


@pytest.mark.parametrize("form", ["jsonl", "parquet", "openai-batch"])
@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, SAMPLED, {**SAMPLED, "n": 2}])
def test_cut_off_rows_finish_and_the_others_keep_their_bytes(
    job: JobMaker, form: str, sampling: dict[str, Any]
) -> None:
    job.write(rows_of(40))
    spec = job.spec(sampling=sampling, output={"format": form}, input={"keep_columns": ["answer"]})
    job.run(spec, fails=frozenset({4}))
    before = records(job.output)
    engines: list[Any] = []
    outcome = again(job.output, engines=engines, max_tokens=32)
    after = records(job.output)
    changed = {index for index, record in after.items() if retried(record)}
    assert len(changed) == engines[0].num_pulled == num_cut_off(before) > 5
    assert all(after[index] == {**before[index], **after[index]} for index in after)
    assert {i: {**r, "retried": 0} for i, r in after.items() if i not in changed} == {
        i: {**r, "retried": 0} for i, r in before.items() if i not in changed
    }
    (first,) = {json.dumps({**(retried(after[i]) or {}), "seed": 0}) for i in changed}
    assert json.loads(first) == {"attempt": 2, "max_tokens": 32, "seed": 0}
    assert outcome.exit_code == ExitCode.ROWS_FAILED
    assert [letter.get("index", 4) for letter in job.errors()] == [4]
    assert num_cut_off(after) < len(changed)
    assert outcome.report is not None and outcome.report["rows"] == {"total": 40, "done": 39, "failed": 1}


def nights(job: JobMaker, folder: Path, workers: int = 0) -> list[dict[str, Any]]:
    job.write(rows_of(60))
    cluster = {"cluster": {"workers": str(workers)}} if workers else {}
    job.run(job.spec(sampling=SAMPLED, output={"path": str(folder)}, **cluster))
    for values in ({"max_tokens": 6}, {"max_tokens": 12, "temperature": 0.5}, {"max_tokens": 12, "temperature": 0.0}):
        again(folder, **values)
    return list(records(folder).values())


def test_retries_of_retries_are_repeatable(job: JobMaker) -> None:
    first = nights(job, job.folder / "first")
    assert first == nights(job, job.folder / "second")
    attempts = [record.get("retried", {}).get("attempt", 1) for record in first]
    assert {*attempts} == {1, 2, 3, 4}
    seeds = [(record["retried"]["attempt"], record["retried"].get("seed")) for record in first if "retried" in record]
    assert len({seed for seed in seeds if seed[0] < 4}) == 2 and all((seed is None) == (at == 4) for at, seed in seeds)


def test_a_retry_that_was_killed_goes_on_with_the_same_flags_or_none(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows_of(20))
    job.run(job.spec(sampling={"max_tokens": 3}))
    values = {"max_tokens": 8, "stop": ["never"], "logit_bias": {"9": -1.0}}
    for number in range(2):
        with monkeypatch.context() as patched:
            patched.setattr("batchgen.run.again.finalize_again", lambda *_: sys.exit("killed"))
            with pytest.raises(SystemExit):
                again(job.output, **(values if number == 0 else {}))
    assert again(job.output, **values).exit_code == ExitCode.OK


def test_what_is_not_given_is_as_in_the_retry_before(job: JobMaker) -> None:
    job.write(rows_of(40))
    job.run(job.spec(sampling={"max_tokens": 3}), fails=frozenset({4}))
    again(job.output, max_tokens=8)
    was = records(job.output)
    assert num_cut_off(was) > 0
    again(job.output, temperature=0.5)
    changed = {i: record for i, record in records(job.output).items() if record != was[i]}
    assert len(changed) == num_cut_off(was)
    for record in changed.values():
        assert {**(retried(record) or {}), "seed": 0} == {"attempt": 3, "max_tokens": 8, "temperature": 0.5, "seed": 0}
    again(job.output, max_tokens=64)
    assert again(job.output, max_tokens=64).exit_code == ExitCode.ROWS_FAILED  # nothing is cut off, but a row failed


@pytest.mark.parametrize("workers", [0, 2])
def test_a_retry_that_was_killed_goes_on_with_its_values(job: JobMaker, workers: int) -> None:
    job.write(rows_of(120))
    for name in ("killed", "whole"):
        job.run(job.spec(sampling=SAMPLED, output={"path": str(job.folder / name)}))
    again(job.folder / "whole", max_tokens=40)
    folder = job.folder / "killed"
    more = ["--workers", "2"] if workers else []
    for number in (signal.SIGKILL, signal.SIGTERM):
        values = ["--where", "length", "--max-tokens", "40"] if number == signal.SIGKILL else []
        process = start(["retry", folder, *values, *more], step_s=0.05)
        size = sum(file.stat().st_size for file in folder.glob("retry/*.seg"))
        while process.poll() is None and sum(f.stat().st_size for f in folder.glob("retry/*.seg")) < size + 3000:
            time.sleep(0.02)
        process.send_signal(number)
        finish(process)
    with pytest.raises(UsageError, match="interrupted"):
        again(folder, max_tokens=50)
    with pytest.raises(UsageError, match="interrupted"):
        again(folder, "incomplete", max_tokens=40)
    code, said = finish(start(["retry", folder, *more]))
    assert code == 0, said
    assert records(folder) == records(job.folder / "whole")
    assert {path.name for path in folder.iterdir()} == {"outputs.jsonl", "report.json", "job.json"}


def test_a_kill_behind_the_outputs_runs_nothing_again(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(20))
    job.run(job.spec(sampling=SAMPLED))
    with monkeypatch.context() as patched:
        patched.setattr("batchgen.run.invocation.following_report", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again(job.output, max_tokens=5)
    before, engines = records(job.output), []
    again(job.output, "failed", engines=engines)
    assert records(job.output) == before and not engines


def test_a_row_that_fails_now_keeps_its_answer(job: JobMaker) -> None:
    job.write(rows_of(20))
    job.run(job.spec(sampling={"max_tokens": 2}))
    before = records(job.output)
    (*_, last) = [index for index, record in before.items() if record["finish_reason"] == "length"]
    factory = stub_factory(fails=frozenset({last}))
    flags = {"sampling": {"max_tokens": 30}}
    outcome = retry_job(job.output, quiet(), flags, engine_factory=factory, where="length")
    assert outcome.exit_code == ExitCode.OK
    assert "1 row failed and kept the answer they had; the first: the stub fails this" in "\n".join(outcome.lines)
    assert records(job.output)[last] == before[last] and len(records(job.output)) == 20


def test_incomplete_answers_run_again(job: JobMaker) -> None:
    job.write(rows_of(20))
    job.run(job.spec(sampling={"max_tokens": 2, "structured_outputs": {"json_object": True}}))
    assert {record["complete"] for record in records(job.output).values()} == {True, False}
    again(job.output, "incomplete", max_tokens=60)
    assert sum(not record["complete"] for record in records(job.output).values()) < 5
    assert "retried" in json.dumps(records(job.output))


def test_rows_mended_by_hand_and_changed_inputs(job: JobMaker) -> None:
    job.write([*rows_of(9), {"id": "x", "qestion": "Why?"}])
    job.run(job.spec(sampling={"max_tokens": 1}), fails=frozenset({4}))
    letters = job.errors()
    for letter in letters:
        letter["row"] = {"id": letter["id"], "question": "Why?"}
    (job.output / "errors.jsonl").write_text("".join(json.dumps(letter) + "\n" for letter in letters))
    retry_job(job.output, quiet(), {}, engine_factory=stub_factory())
    before = records(job.output)
    outcome = again(job.output, max_tokens=9)
    assert "2 rows not run again" in "\n".join(outcome.lines)
    assert all(records(job.output)[index] == before[index] for index in (4, 9))
    with job.input.open("a") as file:  # it may grow
        file.write(json.dumps(rows_of(11)[10]) + "\n")
    again(job.output, max_tokens=10)
    job.write(rows_of(10))
    with pytest.raises(ResumeMismatch, match=r"input\.jsonl"):
        again(job.output, max_tokens=11)


def test_values_and_rows_must_be_named(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    with pytest.raises(UsageError, match="needs a value"):
        again(job.output)
    with pytest.raises(UsageError, match="needs --where"):
        again(job.output, "failed", max_tokens=3)
    assert "nothing to retry" in again(job.output, "incomplete", max_tokens=3).lines[0]
