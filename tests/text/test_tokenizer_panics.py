"""A tokenizer that fails on a text or on tokens, also by a panic of its Rust library, costs that row and no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from input_helpers import builder_of, codes, row_of, write_tokenizer
from run_helpers import MODEL, JobMaker, rows_of

from batchgen.cli import main
from batchgen.core.errors import ExitCode, ModelError, TokenizerError
from batchgen.core.records import SamplingParams
from batchgen.run.stop import StopRequested
from batchgen.text.tokenizer import Tokenizer


class PanicException(BaseException):
    """What a panic of a Rust library is in Python."""


class Backend:
    """A tokenizer whose ``encode`` and ``decode`` raise where the text, or the text of the tokens, has a "!"."""

    def __init__(self, backend: tokenizers.Tokenizer, error: BaseException) -> None:
        self._backend = backend
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> Any:
        if any("!" in text for text in texts):
            raise self._error
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if "!" in text:
            raise self._error
        return text


def tokenizer_with(error: BaseException, folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(write_tokenizer(folder))
    tokenizer._backend = Backend(tokenizer._backend, error)  # type: ignore[assignment]
    return tokenizer


def broken_folder(folder: Path) -> Path:
    """A copy of the sample model whose tokenizer adds a special token that it does not have."""
    shutil.copytree(MODEL, folder)
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("error", [PanicException("no entry\nfound"), Exception("no [UNK]")], ids=["panic", "error"])
def test_a_text_that_cannot_be_encoded_costs_its_row_only(error: BaseException, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(error, tmp_path)
    builder = builder_of(tokenizer, SamplingParams(labels=("p", "q")), chat_template="none")
    rows = [{"prompt": "a"}, {"prompt": "b!"}, {"prompt": "c"}, {"prompt": "d", "sampling": {"labels": ["x", "y!"]}}]
    answers = [row for row, _ in builder.build([row_of(row, n) for n, row in enumerate(rows)])]
    assert codes(answers) == ["ok", "internal", "ok", "internal"]
    assert "the tokenizer cannot encode the text: no" in answers[1].error.message  # type: ignore[union-attr]
    assert "\n" not in answers[1].error.message  # type: ignore[union-attr]


def test_a_pattern_that_backtracks_without_end_costs_its_row_only(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    pattern = {"Regex": "(a+)+$"}
    settings["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    hostile, sound = Tokenizer.load(folder).encode_batch(["a" * 60 + "!", "aa"], add_special_tokens=False)
    assert isinstance(hostile, TokenizerError) and "retry-limit" in str(hostile)
    assert isinstance(sound, list)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), StopRequested(), MemoryError()])
def test_what_is_no_failure_of_the_tokenizer_goes_through(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(error, tmp_path)
    with pytest.raises(type(error)):
        tokenizer.encode_batch(["a!"], add_special_tokens=False)
    with pytest.raises(type(error)):
        tokenizer.decode([8])  # "!"
    monkeypatch.setattr(Tokenizer, "__init__", lambda *_, **__: tokenizer.decode([8]))
    with pytest.raises(type(error)):
        Tokenizer.load(tmp_path)


def test_tokens_that_cannot_be_decoded_cost_their_row_only(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Tokenizer.decode

    def failing(self: Tokenizer, ids: Sequence[int], **options: Any) -> str:
        if len(ids) % 2:
            raise TokenizerError("the tokenizer cannot decode the tokens: no luck")
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", failing)
    job.write(rows_of(30))
    assert job.run().exit_code == ExitCode.ROWS_FAILED
    done, failed = job.outputs(), job.errors()
    assert len(done) + len(failed) == 30 and done and failed
    assert {(row["code"], row["message"]) for row in failed} == {
        ("internal", "the tokenizer cannot decode the tokens: no luck")
    }


def test_a_tokenizer_that_panics_on_every_text_is_refused_with_its_file_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer: no entry found") as caught:
        Tokenizer.load(broken_folder(tmp_path / "model"))
    assert "\n" not in str(caught.value)


def test_a_panic_is_named_on_the_last_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = broken_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    command = ["plan", "--model", model, "--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out"]
    assert main.call([str(part) for part in command]) == ExitCode.USAGE
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith("batchgen: error: ") and "Traceback" not in said


def test_the_last_resort_takes_what_is_no_exception(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("out of luck")

    monkeypatch.setattr(main.cli, "main", panic)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main.call([]) == ExitCode.CRASH
    assert capfd.readouterr().err.startswith("batchgen: error: PanicException: out of luck (this is a bug; ")
