"""``batchgen try``: what the model sees and answers for the first rows, with nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import MODEL, JobMaker, rows_of
from stub_engine import StubEngine, stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode
from batchgen.core.units import printable


def test_prompts_are_shown_as_sent_and_nothing_is_written(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(9))
    before = sorted(job.folder.iterdir())
    engines: list[StubEngine] = []
    assert call(["try", str(job.toml(input={"chat_template": "auto"}))], stub_factory(engines)) == 0
    out, said = capsys.readouterr()
    assert said == f"batchgen: next: batchgen run {job.folder / 'job.toml'}\n"
    question = json.loads(job.input.read_text().splitlines()[1])["question"]
    assert f"<|startoftext|><|im_start|>user\n  {question}<|im_end|>\n  <|im_start|>assistant" in out
    assert out.count("prompt tokens:") == out.count("answer, ") == 3
    assert [path for path in sorted(job.folder.iterdir()) if path.suffix != ".toml"] == before


def test_answers_are_those_of_a_run(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(5))
    assert call(["try", str(job.toml()), "-n", "99", "--json"], stub_factory()) == 0
    tried = [json.loads(line)["record"] for line in capsys.readouterr().out.splitlines()]
    job.run()
    outputs = [json.loads(line) for line in (job.output / "outputs.jsonl").read_text().splitlines()]
    assert [{**record, "timings": 0} for record in tried] == [
        {**record, "timings": 0} for record in sorted(outputs, key=lambda record: record["index"])
    ]


def test_every_sample_is_shown(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(1))
    toml, flags = str(job.toml()), ["--n", "2", "--temperature", "1"]
    assert call(["try", toml, *flags, "--json"], stub_factory()) == 0
    samples = json.loads(capsys.readouterr().out)["record"]["samples"]
    assert call(["try", toml, *flags], stub_factory()) == 0
    out, said = capsys.readouterr()
    answers = out.split("\nanswer ")[1:]
    for number, (shown, sample) in enumerate(zip(answers, samples, strict=True), 1):
        assert (
            shown.startswith(f"{number}, {sample['finish_reason']}:\n  ")
            and printable(sample["text"].split()[0]) in shown
        )
    assert said.endswith("with the same flags\n")


def test_rows_that_cannot_run_are_named_and_load_no_model(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write([{"id": 1, "question": ""}, "{", {"id": 2, "question": "a"}])
    engines: list[StubEngine] = []
    assert call(["try", str(job.toml()), "-n", "2"], stub_factory(engines)) == ExitCode.ROWS_FAILED
    assert not engines
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("row 0 (line 1): empty_prompt: ") and lines[2].startswith("row 1 (line 2): bad_json: ")


def test_vectors_and_ids_are_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
    job = [str(tmp_path / "ids.jsonl"), "-m", str(MODEL), "-n", "1"]
    assert call(["try", *job], stub_factory()) == 0
    assert "2 prompt tokens" in capsys.readouterr().out
    (tmp_path / "texts.csv").write_text("text\nabc\n")
    assert call(["try", str(tmp_path / "texts.csv"), "-m", str(MODEL), "-p", "text", "--pooling", "last"]) == 0
    assert '"embedding": [' in capsys.readouterr().out


def test_an_input_without_rows_is_refused(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write([])
    assert call(["try", str(job.toml())], stub_factory()) == ExitCode.USAGE
    assert "has no rows" in capsys.readouterr().err
