"""Mirrored runs: any loss of the run directory, at any moment, ends in the bytes of an undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from object_store import Answer, ObjectStore, bucket_of, object_store
from run_helpers import REPOSITORY, JobMaker, finish, quiet, rows_of, start, survived, until_rows_are_done
from stub_engine import stub_factory

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, LockedError, ResumeMismatch, StorageError, UsageError
from batchgen.output import heartbeat
from batchgen.output import mirror as mirror_module
from batchgen.output.bucket import Bucket
from batchgen.output.rundir import RunDir
from batchgen.output.segments import segments
from batchgen.run import stop
from batchgen.run.invocation import RunOptions
from batchgen.run.retry import retry_job

T = TypeVar("T")
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
    """A mirror that copies all the time, and all of it on a busy machine too."""
    monkeypatch.setattr(mirror_module, "FLUSH_S", 60.0)
    monkeypatch.setattr(stop, "DRAIN_S", 60.0)
    monkeypatch.setattr(mirror_module, "EVERY_S", 0.1)
    monkeypatch.setattr(heartbeat, "SETTLE_S", 0.0)


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


def until(found: Callable[[], T]) -> T:
    """What a call finds, once it finds something; a minute only bounds a failure."""
    end = time.monotonic() + 60
    while not (result := found()) and time.monotonic() < end:
        time.sleep(0.02)
    return result


def lines_of(folder: Path) -> list[bytes]:
    """The lines of finished rows in the journal of a run directory."""
    found = [line for path in segments(folder / "journal") for line in path.read_bytes().splitlines()]
    return [line for line in found if line[9:10] in b"re"]


def rows_there(store: ObjectStore, bucket: str) -> int:
    """How many rows the mirror holds."""
    parts = [content for name, content in store.content(bucket).items() if name.startswith("run/journal/")]
    return len({line for part in parts for line in part.splitlines() if line[9:10] in b"re"})


@pytest.mark.parametrize(
    "max_tokens", [pytest.param(1, marks=pytest.mark.slow), 500, pytest.param(650, marks=pytest.mark.slow)]
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
    assert last.pop("mirror")["released"]
    assert last == json.loads((job.output / "progress.json").read_text()) and last["state"] == "stopped"
    shutil.rmtree(job.output)
    assert (job.run(mirrored).report or {})["sessions"] == 2


def test_a_finished_run_is_restored_as_done(job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec) -> None:
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
    job.run(mirrored, quiet(max_total_tokens=300))
    other, spec = elsewhere(job, mirrored)
    other.run(spec, quiet(max_total_tokens=200))
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
    job.run(mirrored, quiet(max_total_tokens=500), step_s=0.1)
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
    there: dict[str, bytes] = {}
    for name in sorted(content):  # a first copy may have come before the last one
        if name.startswith("run/journal/"):
            segment = Path(name).stem
            there[segment] = there.get(segment, b"") + content[name]
    assert there == {path.stem: path.read_bytes() for path in segments(job.output / "journal")}
    assert content["run/job.json"] == (job.output / "job.json").read_bytes()
    assert json.loads(content["run/progress.json"])["mirror"]["released"] is True


@pytest.mark.slow
def test_the_manifest_is_there_before_rows(job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec) -> None:
    job.run(mirrored, step_s=0.05)
    written = [name.removeprefix(f"PUT {bucket}/run/") for name in store.requests if name.startswith("PUT ")]
    assert next(name for name in written if name != "progress.json") == "job.json"
    assert written.index("outputs.jsonl") > max(i for i, name in enumerate(written) if "journal" in name)


def test_a_mirror_that_fails_stops_no_run_and_catches_up(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"fails": False, "refused": 0}

    def fail(request: str) -> Answer | None:
        is_copy = state["fails"] and ("journal" in request or "progress" in request)
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


def test_a_second_machine_that_looks_while_the_first_begins_is_told_the_same(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, spec = elsewhere(job, mirrored)
    find = Bucket.find

    def early(self: Bucket, folder: str) -> dict[str, Any]:
        found = find(self, folder)
        return found if folder else {name: entry for name, entry in found.items() if name == "progress.json"}

    def second(step: int) -> None:
        if step == 3:
            until(lambda: any("journal" in name for name in store.content(bucket)))
            with monkeypatch.context() as patch, pytest.raises(LockedError, match="is in use by process"):
                patch.setattr(Bucket, "find", early)
                other.run(spec)

    assert job.run(mirrored, before_step=second).exit_code == ExitCode.ROWS_FAILED


def test_of_two_machines_that_begin_at_once_one_is_turned_away(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SETTLE_S", 1.0)
    other, spec = elsewhere(job, mirrored)
    both_have_looked = threading.Barrier(2, timeout=60)
    write = heartbeat.Heartbeat._write

    def met(self: heartbeat.Heartbeat, bucket: Bucket, *, is_released: bool) -> None:
        if self._me["token"] not in taken:
            taken.add(self._me["token"])
            both_have_looked.wait()
        write(self, bucket, is_released=is_released)

    taken: set[str] = set()
    monkeypatch.setattr(heartbeat.Heartbeat, "_write", met)
    ends: list[object] = []

    def run(maker: JobMaker, settings: JobSpec) -> None:
        try:
            ends.append(maker.run(settings).exit_code)
        except LockedError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=run, args=args) for args in ((job, mirrored), (other, spec))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ExitCode.ROWS_FAILED in ends and any("which has just begun" in str(end) for end in ends), ends
    assert len(job.engines) + len(other.engines) == 1


def test_what_a_process_that_is_gone_has_still_on_the_way_stops_no_other(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=300))
    late = store.content(bucket)["run/progress.json"]

    def before_step(step: int) -> None:
        if step == 4:
            store.put(bucket, "run/progress.json", late)
            until(lambda: store.content(bucket)["run/progress.json"] != late)

    assert job.run(mirrored, before_step=before_step).exit_code == ExitCode.ROWS_FAILED
    assert (job.outputs(), job.errors()) == undisturbed(job)


def test_a_holder_that_is_silent_is_taken_over_and_stops_when_it_wakes(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", -1.0)
    other, spec = elsewhere(job, mirrored)
    codes = []
    asleep = threading.Lock()
    beat = heartbeat.Heartbeat.beat

    def beat_unless_asleep(self: heartbeat.Heartbeat, *args: Any, **options: Any) -> bool:
        with asleep if self._path.parent == job.output else nullcontext():
            return beat(self, *args, **options)

    monkeypatch.setattr(heartbeat.Heartbeat, "beat", beat_unless_asleep)

    def second(step: int) -> None:
        if step == 8:  # signals are this thread's
            options = quiet(max_total_tokens=300)
            thread = threading.Thread(target=lambda: codes.append(other.run(spec, options).exit_code))
            with asleep:
                thread.start()
                thread.join()

    outcome = job.run(mirrored, before_step=second, step_s=0.05)
    assert outcome.exit_code == ExitCode.STOPPED and "was taken over by process" in outcome.lines[0]
    assert codes == [ExitCode.STOPPED]
    names = [{path.name for path in segments(folder / "journal")} for folder in (job.output, other.output)]
    assert names[0] < names[1]  # what the first one may still write goes into another segment
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
    assert rows_there(store, bucket) == len(lines_of(job.output)) >= 5


@pytest.mark.slow
def test_the_mirror_of_another_run_is_not_touched_unless_that_is_asked_for(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=300))
    other, _ = elsewhere(job, mirrored)
    shorter = other.spec(output={"mirror": mirrored.output.mirror}, sampling={"max_tokens": 8})
    before = {name: content for name, content in store.content(bucket).items() if "progress" not in name}
    with pytest.raises(ResumeMismatch, match="was begun with another job"):
        other.run(shorter)
    assert not list(other.output.glob("*")) and not other.engines
    other.run(other.spec(sampling={"max_tokens": 8}), quiet(max_total_tokens=300))
    with pytest.raises(UsageError, match="holds another run, begun 20"):
        other.run(shorter)
    assert {name: content for name, content in store.content(bucket).items() if "progress" not in name} == before
    assert other.run(shorter, RunOptions(progress="quiet", overwrite=True)).exit_code == ExitCode.ROWS_FAILED
    assert store.content(bucket)["run/outputs.jsonl"] == (other.output / "outputs.jsonl").read_bytes()


def test_a_mirror_of_another_record_version_gives_way_to_overwrite(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=300))
    manifest = json.loads(store.content(bucket)["run/job.json"]) | {"version": 1}
    store.put(bucket, "run/job.json", json.dumps(manifest).encode())
    other, spec = elsewhere(job, mirrored)
    with pytest.raises(UsageError, match=r"its run was begun with record version 1.*or start anew with --overwrite"):
        other.run(spec)
    assert other.run(spec, RunOptions(progress="quiet", overwrite=True)).exit_code == ExitCode.ROWS_FAILED
    assert store.content(bucket)["run/outputs.jsonl"] == (other.output / "outputs.jsonl").read_bytes()


def test_rows_of_a_run_that_was_overwritten_come_into_no_other(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=600))
    late = {name: content for name, content in store.content(bucket).items() if "journal" in name}
    time.sleep(1)  # the next run begins in another second
    shorter = job.spec(output={"mirror": mirrored.output.mirror}, sampling={"max_tokens": 8})
    overwrite = RunOptions(progress="quiet", overwrite=True, limits=quiet(max_total_tokens=100).limits)
    assert job.run(shorter, overwrite).exit_code == ExitCode.STOPPED
    assert late and not late.keys() & store.content(bucket).keys()
    for name, content in late.items():  # which a machine that was asleep may still write
        store.put(bucket, name, content)
    shutil.rmtree(job.output)
    job.run(shorter)
    wanted = JobMaker(job.folder)
    wanted.output = job.folder / "alone"
    wanted.run(wanted.spec(sampling={"max_tokens": 8}))
    assert job.outputs() == wanted.outputs()


def test_a_mirror_whose_files_are_removed_in_mid_run_is_copied_again(
    job: JobMaker,
    store: ObjectStore,
    bucket: str,
    mirrored: JobSpec,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "LOOK_AGAIN_S", 1.0)  # for a heartbeat that is written while they are removed

    def before_step(step: int) -> None:
        if step == 14:
            for name in store.content(bucket):
                store.remove(bucket, name)
            until(lambda: "were removed there: all are copied again" in capsys.readouterr().err)
            until(lambda: f"run/{RunDir(job.output).manifest.name}" in store.content(bucket))

    options = RunOptions(heartbeat_s=3600.0, limits=quiet(max_total_tokens=500).limits)
    assert job.run(mirrored, options, before_step=before_step).exit_code == ExitCode.STOPPED
    num_here = len(lines_of(job.output))
    assert rows_there(store, bucket) == num_here > 10
    shutil.rmtree(job.output)
    job.run(mirrored)
    assert job.engines[0].num_started <= NUM_ROWS - num_here + 1
    assert (job.outputs(), job.errors()) == undisturbed(job)


def test_a_part_that_is_removed_in_mid_run_is_copied_again(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "LOOK_AGAIN_S", 0.0)
    removed: list[str] = []

    def before_step(step: int) -> None:
        names = until(lambda: sorted(name for name in store.content(bucket) if "journal" in name)) if step == 8 else []
        for name in names[:1]:
            removed.append(name)
            store.remove(bucket, name)
            until(lambda: removed[0] in store.content(bucket))

    job.run(mirrored, quiet(max_total_tokens=500), before_step=before_step)
    assert removed and removed[0] in store.content(bucket)
    num_here = len(lines_of(job.output))
    shutil.rmtree(job.output)
    job.run(mirrored)
    assert job.engines[0].num_started <= NUM_ROWS - num_here + 1
    assert (job.outputs(), job.errors()) == undisturbed(job)


def test_rows_without_a_job_are_wiped_by_no_other_machine(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=600))
    store.remove(bucket, "run/job.json")
    before = rows_there(store, bucket)
    other, spec = elsewhere(job, mirrored)
    with pytest.raises(UsageError, match=r"holds rows of a run whose job\.json was removed there: run it again on"):
        other.run(spec)
    assert rows_there(store, bucket) == before > 5
    assert job.run(mirrored).exit_code == ExitCode.ROWS_FAILED  # as the message says
    assert (job.outputs(), job.errors()) == undisturbed(job)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_finished_mirror_without_its_marker_is_computed_by_no_one(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, is_lost: bool
) -> None:
    job.run(mirrored)
    before = job.outputs(), job.errors()
    store.remove(bucket, "run/batchgen.json")
    if is_lost:
        shutil.rmtree(job.output)
    outcome = job.run(mirrored)
    assert outcome.exit_code == ExitCode.ROWS_FAILED and "already done" in outcome.lines[0] and not job.engines
    assert (job.outputs(), job.errors()) == before
    assert json.loads(store.content(bucket)["run/batchgen.json"])["complete"]


def test_a_finished_mirror_whose_outputs_were_removed_is_computed_again(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run(mirrored)
    monkeypatch.setattr(mirror_module, "LOOK_AGAIN_S", 0.0)
    store.remove(bucket, "run/outputs.jsonl")
    shutil.rmtree(job.output)
    assert job.run(mirrored, step_s=0.05).exit_code == ExitCode.ROWS_FAILED
    assert job.engines[0].num_started == NUM_ROWS
    assert store.content(bucket)["run/outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


def test_a_mirror_does_not_bring_back_what_overwrite_has_removed(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run(mirrored)
    clear = RunDir.clear

    def killed(run_dir: RunDir) -> None:
        clear(run_dir)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDir, "clear", killed)
        job.run(mirrored, RunOptions(progress="quiet", overwrite=True))
    job.run(mirrored)
    assert job.engines[0].num_started == NUM_ROWS
    assert store.content(bucket)["run/outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["outputs.jsonl", "report.json", "job.json", "batchgen.json", "progress.json"])
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
def test_a_mirror_may_be_added_to_a_begun_run(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    job.run(job.spec(), quiet(max_total_tokens=500))
    job.run(mirrored, quiet(max_total_tokens=1))
    shutil.rmtree(job.output)
    job.run(mirrored)
    assert job.engines[0].num_started < NUM_ROWS
    assert (job.outputs(), job.errors()) == undisturbed(job)


def test_a_mirror_that_cannot_be_finished_is_finished_by_the_next_invocation(
    job: JobMaker, store: ObjectStore, bucket: str, mirrored: JobSpec
) -> None:
    store.fault = lambda request: 403 if request == f"PUT {bucket}/run/outputs.jsonl" else None
    with pytest.raises(StorageError, match="run again to publish them"):
        job.run(mirrored, step_s=0.05)
    store.fault = lambda request: None
    assert rows_there(store, bucket)
    report = (job.output / "report.json").read_bytes()
    assert job.run(mirrored).exit_code == ExitCode.ROWS_FAILED and not job.engines
    assert (job.output / "report.json").read_bytes() == report  # and not one of the rows that were mirrored
    assert rows_there(store, bucket) == 0
    assert store.content(bucket)["run/outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


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
    ends = finish(asleep), finish(process)
    assert "taken over from process" in ends[1][1]
    taken = [code == ExitCode.STOPPED and "was taken over by process" in said for code, said in ends]
    assert taken == [True, False], ends
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


def test_a_finished_run_whose_input_grew_goes_on_here_and_elsewhere(job: JobMaker, mirrored: JobSpec) -> None:
    assert job.run(mirrored).exit_code == ExitCode.ROWS_FAILED
    job.write([*rows_of(NUM_ROWS), DUPLICATE, *rows_of(60)[NUM_ROWS:]])
    assert job.run(mirrored, quiet(max_total_tokens=100)).exit_code == ExitCode.STOPPED
    other, spec = elsewhere(job, mirrored)
    assert other.run(spec).exit_code == ExitCode.ROWS_FAILED
    assert job.run(mirrored).exit_code == ExitCode.ROWS_FAILED
    expected = undisturbed(job)
    assert (job.outputs(), job.errors()) == (other.outputs(), other.errors()) == expected
    shutil.rmtree(job.output)
    assert job.run(mirrored).lines[0].startswith("already done")
    assert job.outputs() == expected[0]


@pytest.mark.parametrize("key", ["mirror", "publish"])
def test_a_machine_that_is_behind_replaces_nothing(job: JobMaker, bucket: str, key: str) -> None:
    job.write([*rows_of(NUM_ROWS), DUPLICATE])
    other, address = JobMaker(job.folder), {key: f"s3://{bucket}/run"}
    other.output = job.folder / "elsewhere"
    first, second = (made.spec(output=address) for made in (job, other))
    job.run(first)
    shutil.copytree(job.output, other.output)
    (letter,) = job.errors()
    letter["row"]["id"] = "mended"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n", encoding="utf-8")
    assert retry_job(job.output, quiet(), {}, engine_factory=stub_factory()).exit_code == ExitCode.OK
    with pytest.raises(UsageError, match=r"a later state of this run than .*elsewhere, written by another"):
        retry_job(other.output, quiet(), {}, engine_factory=stub_factory())
    job.write([*rows_of(NUM_ROWS), DUPLICATE, {**DUPLICATE, "id": "new"}])
    with pytest.raises(UsageError, match="a later state of this run than"):
        other.run(second)
    assert len(other.errors()) == 1
    assert job.run(first).exit_code == ExitCode.OK
    assert [record["id"] for record in job.outputs()][-2:] == ["mended", "new"]


def test_a_run_that_is_unfinished_here_and_has_grown_elsewhere_goes_on_from_there(
    job: JobMaker, mirrored: JobSpec
) -> None:
    job.run(mirrored, quiet(max_total_tokens=100))
    other, spec = elsewhere(job, mirrored)
    other.run(spec)
    for more in (1, 2):
        job.write([*rows_of(NUM_ROWS), DUPLICATE, *({**DUPLICATE, "id": f"new-{n}"} for n in range(more))])
        made, made_spec = ((other, spec), (job, mirrored))[more - 1]
        assert made.run(made_spec).exit_code == ExitCode.ROWS_FAILED
    assert (job.outputs(), job.errors()) == undisturbed(job)
