"""What stands for a job: a file with or without sections, data, or a run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import MODEL, Shell, write_lines
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.config.load import load_job
from batchgen.core.errors import ExitCode, UsageError
from batchgen.run.argument import load_spec

ROWS = [{"word": "shadow", "n": 1}, {"word": "silver", "n": 2}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.csv").write_text("word,n\nshadow,1\nsilver,2\n")
    write_lines(tmp_path / "words.v2.jsonl", ROWS)
    return tmp_path


def run(*argv: str) -> int:
    return call(["run", *argv, "-q"], stub_factory())


@pytest.mark.parametrize("data", ["words.csv", "words.v2.jsonl", "./words.*l", "words.cs[v]"])
def test_data_stand_for_a_job_with_them_as_input_and_an_output_named_after_them(folder: Path, data: str) -> None:
    assert run(data, "-m", str(MODEL), "-p", "Say {word}") == 0
    job = json.loads((folder / "runs" / "words" / "job.json").read_bytes())["job"]
    assert job["input"]["prompt"] == "Say {word}"
    assert run("runs/words") == 0


@pytest.mark.parametrize(
    ("data", "name"),
    [("-", "stdin"), ("hf:user/some-name?split=test", "some-name"), ("s3://bucket/a/rows.jsonl.gz", "rows")],
)
def test_addresses_and_stdin_are_data_too(folder: Path, data: str, name: str) -> None:
    spec, _ = load_spec(data, {"model": {"path": "m"}}, None)
    assert (spec.input.path, spec.output.path) == ((data,), str(folder / "runs" / name))


def test_data_of_the_same_name_do_not_replace_the_outputs_of_other_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "b").mkdir()
    (folder / "b" / "words.csv").write_text("word,n\nother,1\n")
    flags, outputs = ("-m", str(MODEL), "-p", "Say {word}"), folder / "runs" / "words" / "outputs.csv"
    assert run("words.csv", *flags) == run("./words.csv", *flags) == 0
    before = outputs.read_bytes()
    assert run("b/words.csv", *flags) == ExitCode.USAGE
    assert "runs/words has the outputs of" in capsys.readouterr().err
    assert outputs.read_bytes() == before
    assert call(["try", "b/words.csv", *flags], stub_factory()) == 0, "it writes nothing"
    assert run("b/words.csv", *flags, "-o", "runs/words") == 0, "as it was said to be meant"
    assert run("words.csv", *flags, "-o", "runs/words") == 0
    (folder / "words.csv").rename(folder / "b" / "words.csv")
    assert run("b/words.csv", *flags) == 0, "the data were moved"
    (folder / "runs" / "words" / "job.json").write_text("{")
    assert run("b/words.csv", *flags, "--overwrite") == 0


def test_short_flags_are_those_of_a_job(folder: Path) -> None:
    assert run("-i", "words.csv", "-m", str(MODEL), "-p", "word", "-o", "elsewhere") == 0
    assert len((folder / "elsewhere" / "outputs.csv").read_bytes().split(b"\r\n")) == 4
    assert run("words.csv", "-m", str(MODEL), "-p", "word", "-o", "here") == 0
    assert not (folder / "runs").exists()


def test_a_job_file_of_four_lines_is_one_with_sections_and_takes_keys_that_one_section_has(folder: Path) -> None:
    short, long = folder / "short.toml", folder / "long.toml"
    short.write_text(f'model = "{MODEL}"\ninput = "words.csv"\nprompt = "{{word}}"\noutput = "runs/a"\n')
    text = f'[model]\npath = "{MODEL}"\n[input]\npath = "words.csv"\nprompt = "{{word}}"\n[output]\npath = "runs/a"\n'
    long.write_text(text)
    assert load_job(short) == load_job(long)
    keys = 'id = "id"\nmax_tokens = 7\nchat_template_kwargs = { enable_thinking = false }\nexpected = "word"\n'
    both = short.read_text().replace('"words.csv"', '["words.csv", "words.v2.jsonl"]')
    short.write_text(f"{both}{keys}[sampling]\nn = 2\n")
    spec = load_job(short)
    assert (len(spec.input.path), spec.sampling.n) == (2, 2)
    assert (spec.input.id, spec.sampling.max_tokens, spec.eval.expected) == ("id", 7, "word")
    assert spec.input.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("name", ["out.jsonl", "a/out.csv", "out.parquet"])
def test_an_output_that_is_named_as_a_file_is_refused(folder: Path, name: str) -> None:
    stem = Path(name).stem
    with pytest.raises(UsageError, match=rf"a run fills a folder: give {stem}, its answers are then in {stem}/outputs"):
        load_job(None, {"model": {"path": str(MODEL)}, "input": {"path": ["words.csv"]}, "output": {"path": name}})
    assert not (folder / name).exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('prompt = "a"\n[input]\nprompt = "b"\n', r"prompt and input\.prompt are one key: give one of them"),
        ("max_tokens = 0.5\n", r"job\.toml:1: sampling\.max_tokens: max_tokens = 0\.5 must be"),
        ("limit = 5\n[input]\nlimit = 6\n", r"limit and input\.limit are one key: give one of them"),
        (
            'input = "a"\n[input]\nid = "b"\n',
            r"not valid TOML: ",
        ),
        ("sampling = 3\nmax_tokens = 3\n", r"sampling = 3: must be a section"),
        ('\n\npromt = "a"\n', r'job\.toml:3: unknown key promt \(did you mean "prompt"\?\)'),
        ("max_token = 5\n", r'job\.toml:1: unknown key max_token \(did you mean "max_tokens"\?\)'),
        ("temperatur = 1\n", r'unknown key temperatur \(did you mean "temperature"\?\)'),
        ("max_new_tokens = 1\n", r"unknown key max_new_tokens \(here it is sampling\.max_tokens\)"),
        ("\n[samplin]\nn = 1\n", r'job\.toml:2: unknown section \[samplin\] \(did you mean "sampling"\?\)'),
        ("wholly = 1\n", r"unknown key wholly \(known: model, input, "),
        ("model = 5\n", r":1: model\.path = 5: must be a string"),
        ('\nprompt = ["a"]\n', r":2: input\.prompt = "),
        ('[prompt]\na = "b"\n', r"unknown section \[prompt\] \(it belongs in \[input\]\)"),
    ],
)
def test_what_stands_in_no_section_and_is_no_key_of_a_short_job_is_refused(folder: Path, text: str, said: str) -> None:
    (folder / "job.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        load_job(folder / "job.toml")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["words.csv"], "--model is missing"),
        (["words.csv", "-m", "x", "-i", "other.csv"], "'words.csv' and --input are both the input: give one of them"),
        (["gone.csv", "-m", str(MODEL), "-p", "a"], "no input file"),
        (["job.tml"], "cannot read the job file job.tml: No such file or directory"),
        ([], "give a job file, or data with --model and --prompt"),
    ],
)
def test_arguments_that_are_no_job_are_refused_in_a_line(shell: Shell, argv: list[str], said: str) -> None:
    (line,) = shell("run", *argv, "-q", code=2).err.splitlines()
    assert said in line


def test_plan_takes_what_run_takes(shell: Shell) -> None:
    assert shell("plan", "words.csv", "-m", MODEL, "-p", "word", "--json").json["rows"]["good"] == 2
