"""Publication of a run's files to an object store: whole, once, never over another's, whatever the store does."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import s3fs
from object_store import CREDENTIALS, Answer, ObjectStore, bucket_of, object_store
from repeats import slow
from run_helpers import JobMaker, quiet, rows_of

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, StorageError, UsageError
from batchgen.core.remote import RemoteError
from batchgen.output import publish as bucket_module
from batchgen.output.publish import Bucket, Publication
from batchgen.output.rundir import RunDir
from batchgen.run.merge import merge

_numbers = count()
BAD = {"id": "bad", "question": ""}  # a row that fails until it is fixed


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


@pytest.fixture
def bucket(store: ObjectStore) -> Iterator[str]:
    with bucket_of(store, f"bucket{next(_numbers)}") as name:
        yield name


@pytest.fixture
def published(job: JobMaker, bucket: str) -> JobSpec:
    """A job of three rows that is published to the folder "out" of the bucket."""
    job.write(rows_of(3))
    return job.spec(output={"publish": f"s3://{bucket}/out"})


def local(job: JobMaker, *names: str) -> dict[str, bytes]:
    return {f"out/{name}": (job.output / name).read_bytes() for name in names}


def written(store: ObjectStore, bucket: str) -> list[str]:
    """The names that were written since the last look, in order."""
    names = [name.removeprefix(f"PUT {bucket}/out/") for name in store.requests if name.startswith("PUT ")]
    store.requests.clear()
    return names


def test_the_files_of_a_finished_run_appear_the_outputs_last(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    outcome = job.run(published)
    assert (outcome.exit_code, outcome.lines[-1]) == (0, f"published to s3://{bucket}/out")
    content = store.content(bucket)
    marker = json.loads(content.pop("out/batchgen.json"))
    assert content == local(job, "report.json", "outputs.jsonl")
    assert marker["complete"] and {*marker["files"]} == {"report.json", "outputs.jsonl"}
    assert written(store, bucket) == ["batchgen.json"] * 2 + ["report.json", "outputs.jsonl", "batchgen.json"]


def test_a_finished_run_publishes_once(job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec) -> None:
    job.run(published)
    written(store, bucket)
    outcome = job.run(published)
    assert (outcome.exit_code, outcome.lines[-1]) == (0, f"already published to s3://{bucket}/out")
    assert written(store, bucket) == [] and job.engines == []


@pytest.mark.parametrize("harm", [slow("removed"), "edited"])
def test_what_is_missing_or_differs_is_published_again(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec, harm: str
) -> None:
    job.run(published)
    before = store.content(bucket)
    if harm == "removed":
        store.remove(bucket, "out/report.json")
    else:
        store.put(bucket, "out/report.json", before["out/report.json"].replace(b"1", b"2"))
    written(store, bucket)
    assert job.run(published).lines[-1] == f"published to s3://{bucket}/out"
    assert written(store, bucket) == ["batchgen.json", "report.json", "batchgen.json"]
    assert store.content(bucket) == before


def test_a_destination_of_an_earlier_version_is_replaced(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    job.run(published)
    marker = json.loads(store.content(bucket)["out/batchgen.json"])
    store.put(bucket, "out/batchgen.json", json.dumps({**marker, "num_results": 5, "complete": False}).encode())
    assert job.run(published).lines[-1] == f"published to s3://{bucket}/out"


def test_a_run_that_finished_before_is_published_when_that_is_asked_for(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    job.write([*rows_of(2), BAD])
    job.run(job.spec())
    outcome = job.run(published)
    assert outcome.exit_code == ExitCode.ROWS_FAILED
    assert store.content(bucket).items() >= local(job, "report.json", "outputs.jsonl", "errors.jsonl").items()


@pytest.mark.parametrize("name", [slow("outputs.jsonl"), "outputs.parquet", slow("errors.jsonl"), "batchgen.json"])
def test_files_of_others_are_not_replaced_and_that_is_known_before_the_model_is_loaded(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec, name: str
) -> None:
    store.put(bucket, f"out/{name}", b"[]")
    with pytest.raises(UsageError, match=rf"out holds {name}: it is not replaced"):
        job.run(published)
    assert job.engines == [] and not job.output.exists()
    assert store.content(bucket) == {f"out/{name}": b"[]"}


def test_files_of_another_run_are_kept(job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec) -> None:
    job.run(published)
    before = store.content(bucket)
    other = job.spec(output={"publish": f"s3://{bucket}/out", "path": str(job.folder / "other"), "token_ids": True})
    with pytest.raises(UsageError, match="of another run, begun 20"):
        job.run(other)
    job.run(job.spec(output={"path": str(job.folder / "other"), "token_ids": True}))
    with pytest.raises(StorageError, match="the run is finished and its files are kept"):
        job.run(other)  # it is finished now, and may still not replace them
    assert store.content(bucket) == before


@pytest.mark.slow
def test_a_run_that_published_nothing_stands_in_no_way(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    job.run(published, quiet(max_total_tokens=1))
    assert json.loads(store.content(bucket)["out/batchgen.json"])["files"] == {}
    other = job.spec(output={"publish": f"s3://{bucket}/out", "path": str(job.folder / "other"), "token_ids": True})
    assert job.run(other).lines[-1] == f"published to s3://{bucket}/out"


def test_overwrite_replaces_files_of_others_even_if_the_run_is_resumed_without_it(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    for name in ("out/outputs.parquet", "out/errors.jsonl", "out/notes.txt"):
        store.put(bucket, name, b"of another")
    assert job.run(published, quiet(overwrite=True, max_total_tokens=1)).exit_code == ExitCode.STOPPED
    assert job.run(published).exit_code == 0
    content = store.content(bucket)
    del content["out/batchgen.json"]
    assert content == local(job, "report.json", "outputs.jsonl") | {"out/notes.txt": b"of another"}


@pytest.mark.parametrize("request_start", ["PUT", "HEAD"])
def test_refused_credentials_end_the_run_before_the_model_is_loaded(
    job: JobMaker, store: ObjectStore, published: JobSpec, request_start: str
) -> None:
    store.fault = lambda request: 403 if request.startswith(request_start) else None
    with pytest.raises(UsageError, match="AWS_PROFILE") as caught:
        job.run(published)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value).replace("AWS_SECRET", "")
    assert job.engines == [] and not job.output.exists()


def test_a_bucket_that_is_not_there_ends_the_run_before_the_model_is_loaded(job: JobMaker, store: ObjectStore) -> None:
    job.write(rows_of(1))
    with pytest.raises(UsageError, match="there is no such bucket"):
        job.run(job.spec(output={"publish": "s3://not-there/out"}))
    assert job.engines == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [slow("report.json", "break"), slow("outputs.jsonl", 403), ("outputs.jsonl", "lose"), slow("batchgen.json", 503)],
)
def test_a_publication_that_fails_leaves_a_finished_run_which_publishes_when_run_again(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec, name: str, fault: Answer
) -> None:
    def fail(request: str) -> Answer | None:
        is_late = name != "batchgen.json" or f"PUT {bucket}/out/outputs.jsonl" in store.requests
        return fault if is_late and request == f"PUT {bucket}/out/{name}" else None

    store.fault = fail
    with pytest.raises(StorageError, match="the run is finished and its files are kept; run again to publish them"):
        job.run(published)
    assert RunDir(job.output).is_complete()
    files = local(job, "report.json", "outputs.jsonl")
    assert not json.loads(store.content(bucket)["out/batchgen.json"])["complete"]
    store.fault = lambda request: None
    outcome = job.run(published)
    assert outcome.exit_code == 0 and job.engines == []
    content = store.content(bucket)
    assert json.loads(content.pop("out/batchgen.json"))["complete"] and content == files


@pytest.mark.parametrize("fault", [slow(503), "lose"])
def test_what_passes_is_tried_again(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec, fault: Answer
) -> None:
    seen: set[str] = set()

    def fail_once(request: str) -> Answer | None:
        is_new = request not in seen
        seen.add(request)
        return fault if is_new else None

    store.fault = fail_once
    assert job.run(published).lines[-1] == f"published to s3://{bucket}/out"
    assert store.content(bucket).items() >= local(job, "report.json", "outputs.jsonl").items()


def test_an_update_publishes_and_removes_errors_that_are_gone(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    job.write([*rows_of(2), BAD])
    job.run(published)
    assert "out/errors.jsonl" in store.content(bucket)
    job.write([*rows_of(2), {"id": "bad", "question": "Now?"}])
    outcome = job.run(published)
    assert (outcome.exit_code, outcome.lines[-1]) == (0, f"published to s3://{bucket}/out")
    content = store.content(bucket)
    del content["out/batchgen.json"]
    assert content == local(job, "report.json", "outputs.jsonl")


def test_shards_begun_at_one_moment_do_not_replace_each_other(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec
) -> None:
    first, second = map(RunDir, job.shards())
    manifest, other = first.read_manifest(), second.read_manifest()
    assert manifest is not None and other is not None
    address = f"s3://{bucket}/out"
    Publication(Bucket(address), first, manifest).publish()
    same = replace(other, created_at=manifest.created_at)
    with pytest.raises(UsageError, match="of another run"):
        Publication(Bucket(address), second, same).claim(overwrite=False)


@pytest.mark.parametrize(
    "content", [*map(slow, ("[]", '{"rows": 5, "tokens": {}}', "[" * 9999)), '{"rows": {"done": "3"}, "tokens": {}}']
)
def test_a_report_that_no_run_wrote_is_published_as_it_is(
    job: JobMaker, store: ObjectStore, bucket: str, published: JobSpec, content: str
) -> None:
    job.run(job.spec())
    (job.output / "report.json").write_text(content, encoding="utf-8")
    assert job.run(published).lines[-1] == f"published to s3://{bucket}/out"
    assert store.content(bucket).items() >= local(job, "report.json", "outputs.jsonl").items()


@pytest.mark.slow
def test_a_merged_run_publishes_nothing_by_itself(job: JobMaker, bucket: str) -> None:
    job.write(rows_of(4))
    parts = [job.folder / f"part{number}" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        spec = job.spec(output={"path": str(part), "publish": f"s3://{bucket}/{part.name}"})
        job.run(spec, quiet(shard=(number, 2)))
    merge(parts, job.folder / "whole")
    found = json.loads((job.folder / "whole" / "job.json").read_bytes())
    assert found["job"]["output"]["publish"] == ""
    whole = job.spec(output={"path": str(job.folder / "whole"), "publish": f"s3://{bucket}/whole"})
    assert job.run(whole).lines[-1] == f"published to s3://{bucket}/whole" and not job.engines


def test_a_large_file_appears_whole_or_not_at_all(
    store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "_CHUNK_BYTES", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (11 << 12))
    to = Bucket(f"s3://{bucket}/out")
    num_parts = 0

    def fail(request: str) -> Answer | None:
        nonlocal num_parts
        num_parts += request.startswith("PUT")
        return 403 if request.startswith("PUT") and num_parts >= 3 else None

    store.fault = fail
    with pytest.raises(RemoteError, match="access is refused"):
        to.upload("large", path)
    assert store.content(bucket) == {} and store.uploads(bucket) == 0
    store.fault = lambda request: None
    to.upload("large", path)
    assert store.content(bucket) == {"out/large": path.read_bytes()}


def test_a_write_that_a_store_accepts_and_never_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "STILL_S", 1.0)
    monkeypatch.setattr(bucket_module, "_SLOWEST", 1 << 30)
    monkeypatch.setattr("batchgen.core.remote.WAITS_S", (0.1,))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog takes connections that nobody reads
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(RemoteError, match="cannot be reached") as caught:
            Bucket("s3://bucket/out").write("part", bytes(64 << 20))
        s3fs.S3FileSystem.clear_instance_cache()
    assert caught.value.kind == "passing"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("/data/out", "is not a URL"),
        ("out", "is not a URL"),
        ("https://host/out", "https:// is not supported"),
        ("ftp://host/out", "ftp:// is not supported"),
        ("hf://datasets/user", "hf://datasets/USER/NAME"),
        ("hf://datasets/user/name@main", "names a revision"),
        ("s3://bucket/a*", "holds"),
        ("s3://AKIA:topsecret@bucket/out", "holds a secret"),
    ],
)
def test_what_cannot_be_written_to_is_refused(job: JobMaker, value: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        job.spec(output={"publish": value})
    assert (value in str(caught.value)) != ("secret" in why)
    assert "topsecret" not in str(caught.value) and "AKIA" not in str(caught.value)


@pytest.mark.slow
def test_the_keys_may_change_from_one_invocation_to_the_next(job: JobMaker, store: ObjectStore, bucket: str) -> None:
    job.write(rows_of(3))
    flags: dict[str, Any] = {"publish": f"s3://{bucket}/out"}
    job.run(job.spec(), quiet(max_total_tokens=1))
    assert job.run(job.spec(output=flags)).lines[-1] == f"published to s3://{bucket}/out"
