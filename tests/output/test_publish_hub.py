"""Publication to a dataset on the Hub: one commit, a card that never replaces a person's, private by default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml
from loopback_hub import READ_TOKEN, Hub, loopback_hub
from repeats import slow
from run_helpers import JobMaker, quiet, rows_of

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, StorageError, UsageError
from batchgen.run.invocation import RunOptions

PUBLISH, BEGIN = "Publish a finished run of batchgen", "Begin a run of batchgen"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("batchgen.core.remote.WAITS_S", ())
    with loopback_hub() as found:
        yield found


@pytest.fixture
def published(job: JobMaker) -> JobSpec:
    job.write(rows_of(3))
    return job.spec(output={"publish": "hf://datasets/ann/answers"}, sampling={"temperature": 0.5})


def test_a_finished_run_becomes_one_commit_in_a_private_dataset(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    outcome = job.run(published)
    assert (outcome.exit_code, outcome.lines[-1]) == (0, "published to hf://datasets/ann/answers")
    assert hub.is_private == {"ann/answers": True}
    names = ["README.md", "batchgen.json", "outputs.jsonl", "report.json"]
    assert hub.commits == [(PUBLISH, names)]
    files = hub.repos["ann/answers"]
    assert files["outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()
    assert json.loads(files["batchgen.json"])["complete"]


@pytest.mark.slow
def test_a_finished_run_makes_no_second_commit(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    job.run(published)
    outcome = job.run(published)
    assert outcome.lines[-1] == "already published to hf://datasets/ann/answers"
    assert len(hub.commits) == 1


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own upload
@pytest.mark.slow
def test_large_files_go_before_the_commit(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    job.write(rows_of(100))
    job.run(published)
    assert hub.objects
    assert hub.repos["ann/answers"]["outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()


def test_the_card_says_what_was_generated_and_how(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    job.run(published)
    card = hub.repos["ann/answers"]["README.md"].decode()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"configs": [{"config_name": "default", "data_files": "outputs.jsonl"}]}
    assert "3 rows that a language model has generated" in text and "| model | tiny-lfm2 |" in text
    assert "temperature = 0.5" in text and "license" not in card.lower() and str(job.folder) not in card


@pytest.mark.slow
def test_values_cannot_forge_the_card(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    job.run(replace(published, sampling=replace(published.sampling, stop=("|\n# <b>Free</b>",))))
    card = hub.repos["ann/answers"]["README.md"].decode()
    assert "<b>" not in card.replace("\\<b", "") and "\n# <b" not in card


@pytest.mark.parametrize("is_ours", [False, slow(True)])
def test_a_card_that_a_person_wrote_stays(job: JobMaker, hub: Hub, published: JobSpec, is_ours: bool) -> None:
    job.run(published)
    files = hub.repos["ann/answers"]
    written = files["README.md"] if is_ours else files["README.md"].replace(b"<!--", b"").replace(b"-->", b"Mine.")
    files["README.md"] = written + b"\nMore."
    job.run(job.spec(output={"publish": published.output.publish}), RunOptions(progress="quiet", overwrite=True))
    assert files["README.md"].endswith(b"More.") is not is_ours


@pytest.mark.slow
def test_a_folder_of_a_dataset_is_a_destination_of_its_own(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    hub.repos["ann/answers"] = {"outputs.jsonl": b"of another", "README.md": b"A person's"}
    job.run(job.spec(output={"publish": "hf://datasets/ann/answers/may/one"}))
    files = hub.repos["ann/answers"]
    assert (files["outputs.jsonl"], files["README.md"]) == (b"of another", b"A person's")
    assert files["may/one/outputs.jsonl"] == (job.output / "outputs.jsonl").read_bytes()
    assert files["may/one/README.md"].startswith(b"<!--")


def test_files_of_others_are_replaced_only_with_overwrite(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    hub.repos["ann/answers"] = {"outputs.parquet": b"of another", "data.csv": b"of another"}
    with pytest.raises(UsageError, match=r"answers holds outputs\.parquet: it is not replaced"):
        job.run(published)
    assert not job.engines and not hub.commits
    options = RunOptions(progress="quiet", overwrite=True, limits=quiet(max_total_tokens=1).limits)
    assert job.run(published, options).exit_code == ExitCode.STOPPED
    assert hub.commits == [(BEGIN, ["batchgen.json"])]
    assert job.run(published).exit_code == 0
    assert {*hub.repos["ann/answers"]} == {"README.md", "batchgen.json", "outputs.jsonl", "report.json", "data.csv"}


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


def test_a_commit_that_fails_is_made_when_the_run_is_run_again(job: JobMaker, hub: Hub, published: JobSpec) -> None:
    hub.fails = "/commit/"
    with pytest.raises(StorageError, match="run again to publish them"):
        job.run(published)
    assert hub.repos["ann/answers"] == {}
    hub.fails = ""
    assert job.run(published).exit_code == 0 and not job.engines
    assert len(hub.commits) == 1
