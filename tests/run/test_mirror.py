"""Mirrored runs: any loss of the run directory, at any moment, ends in the bytes of an undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from object_store import Answer, ObjectStore, bucket_of, object_store
from run_helpers import REPOSITORY, JobMaker, finish, quiet, rows_of, start, survived, until_rows_are_done

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, LockedError, ResumeMismatch, StorageError, UsageError
from batchgen.output import mirror as mirror_module
from batchgen.output import remote_lock
from batchgen.output.rundir import RunDir
from batchgen.output.segments import segments
from batchgen.run.invocation import RunOptions

_numbers = count()
NUM_ROWS = 40
DUPLICATE = {"id": "q-1", "question": "Which row is this?"}  # an error row wherever it comes after q-1


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


@pytest.fixture
def bucket(store: ObjectStore) -> Iterator[str]:
    with bucket_of(store, f"mirror{next(_numbers)}") as name:
        yield name


@pytest.fixture(autouse=True)
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that copies all the time."""
    monkeypatch.setattr(mirror_module, "EVERY_S", 0.1)


@pytest.fixture
def mirrored(job: JobMaker, bucket: str) -> JobSpec:
    """A job of forty rows and a duplicate, mirrored in the folder "run" of the bucket."""
    job.write([*rows_of(NUM_ROWS), DUPLICATE])
    return job.spec(output={"mirror": f"s3://{bucket}/run"})


def undisturbed(job: JobMaker) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The outputs and errors of the job without any mirror."""
    alone = JobMaker(job.folder)
    alone.output = job.folder / "alone"
    alone.run(alone.spec())
    return alone.outputs(), alone.errors()


def elsewhere(job: JobMaker, spec: JobSpec) -> tuple[JobMaker, JobSpec]:
    """The same job on another machine, as it were: in another directory."""
    other = JobMaker(job.folder)
    other.output = job.folder / "elsewhere"
    return other, other.spec(output={"mirror": spec.output.mirror, "publish": spec.output.publish})


def rows_there(store: ObjectStore, bucket: str) -> int:
    """How many rows the mirror holds."""
    parts = [content for name, content in store.content(bucket).items() if name.startswith("run/journal/")]
    return sum(line[9:10] in b"re" for part in parts for line in part.splitlines())


@pytest.mark.parametrize(
    "max_tokens", [pytest.param(1, marks=pytest.mark.slow), 600, pytest.param(900, marks=pytest.mark.slow)]
)
def test_a_run_whose_directory_is_lost_goes_on_from_the_mirror(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, max_tokens: int
) -> None:
    assert job.run(mirrored, quiet(max_total_tokens=max_tokens)).exit_code == ExitCode.STOPPED
    num_there = rows_there(store, bucket)
    assert (num_there > 5) == (max_tokens > 1)
    shutil.rmtree(job.output)
    assert job.run(mirrored).exit_code == ExitCode.ROWS_FAILED
    assert (job.outputs(), job.errors()) == undisturbed(job)
    assert job.engines[0].num_started <= NUM_ROWS - num_there + 1  # finished rows are not run again
    assert rows_there(store, bucket) == 0


@pytest.mark.slow
def test_half_done_rows_go_on_from_their_tokens_elsewhere(job: JobMaker, bucket: str, mirrored: JobSpec) -> None:
    job.run(mirrored, quiet(max_total_tokens=500))
    shutil.rmtree(job.output)
    job.run(mirrored)
    resumed = job.engines[0].stats.num_output_tokens
    shutil.rmtree(job.output)
    job.run(job.spec())
    assert 0 < resumed < job.engines[0].stats.num_output_tokens


@pytest.mark.slow
def test_the_report_of_a_restored_run_adds_up_both_machines(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=500))
    last = json.loads(store.content(bucket)["run/progress.json"])
    assert last == json.loads((job.output / "progress.json").read_text()) and last["state"] == "stopped"
    shutil.rmtree(job.output)
    assert (job.run(mirrored).report or {})["sessions"] == 2


def test_a_finished_run_is_restored_whole_and_is_done(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored)
    files = {path.name: path.read_bytes() for path in job.output.iterdir() if path.name != "job.json"}
    assert not [name for name in store.content(bucket) if "journal" in name or "progress" in name]
    shutil.rmtree(job.output)
    outcome = job.run(mirrored)
    assert outcome.exit_code == ExitCode.ROWS_FAILED and "already done" in outcome.lines[0] and not job.engines
    (job.output / "job.json").unlink()  # it may say more about when files were read
    assert {path.name: path.read_bytes() for path in job.output.iterdir()} == files


@pytest.mark.slow
def test_a_finished_file_that_was_damaged_there_is_not_restored(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=500))
    other, spec = elsewhere(job, mirrored)
    other.run(spec)
    store.put(bucket, "run/outputs.jsonl", b"{}\n")
    before = {path.name for path in job.output.iterdir()}
    with pytest.raises(Exception, match=r"outputs\.jsonl is not what was written there.*--overwrite"):
        job.run(mirrored)
    assert not RunDir(job.output).is_complete()
    assert {path.name for path in job.output.iterdir() if not path.name.startswith(".")} == before
    job.output = job.folder / "empty"
    with pytest.raises(Exception, match=r"outputs\.jsonl is not what was written there"):
        job.run(job.spec(output={"mirror": mirrored.output.mirror}))
    assert not RunDir(job.output).is_complete()


@pytest.mark.slow
def test_a_directory_that_is_behind_fetches_what_was_done_elsewhere(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=500))
    other, spec = elsewhere(job, mirrored)
    other.run(spec, quiet(max_total_tokens=400))
    assert other.engines[0].num_started > 0
    num_there = rows_there(store, bucket)
    job.run(mirrored)
    assert job.engines[0].num_started <= NUM_ROWS - num_there + 1
    assert (job.outputs(), job.errors()) == undisturbed(job)


@pytest.mark.slow
def test_a_directory_that_is_behind_takes_the_files_of_a_run_finished_elsewhere(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=500))
    other, spec = elsewhere(job, mirrored)
    other.run(spec)
    job.run(mirrored)
    assert not job.engines and not (job.output / "journal").exists()
    assert (job.outputs(), job.errors()) == (other.outputs(), other.errors()) == undisturbed(job)


@pytest.mark.slow
def test_parts_that_are_torn_or_missing_cost_only_their_rows(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=900), step_s=0.1)
    names = sorted(name for name in store.content(bucket) if "journal" in name)
    assert len(names) > 2
    store.remove(bucket, names[0])
    store.put(bucket, names[-1], store.content(bucket)[names[-1]][:-20])
    shutil.rmtree(job.output)
    job.run(mirrored)
    assert (job.outputs(), job.errors()) == undisturbed(job)


def test_the_mirror_of_a_stopped_run_holds_all_of_it(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "EVERY_S", 3600.0)  # no copy but the first and the last
    job.run(mirrored, quiet(max_total_tokens=600))
    content = store.content(bucket)
    there: dict[int, bytes] = {}
    for name in sorted(content):  # a first copy may have come before the last one
        if name.startswith("run/journal/"):
            number = int(name[12:18])
            there[number] = there.get(number, b"") + content[name]
    assert there == {number: path.read_bytes() for number, path in segments(job.output / "journal")}
    assert content["run/job.json"] == (job.output / "job.json").read_bytes()
    assert json.loads(content["run/run.lock"])["released"] is True


@pytest.mark.slow
def test_the_manifest_is_there_before_any_row(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, step_s=0.05)
    written = [name.removeprefix(f"PUT {bucket}/run/") for name in store.requests if name.startswith("PUT ")]
    assert next(name for name in written if name != "run.lock") == "job.json"
    assert written.index("outputs.jsonl") > max(i for i, name in enumerate(written) if "journal" in name)


def test_a_mirror_that_fails_stops_no_run_and_catches_up(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"fails": False, "refused": 0}

    def fail(request: str) -> Answer | None:
        is_copy = state["fails"] and ("journal" in request or "progress" in request or "run.lock" in request)
        state["refused"] += is_copy and request.startswith("PUT")
        return 403 if is_copy and request.startswith("PUT") else None

    def before_step(step: int) -> None:
        state["fails"] = 2 <= step < 12
        time.sleep(0.05)
        until = time.monotonic() + 20
        while step in (11, 14) and time.monotonic() < until and not state["refused"] * (step < 14 or "t up" in said()):
            time.sleep(0.02)

    texts: list[str] = []

    def said() -> str:
        texts.append(capsys.readouterr().err)
        return "".join(texts)

    store.fault = fail
    options = RunOptions(heartbeat_s=3600.0)
    assert job.run(mirrored, options, before_step=before_step).exit_code == ExitCode.ROWS_FAILED
    assert said().count("the mirror falls behind, the run goes on") == 1
    assert said().count("the mirror has caught up") == 1
    assert (job.outputs(), job.errors()) == undisturbed(job)


def test_a_second_machine_is_turned_away_and_told_who_holds_the_run(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    other, spec = elsewhere(job, mirrored)
    seen: list[str] = []

    def second(step: int) -> None:
        if step == 3:
            with pytest.raises(LockedError, match=r"is in use by process \d+ on .*, heard from \d+ s ago") as caught:
                other.run(spec)
            seen.append(str(caught.value))

    assert job.run(mirrored, before_step=second).exit_code == ExitCode.ROWS_FAILED
    assert seen and not other.engines
    assert other.run(spec).lines[0].startswith("already done")


def test_a_holder_that_is_silent_is_taken_over_and_stops_when_it_wakes(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_lock, "SILENT_S", -1.0)
    other, spec = elsewhere(job, mirrored)
    codes = []

    def second(step: int) -> None:
        if step == 8:  # signals are this thread's
            options = quiet(max_total_tokens=700)
            thread = threading.Thread(target=lambda: codes.append(other.run(spec, options).exit_code))
            thread.start()
            thread.join()

    outcome = job.run(mirrored, before_step=second, step_s=0.05)
    assert outcome.exit_code == ExitCode.STOPPED and "was taken over by process" in outcome.lines[0]
    assert codes == [ExitCode.STOPPED]
    numbers = [{number for number, _ in segments(folder / "journal")} for folder in (job.output, other.output)]
    assert max(numbers[1]) - max(numbers[0]) >= 900  # what the first one may still write is told apart
    for maker, settings in ((job, mirrored), (other, spec)):
        maker.run(settings)
        assert (maker.outputs(), maker.errors()) == undisturbed(job)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_at_once_where_it_was(job: JobMaker, bucket: str, mirrored: JobSpec) -> None:
    process = start(["run", job.toml(), "--mirror", mirrored.output.mirror], step_s=0.05, mirror_every_s=0.05)
    until_rows_are_done(process, job.output, 3)
    process.kill()
    finish(process)
    code, said = finish(start(["run", job.toml(), "--mirror", mirrored.output.mirror]))
    assert code == ExitCode.ROWS_FAILED, said
    assert (job.outputs(), job.errors()) == undisturbed(job)


@pytest.mark.slow
def test_a_stopped_command_copies_the_last_rows_within_its_ten_seconds(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    process = start(["run", job.toml(), "--mirror", mirrored.output.mirror], step_s=0.05, mirror_every_s=3600)
    until_rows_are_done(process, job.output, 5)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == ExitCode.STOPPED and "Traceback" not in said
    num_here = sum(
        line[9:10] in b"re" for _, path in segments(job.output / "journal") for line in path.read_bytes().splitlines()
    )
    assert rows_there(store, bucket) == num_here >= 5


@pytest.mark.slow
def test_the_mirror_of_another_run_is_not_touched_unless_that_is_asked_for(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=300))
    other, _ = elsewhere(job, mirrored)
    shorter = other.spec(output={"mirror": mirrored.output.mirror}, sampling={"max_tokens": 8})
    before = {name: content for name, content in store.content(bucket).items() if "run.lock" not in name}
    with pytest.raises(ResumeMismatch, match="was begun with another job"):
        other.run(shorter)
    assert not list(other.output.glob("*")) and not other.engines
    other.run(other.spec(sampling={"max_tokens": 8}), quiet(max_total_tokens=300))
    with pytest.raises(UsageError, match="holds another run, begun 20"):
        other.run(shorter)
    assert {name: content for name, content in store.content(bucket).items() if "run.lock" not in name} == before
    assert other.run(shorter, RunOptions(progress="quiet", overwrite=True)).exit_code == ExitCode.ROWS_FAILED
    assert store.content(bucket)["run/outputs.jsonl"] == (other.output / "outputs.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["outputs.jsonl", "report.json", "job.json", "batchgen.json"])
def test_a_folder_with_files_of_others_becomes_no_mirror(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, name: str
) -> None:
    store.put(bucket, f"run/{name}", b"{}")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"choose another output\.mirror"):
            job.run(mirrored, RunOptions(progress="quiet", overwrite=overwrite))
    assert store.content(bucket) == {f"run/{name}": b"{}"} and not job.engines


@pytest.mark.slow
def test_overwrite_begins_a_mirror_anew(job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec) -> None:
    job.run(mirrored, quiet(max_total_tokens=600))
    overwrite = RunOptions(progress="quiet", overwrite=True, limits=quiet(max_total_tokens=1).limits)
    job.run(mirrored, overwrite)
    assert rows_there(store, bucket) < 20
    assert store.content(bucket)["run/job.json"] == (job.output / "job.json").read_bytes()


@pytest.mark.slow
def test_a_mirror_may_be_added_to_a_run_that_has_begun(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(job.spec(), quiet(max_total_tokens=500))
    job.run(mirrored, quiet(max_total_tokens=1))
    shutil.rmtree(job.output)
    job.run(mirrored)
    assert job.engines[0].num_started < NUM_ROWS
    assert (job.outputs(), job.errors()) == undisturbed(job)


@pytest.mark.slow
def test_a_mirror_that_cannot_be_finished_is_finished_by_the_next_invocation(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    store.fault = lambda request: 403 if request == f"PUT {bucket}/run/outputs.jsonl" else None
    with pytest.raises(StorageError, match="run again to publish them"):
        job.run(mirrored)
    store.fault = lambda request: None
    assert job.run(mirrored).exit_code == ExitCode.ROWS_FAILED and not job.engines
    assert rows_there(store, bucket) == 0
    assert store.content(bucket)["run/outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


@pytest.mark.slow
def test_a_store_that_knows_no_conditions_locks_by_heartbeat(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = store._app

    def without_conditions(environ: dict[str, Any], start_response: Any) -> Any:
        if {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys() and environ["REQUEST_METHOD"] == "PUT":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("501 Not Implemented", [("Content-Type", "application/xml")])
            return [b"<Error><Code>NotImplemented</Code><Message>no conditions here</Message></Error>"]
        return plain(environ, start_response)

    monkeypatch.setattr(store, "_app", without_conditions)
    job.run(mirrored, quiet(max_total_tokens=500))
    other, spec = elsewhere(job, mirrored)

    def second(step: int) -> None:
        if step == 2:
            with pytest.raises(LockedError, match="is in use by"):
                other.run(spec)

    assert job.run(mirrored, before_step=second).exit_code == ExitCode.ROWS_FAILED
    assert (job.outputs(), job.errors()) == undisturbed(job)


@pytest.mark.slow
def test_a_machine_that_wakes_after_it_was_taken_over_stops_and_loses_nothing(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.write([*rows_of(300), DUPLICATE])
    command = ["run", job.toml(), "--mirror", mirrored.output.mirror]
    asleep = start(command, step_s=0.05, mirror_every_s=0.1)
    until_rows_are_done(asleep, job.output, 30)
    asleep.send_signal(signal.SIGSTOP)
    other = ["--output", job.folder / "elsewhere", "--max-total-tokens", "1500"]
    time.sleep(3)
    process = start([*command, *other], step_s=0.05, mirror_silent_s=2, mirror_every_s=0.1)
    until_rows_are_done(process, job.folder / "elsewhere", 35)
    asleep.send_signal(signal.SIGCONT)
    code, said = finish(asleep)
    assert code == ExitCode.STOPPED and "was taken over by process" in said
    code, said = finish(process)
    assert code == ExitCode.STOPPED and "taken over from process" in said
    code, said = finish(start(command))
    assert code == ExitCode.ROWS_FAILED, said
    assert (job.outputs(), job.errors()) == undisturbed(job)


@pytest.mark.slow
def test_rows_that_came_on_standard_input_are_piped_in_again(job: JobMaker, bucket: str, mirrored: JobSpec) -> None:
    command = ["run", job.toml(), "--input", "-", "--mirror", mirrored.output.mirror]
    code, said = finish(start([*command, "--max-total-tokens", "600"], stdin=job.input))
    assert code == ExitCode.STOPPED, said
    shutil.rmtree(job.output)
    code, said = finish(start(command))
    assert code == ExitCode.USAGE and "pipe the same rows in again" in said
    code, said = finish(start(command, stdin=job.input))
    assert code == ExitCode.ROWS_FAILED and "of them finished already" in said
    assert job.outputs() == undisturbed(job)[0] and len(job.errors()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_machines_lost_at_random_moments_lose_and_repeat_no_row(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, seed: int
) -> None:
    rng = random.Random(seed)
    job.write([*rows_of(300), DUPLICATE])
    job.toml(sampling={"temperature": 0.8})
    command = ["run", job.folder / "job.toml", "--mirror", mirrored.output.mirror]
    for _ in range(5):
        process = start(command, step_s=0.02, mirror_every_s=0.1, mirror_silent_s=0)
        time.sleep(rng.uniform(1.0, 8.0))
        process.kill()
        finish(process)
        if rng.random() < 0.8:
            shutil.rmtree(job.output, ignore_errors=True)
    code, said = finish(start(command, mirror_silent_s=0))
    assert code == ExitCode.ROWS_FAILED, said
    shutil.move(job.output, job.folder / "restored")
    found = JobMaker(job.folder)
    found.output = job.folder / "restored"
    code, said = finish(start(["run", job.folder / "job.toml", "--output", job.output]))
    assert (found.outputs(), found.errors()) == (job.outputs(), job.errors())
    assert [row["index"] for row in found.outputs()] == [*range(300)]


@pytest.mark.slow
def test_a_kill_at_any_request_to_the_store_costs_nothing(tmp_path: Path) -> None:
    found = survived(str(REPOSITORY / "tests" / "helpers" / "remote_kills.py"), tmp_path, 0.06, 1)
    assert found["counts"]["killed"] > 8 and found["counts"]["requests"] > 100
