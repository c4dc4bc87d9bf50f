"""Publication to a dataset on the Hub: private by default, a commit for each file, the outputs last."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from huggingface_hub import HfFileSystem
from loopback_hub import READ_TOKEN, Hub, loopback_hub
from repeats import slow
from run_helpers import JobMaker, quiet, rows_of

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, StorageError, UsageError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("batchgen.core.remote.WAITS_S", ())
    HfFileSystem.clear_instance_cache()
    with loopback_hub() as found:
        yield found


@pytest.fixture
def published(job: JobMaker) -> JobSpec:
    job.write(rows_of(3))
    return job.spec(output={"publish": "hf://datasets/ann/answers"})


def test_the_files_of_a_finished_run_become_commits_to_a_private_dataset(
    job: JobMaker, hub: Hub, published: JobSpec
) -> None:
    outcome = job.run(published)
    assert (outcome.exit_code, outcome.lines[-1]) == (0, "published to hf://datasets/ann/answers")
    assert hub.is_private == {"ann/answers": True}
    names = ["batchgen.json", "batchgen.json", "report.json", "outputs.jsonl", "batchgen.json"]
    assert [name for _, changed in hub.commits for name in changed] == names
    files = hub.repos["ann/answers"]
    assert files["outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()
    assert json.loads(files["batchgen.json"])["complete"]

    before = len(hub.commits)
    assert job.run(published).lines[-1] == "already published to hf://datasets/ann/answers"
    assert len(hub.commits) == before


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own upload
@pytest.mark.slow
def test_large_files_go_before_the_commit(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    job.write(rows_of(100))
    job.run(published)
    assert hub.objects
    assert hub.repos["ann/answers"]["outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


@pytest.mark.slow
def test_a_folder_of_a_dataset_is_a_destination_of_its_own(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    hub.repos["ann/answers"] = {"outputs.jsonl": b"of another", "README.md": b"A person's"}
    job.run(job.spec(output={"publish": "hf://datasets/ann/answers/may/one"}))
    files = hub.repos["ann/answers"]
    assert (files["outputs.jsonl"], files["README.md"]) == (b"of another", b"A person's")
    assert files["may/one/outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


def test_files_of_others_are_replaced_only_with_overwrite(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    hub.repos["ann/answers"] = {"outputs.parquet": b"of another", "data.csv": b"of another"}
    with pytest.raises(UsageError, match=r"answers holds outputs\.parquet: it is not replaced"):
        job.run(published)
    assert not job.engines and not hub.commits
    assert job.run(published, quiet(overwrite=True, max_total_tokens=1)).exit_code == ExitCode.STOPPED
    assert job.run(published).exit_code == 0
    assert {*hub.repos["ann/answers"]} == {"batchgen.json", "outputs.jsonl", "report.json", "data.csv"}


@pytest.mark.parametrize("token", ["", slow(READ_TOKEN)])
def test_a_token_that_may_not_write_ends_the_run_before_the_model_is_loaded(
    job: JobMaker, hub: Hub, published: JobSpec, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["ann/answers"] = {}
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match="hf auth login") as caught:
        job.run(published)
    assert "\n" not in str(caught.value) and READ_TOKEN not in str(caught.value)
    assert not job.engines and not hub.commits


def test_a_publication_that_fails_is_completed_when_the_run_is_run_again(
    job: JobMaker, hub: Hub, published: JobSpec
) -> None:
    job.run(job.spec())
    hub.fails = "/commit/"
    with pytest.raises(StorageError, match="run again to publish them"):
        job.run(published)
    assert hub.repos["ann/answers"] == {}
    hub.fails = ""
    assert job.run(published).lines[-1] == "published to hf://datasets/ann/answers"
    assert "outputs.jsonl" in hub.repos["ann/answers"]
