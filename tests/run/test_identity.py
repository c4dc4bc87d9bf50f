"""What identifies inputs and models: their content, hashed only when it may have changed; and the model's kernels."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from repeats import slow
from run_helpers import MODEL, JobMaker, journal_of, quiet, rows_of, updating
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core import file_digests
from batchgen.core.errors import ModelError, ResumeMismatch
from batchgen.output.manifest import Manifest
from batchgen.run.invocation import RunOptions
from batchgen.run.outcome import Outcome
from batchgen.run.update import is_same
from batchgen.text.tokenizer import Tokenizer


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from here on."""
    names: list[str] = []
    digest = file_digests.file_digest

    def counted(path: Path) -> str:
        names.append(path.name)
        return digest(path)

    monkeypatch.setattr(file_digests, "file_digest", counted)
    return names


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old enough as soon as they are written."""
    monkeypatch.setattr(file_digests, "_TICK_NS", 0)


@pytest.fixture
def model(job: JobMaker) -> Path:
    """A copy of the model that tests may change, its chat template in a file of its own."""
    folder = Path(shutil.copytree(MODEL, job.folder / "model"))
    template = json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]
    (folder / "chat_template.jinja").write_text(template)
    return folder


def run_with(job: JobMaker, model: Path, options: RunOptions | None = None, **stub: Any) -> Outcome:
    return job.run(job.spec(model={"path": str(model)}), options, **stub)


def manifest_path(job: JobMaker) -> Path:
    """The ``job.json`` of the outputs, or else of the job that was begun."""
    path = job.output / "job.json"
    return path if path.exists() else journal_of(job.output) / "job.json"


def read_manifest(job: JobMaker) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(manifest_path(job).read_bytes())
    return content


def rewritten(path: Path, content: bytes) -> None:
    """Other content, and the times of last use put back."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---------------------------------------------------------------- hashed only when it may have changed


@pytest.mark.usefixtures("settled")
def test_a_resume_and_a_finished_run_started_again_hash_no_input_and_no_model(job: JobMaker, hashed: list[str]) -> None:
    job.write(rows_of(60))
    assert job.run(options=quiet(max_total_tokens=200)).exit_code == 75
    assert {"input.jsonl", "config.json", "model.safetensors"} <= set(hashed)
    hashed.clear()
    assert job.run(fails=frozenset({59})).exit_code == 3
    assert "already done" in job.run().lines[0]
    assert set(hashed) <= {"outputs.jsonl", "errors.jsonl"}
    hashed.clear()
    assert "already done" in job.run().lines[0]
    assert hashed == []


@pytest.mark.usefixtures("settled")
def test_only_a_touched_file_is_hashed_again_and_only_once(job: JobMaker, hashed: list[str]) -> None:
    job.write(rows_of(20))
    job.run()
    for expected in (["input.jsonl"], []):
        hashed.clear()
        if expected:
            job.input.touch()
        assert "already done" in job.run().lines[0]
        assert hashed == expected


def test_a_file_too_fresh_is_hashed_again(job: JobMaker, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "_TICK_NS", 3600 * 10**9)
    job.write(rows_of(20))
    job.run()
    hashed.clear()
    job.run()
    assert "input.jsonl" in hashed


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("is_done", [True, False])
def test_an_edit_of_the_same_size_whose_mtime_was_put_back_is_noticed(job: JobMaker, is_done: bool) -> None:
    job.write(rows_of(60))
    job.run(options=quiet() if is_done else quiet(max_total_tokens=200))
    rewritten(job.input, job.input.read_bytes().replace(b"59 times", b"95 times"))
    assert job.run().exit_code == 0
    prompt = job.outputs()[59]["usage"]["prompt_tokens"]
    assert job.engines[0].num_started >= 1
    assert (len(job.outputs()), prompt) == (60, job.outputs()[58]["usage"]["prompt_tokens"])


@pytest.mark.usefixtures("settled")
def test_a_file_moved_elsewhere_is_hashed_there(job: JobMaker, hashed: list[str]) -> None:
    job.write(rows_of(20))
    job.run()
    hashed.clear()
    (job.folder / "elsewhere").mkdir()
    job.input = job.input.rename(job.folder / "elsewhere" / "input.jsonl")
    assert "already done" in job.run().lines[0]
    assert hashed == ["input.jsonl"]


@pytest.mark.parametrize("kept", [None, {}, {"INPUT": 3}, {"INPUT": {"sha256": "0" * 64, "state": [1, 2, 3]}}])
def test_a_job_json_without_sound_states_resumes(job: JobMaker, kept: dict[str, Any] | None) -> None:
    job.write(rows_of(60))
    job.run(options=quiet(max_total_tokens=200))
    manifest = read_manifest(job)
    del manifest["file_states"]
    if kept is not None:
        manifest["file_states"] = {str(job.input) if key == "INPUT" else key: value for key, value in kept.items()}
    manifest_path(job).write_text(json.dumps(manifest))
    assert job.run().exit_code == 0
    assert len(job.outputs()) == 60


@pytest.mark.usefixtures("settled")
def test_states_are_dropped_of_files_that_are_no_longer_used(job: JobMaker) -> None:
    job.write(rows_of(20))
    job.run()
    old = job.input
    job.input = job.input.rename(job.folder / "other.jsonl")
    job.run(options=quiet(overwrite=True))
    states = read_manifest(job)["file_states"]
    assert str(job.input) in states
    assert str(old) not in states


# ---------------------------------------------------------------- the model

MODEL_FILES = {
    "model.safetensors": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "config.json": lambda content: content + b"\n",
    "tokenizer.json": lambda content: content + b"\n",
    "tokenizer_config.json": lambda content: content + b"\n",
    "chat_template.jinja": lambda content: content + b" ",
}
every_model_file = pytest.mark.parametrize("name", [*list(MODEL_FILES)[:2], *map(slow, list(MODEL_FILES)[2:])])


def change(model: Path, name: str) -> None:
    (model / name).write_bytes(MODEL_FILES[name]((model / name).read_bytes()))


@every_model_file
@pytest.mark.parametrize("is_done", [True, False])
def test_a_model_changed_between_runs_is_refused_by_file(job: JobMaker, model: Path, name: str, is_done: bool) -> None:
    job.write(rows_of(60))
    run_with(job, model, quiet() if is_done else quiet(max_total_tokens=200))
    content = (model / name).read_bytes()
    change(model, name)
    digest = r'"[0-9a-f]{8}\.\.\."'
    with pytest.raises(ResumeMismatch, match=rf"\n  model\.{name}: was {digest}, now {digest}\n") as caught:
        run_with(job, model)
    assert str(caught.value).count("was ") == 2  # "was begun with another job", and one file
    (model / name).write_bytes(content)
    assert run_with(job, model).exit_code == 0


@pytest.mark.parametrize(
    "name",
    ["special_tokens_map.json", *map(slow, ("added_tokens.json", "additional_chat_templates/tool_use.jinja"))],
)
def test_a_file_that_a_model_did_not_have_is_refused_by_name(job: JobMaker, model: Path, name: str) -> None:
    job.write(rows_of(60))
    run_with(job, model, quiet(max_total_tokens=200))
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("{}")
    with pytest.raises(ResumeMismatch, match=rf'model\.{Path(name).name}: was \(not there\), now "'):
        run_with(job, model)


@every_model_file
def test_a_model_that_changes_while_it_is_loaded_begins_nothing(job: JobMaker, model: Path, name: str) -> None:
    job.write(rows_of(20))
    with pytest.raises(ModelError, match=rf"{name} has changed while the model was loaded; run again") as caught:
        run_with(job, model, on_load=lambda: change(model, name))
    assert caught.value.exit_code == 2
    assert not job.output.exists()
    assert run_with(job, model).exit_code == 0


@pytest.mark.parametrize(
    ("before", "again"),
    [(quiet(max_total_tokens=200), quiet()), (quiet(), updating())],
    ids=["resume", "update"],
)
def test_a_model_that_changes_while_a_resume_or_an_update_loads_it_loses_nothing(
    job: JobMaker, model: Path, before: RunOptions, again: RunOptions
) -> None:
    job.write(rows_of(60))
    run_with(job, model, before, fails=frozenset({3}))
    content = (model / "model.safetensors").read_bytes()
    with pytest.raises(ModelError, match=r"model\.safetensors has changed while the model was loaded"):
        run_with(job, model, again, on_load=lambda: change(model, "model.safetensors"))
    (model / "model.safetensors").write_bytes(content)
    assert run_with(job, model, updating()).exit_code == 0
    assert len(job.outputs()) == 60


def test_an_update_on_other_kernels_computes_all_rows_again_and_says_why(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(20))
    run_on(job, "avx512-bf16", fails=frozenset({3}))
    assert run_on(job, "avx2", RunOptions(update=True)).exit_code == 0
    assert 'can be kept: numerics.kernels: was "avx512-bf16", now "avx2"' in capsys.readouterr().err
    assert kernels_in(read_manifest(job)) == "avx2"
    assert len(job.outputs()) == 20


def test_an_update_on_other_kernels_keeps_rows_if_kernels_may_be_mixed(job: JobMaker) -> None:
    job.write(rows_of(20))
    run_on(job, "avx512-bf16", fails=frozenset({3}))
    assert run_on(job, "avx2", updating(allow_mixed_kernels=True)).exit_code == 0
    assert len(job.outputs()) == 20


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_change_between_reading_a_model_and_hashing_it_is_noticed(
    job: JobMaker, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows_of(20))
    load = Tokenizer.load.__func__  # type: ignore[attr-defined]  # of a class method

    def loading(cls: type[Tokenizer], *args: Any) -> Tokenizer:
        tokenizer: Tokenizer = load(cls, *args)
        change(model, name)
        return tokenizer

    monkeypatch.setattr(Tokenizer, "load", classmethod(loading))
    with pytest.raises(ModelError, match=rf"{name} has changed while the model was loaded"):
        run_with(job, model)
    assert not job.output.exists()


# ---------------------------------------------------------------- kernels


def run_on(job: JobMaker, kernels: str | None, options: RunOptions | None = None, **stub: Any) -> Outcome:
    """A run of a stub engine whose kernels are named so."""
    numerics = {"dtype": "float32", "device": "stub"} | ({"kernels": kernels} if kernels else {})
    return job.run(options=options, numerics=numerics, **stub)


def kernels_in(content: Mapping[str, Any]) -> str | None:
    found = content["fingerprints"]["numerics"].get("kernels")
    return None if found is None else str(found)


def test_a_resume_on_other_kernels_is_refused_and_says_the_way_out(job: JobMaker) -> None:
    job.write(rows_of(60))
    run_on(job, "avx512-bf16", quiet(max_total_tokens=200))
    said = r"kernels avx2 add up .* kernels avx512-bf16, .*--allow-mixed-kernels; --update"
    with pytest.raises(ResumeMismatch, match=said) as caught:
        run_on(job, "avx2")
    assert "\n" not in str(caught.value)
    outcome = run_on(job, "avx512-bf16")
    assert outcome.exit_code == 0 and outcome.report is not None
    assert outcome.report["numerics"]["kernels"] == kernels_in(read_manifest(job)) == "avx512-bf16"


def test_an_allowed_resume_on_other_kernels_goes_on(job: JobMaker) -> None:
    job.write(rows_of(60))
    run_on(job, "avx512-bf16", quiet(max_total_tokens=200))
    on_avx2 = stub_factory(numerics={"dtype": "float32", "device": "stub", "kernels": "avx2"})
    assert call(["run", str(job.toml()), "--allow-mixed-kernels"], engine_factory=on_avx2) == 0
    assert len(job.outputs()) == 60


def test_kernels_do_not_matter_once_a_run_is_finished(job: JobMaker) -> None:
    job.write(rows_of(20))
    run_on(job, "avx512-bf16")
    assert "already done" in run_on(job, "avx2").lines[0]


def test_a_run_begun_before_kernels_were_recorded_resumes(job: JobMaker) -> None:
    job.write(rows_of(60))
    run_on(job, None, quiet(max_total_tokens=200))
    assert run_on(job, "avx2").exit_code == 0
    assert kernels_in(read_manifest(job)) is None


def test_one_machine_names_its_kernels_alike_whatever_the_number_of_threads() -> None:
    import torch
    from tiny_model import tiny_model

    names = set()
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            names.add((dtype, tiny_model(dtype).numerics["kernels"]))
    torch.set_num_threads(before)
    assert len(names) == 2
    assert all(name and " " not in name for _, name in names)


def test_the_version_of_torch_counts_where_its_products_are_taken() -> None:
    import torch
    from tiny_model import tiny_model

    from batchgen.kernels.plain import PlainKernels

    version = f"torch{torch.__version__.partition('+')[0]}"
    kernels = tiny_model(torch.float32, PlainKernels()).numerics["kernels"]
    assert kernels.endswith(f"padded-{version}")


def test_a_merged_job_is_no_job_that_was_begun(job: JobMaker) -> None:
    spec = job.spec()
    manifest = Manifest(spec.to_dict(), spec.output_keys())
    assert is_same(manifest, manifest, spec)
    assert not is_same(replace(manifest, parts=["digest of a shard"]), manifest, spec)
