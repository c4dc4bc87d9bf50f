"""Jobs with a LoRA adapter: it is part of the model that a run is held against, and its tokens are those of a merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from adapters import ALPHA, CONFIG, RANK, WEIGHTS, merged, write_adapter
from run_helpers import MODEL, JobMaker, Shell, quiet, read_lines, rows_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.config.load import load_job
from batchgen.core.errors import ModelError, ResumeMismatch, UsageError
from batchgen.model.adapter.settings import Lora, read_lora
from batchgen.output.rundir import RunDir
from batchgen.run.invocation import RunOptions
from batchgen.run.merge import merge
from batchgen.run.outcome import Outcome
from batchgen.run.reports import read_report

DIGEST = r'"[0-9a-f]{8}\.\.\."'


def projections() -> dict[str, Tensor]:
    """Some weights of the sample model, by module."""
    tensors = load_file(MODEL / "model.safetensors")
    return {name.removesuffix(".weight"): weight for name, weight in tensors.items() if "_proj.w" in name}


@pytest.fixture
def lora(job: JobMaker) -> Path:
    write_adapter(job.folder / "lora", projections(), base_model_name_or_path="org/another")
    return job.folder / "lora"


def run_with(job: JobMaker, adapter: Path | str, options: RunOptions | None = None, **stub: Any) -> Outcome:
    return job.run(job.spec(model={"adapter": str(adapter)}), options, **stub)


def change(lora: Path, name: str) -> None:
    """Another adapter that can be read."""
    if name == CONFIG:
        (lora / name).write_bytes((lora / name).read_bytes() + b"\n")
    else:
        content = (lora / name).read_bytes()
        (lora / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_without_an_adapter_a_run_is_what_it_was(job: JobMaker) -> None:
    job.write(rows_of(3))
    outcome = job.run()
    manifest = json.loads((job.output / "job.json").read_bytes())
    assert "adapter" not in manifest["fingerprints"]["model"]
    assert "model.adapter" not in manifest["output_keys"]
    assert outcome.report is not None
    assert "adapter" not in outcome.report


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_another_adapter_is_refused_by_file(job: JobMaker, lora: Path, name: str, is_done: bool) -> None:
    job.write(rows_of(60))
    run_with(job, lora, quiet() if is_done else quiet(max_total_tokens=200))
    content = (lora / name).read_bytes()
    change(lora, name)
    with pytest.raises(ResumeMismatch, match=rf"\n  model\.adapter\.{name}: was {DIGEST}, now {DIGEST}\n") as caught:
        run_with(job, lora)
    assert str(caught.value).count("was ") == 2  # "was begun with another job", and one file
    with pytest.raises(ResumeMismatch, match=rf"model\.adapter\.{WEIGHTS}: was {DIGEST}, now \(not there\)"):
        job.run()
    (lora / name).write_bytes(content)
    elsewhere = shutil.copytree(lora, job.folder / "elsewhere")
    assert run_with(job, elsewhere).exit_code == 0


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_an_adapter_that_changes_while_it_is_loaded_begins_nothing(job: JobMaker, lora: Path, name: str) -> None:
    job.write(rows_of(3))

    with pytest.raises(ModelError, match=rf"{name} has changed while the model was loaded; run again"):
        run_with(job, lora, on_load=lambda: change(lora, name))
    assert not job.output.exists()


def test_a_change_between_reading_settings_and_hashing_them_is_noticed(
    job: JobMaker, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows_of(3))

    def reading(folder: Path) -> Lora:
        found = read_lora(folder)
        change(lora, CONFIG)
        return found

    monkeypatch.setattr("batchgen.run.loader.read_lora", reading)
    with pytest.raises(ModelError, match=rf"{CONFIG} has changed while the model was loaded"):
        run_with(job, lora)
    assert not job.output.exists()


def test_a_report_and_a_plan_name_it_and_one_model_is_no_basis_for_the_other(
    job: JobMaker, lora: Path, shell: Shell
) -> None:
    job.write(rows_of(5))
    run_with(job, lora, step_s=0.001)
    without = shell("plan", job.toml(), "--json").json
    found = shell("plan", job.toml(), "--json", "--adapter", lora).json
    assert without["estimate"] is None
    assert "adapter" not in without
    assert found["estimate"] is not None
    assert found["adapter"] == str(lora)
    told = "".join(shell("report", job.output).out.split())  # a long path goes on in the next line
    assert f"adapter{lora}" in told


def test_a_merged_run_names_it(job: JobMaker, lora: Path) -> None:
    job.write(rows_of(6))
    assert merge(job.shards(job.spec(model={"adapter": str(lora)})), job.output).problems == []
    assert read_report(RunDir(job.output))["adapter"] == str(lora)


def test_plan_refuses_what_a_run_would(job: JobMaker, lora: Path, shell: Shell) -> None:
    job.write(rows_of(2))
    (lora / CONFIG).write_text(json.dumps({"peft_type": "IA3"}))
    for command in ("plan", "run"):
        said = shell(command, job.toml(), "--adapter", lora, code=2).err
        assert "adapter_config.json: peft_type is 'IA3'" in said
    assert not job.output.exists()


def test_a_path_in_a_job_file_is_relative_to_it_and_a_hub_id_stays(job: JobMaker, lora: Path) -> None:
    path = job.toml()
    for written, adapter in {"lora": str(lora), "./gone": str(job.folder / "gone"), "org/lora": "org/lora"}.items():
        path.write_text(f'[model]\npath = "dummy:LFM2-350M"\nadapter = "{written}"\n')
        assert load_job(path, needs=("model",)).model.adapter == adapter


def test_a_run_does_not_write_into_its_adapter(job: JobMaker, lora: Path) -> None:
    job.write(rows_of(2))
    with pytest.raises(UsageError, match="is the model's own folder"):
        job.run(job.spec(model={"adapter": str(lora)}, output={"path": str(lora)}))


def test_of_a_hub_adapter_its_two_files_are_fetched(job: JobMaker, lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot(repo_id: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(lora)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    job.write(rows_of(2))
    assert run_with(job, "org/lora").exit_code == 0
    assert set(map(str, asked)) == {str(("org/lora", "main", [CONFIG, WEIGHTS]))}


# ---------------------------------------------------------------- with the sample model


def command(job: JobMaker, name: str, model: Path, *flags: str) -> list[str]:
    where = ["--input", str(job.input), "--model", str(model), "--output", str(job.folder / name)]
    return ["run", *where, "--prompt", "{question}", "--max-tokens", "24", "--ignore-eos", *flags]


@pytest.mark.parametrize(
    "form",
    [
        ("--dtype", "float32"),
        ("--dtype", "bfloat16", "--temperature", "1", "--seed", "3"),
        pytest.param(("--dtype", "float32", "--quantization", "w8a16"), marks=pytest.mark.slow),
        pytest.param(("--dtype", "bfloat16", "--quantization", "w8a8"), marks=pytest.mark.slow),
    ],
    ids=lambda form: " ".join(form[1::2]),
)
def test_a_stopped_and_resumed_job_writes_what_the_merged_model_writes(
    job: JobMaker, lora: Path, form: tuple[str, ...], shell: Shell
) -> None:
    job.write(rows_of(8))
    whole = shutil.copytree(MODEL, job.folder / "merged")
    sums = merged(load_file(MODEL / "model.safetensors"), load_file(lora / WEIGHTS), ALPHA / RANK)
    save_file(sums, whole / "model.safetensors")
    shell(*command(job, "wanted", whole, *form))
    shell(*command(job, "plain", MODEL, *form))
    with_lora = command(job, "out", MODEL, *form, "--adapter", str(lora))
    said = shell(*with_lora, "--max-total-tokens", 60, "--max-num-seqs", 2, code=75).err
    assert "the adapter was trained on 'org/another', and is added to" in said
    shell(*with_lora)
    names = ("out", "wanted", "plain")
    out, wanted, plain = ([row["text"] for row in read_lines(job.folder / name / "outputs.jsonl")] for name in names)
    assert out == wanted != plain


@pytest.mark.slow
def test_check_and_bench_take_and_name_an_adapter(job: JobMaker, lora: Path, shell: Shell) -> None:
    path = job.write([{"prompt_token_ids": [9, 10, 11]}])
    where = ("--model", MODEL, "--adapter", lora, "--dtype", "float32")
    found = shell("check", *where, "--input", path, "--json").json
    assert (found["ok"], found["adapter"]) == (True, str(lora))
    lengths = ("--num-requests", 2, "--input-len", 5, "--output-len", 2, "--repeats", 1)
    assert f"{MODEL} + {lora}  float32 on cpu" in shell("bench", *where, *lengths).out


def test_an_adapter_that_lies_beside_the_weights_is_not_added_without_a_word(
    job: JobMaker, lora: Path, shell: Shell
) -> None:
    job.write(rows_of(1))
    both = shutil.copytree(MODEL, job.folder / "both")
    shutil.copytree(lora, both, dirs_exist_ok=True)
    said = shell(*command(job, "out", both)).err
    assert "has an adapter in its folder, which is not added; --adapter adds one" in said
