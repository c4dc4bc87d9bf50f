"""``batchgen try``: what the model sees and answers for the first rows, with nothing written."""

from __future__ import annotations

import json
from pathlib import Path

from run_helpers import MODEL, JobMaker, Shell, rows_of, timeless
from stub_engine import StubEngine, stub_factory

from batchgen.core.units import printable


def test_prompts_are_shown_as_sent_and_nothing_is_written(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(9))
    before = sorted(job.folder.iterdir())
    out, said = shell("try", job.toml(input={"chat_template": "auto"}), engine=stub_factory())
    assert said == f"batchgen: next: batchgen run {job.folder / 'job.toml'}\n"
    question = json.loads(job.input.read_text().splitlines()[1])["question"]
    assert f"<|startoftext|><|im_start|>user\n  {question}<|im_end|>\n  <|im_start|>assistant" in out
    assert out.count("prompt tokens:") == out.count("answer, ") == 3
    assert [path for path in sorted(job.folder.iterdir()) if path.suffix != ".toml"] == before


def test_answers_are_those_of_a_run(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(5))
    said = shell("try", job.toml(), "-n", 99, "--json", engine=stub_factory()).out
    job.run()
    assert [timeless(json.loads(line)["record"]) for line in said.splitlines()] == job.outputs()


def test_every_sample_is_shown(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(1))
    words = ("try", job.toml(), "--n", 2, "--temperature", 1)
    samples = shell(*words, "--json", engine=stub_factory()).json["record"]["samples"]
    out, said = shell(*words, engine=stub_factory())
    answers = out.split("\nanswer ")[1:]
    for number, (shown, sample) in enumerate(zip(answers, samples, strict=True), 1):
        assert shown.startswith(f"{number}, {sample['finish_reason']}:\n  ")
        assert printable(sample["text"].split()[0]) in shown
    assert said.endswith("with the same flags\n")


def test_rows_that_cannot_run_are_named_and_load_no_model(job: JobMaker, shell: Shell) -> None:
    job.write([{"id": 1, "question": ""}, "{", {"id": 2, "question": "a"}])
    engines: list[StubEngine] = []
    lines = shell("try", job.toml(), "-n", 2, code=3, engine=stub_factory(engines)).out.splitlines()
    assert not engines
    assert lines[0].startswith("row 0 (line 1): empty_prompt: ") and lines[2].startswith("row 1 (line 2): bad_json: ")


def test_vectors_and_ids_are_shown_too(tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
    said = shell("try", tmp_path / "ids.jsonl", "-m", MODEL, "-n", 1, engine=stub_factory())
    assert "2 prompt tokens" in said.out
    (tmp_path / "texts.csv").write_text("text\nabc\n")
    said = shell("try", tmp_path / "texts.csv", "-m", MODEL, "-p", "text", "--pooling", "last")
    assert '"embedding": [' in said.out


def test_an_input_without_rows_is_refused(job: JobMaker, shell: Shell) -> None:
    job.write([])
    assert "has no rows" in shell("try", job.toml(), code=2).err
