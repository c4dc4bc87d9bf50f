"""``batchgen check --against``: it counts what differs between two forms of a model, and a gate on that closes."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.check import against
from batchgen.cli.main import call
from batchgen.core.errors import ExitCode
from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.load import load_weights
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model
from batchgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("threads_as_before")

SAMPLE_DATA = Path(__file__).parents[2] / "sample_data"
SAMPLE = SAMPLE_DATA / "tiny-lfm2"
BOTH = ["--weights", "int8", "--activations", "int8"]
NUM_ROWS = 12

Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    """Runs the command on rows of the sample questions; the object printed."""

    def run(*flags: str) -> dict[str, Any]:
        rows = ["--input", str(SAMPLE_DATA / "questions.jsonl"), "--prompt", "{question}", "--limit", str(NUM_ROWS)]
        model = ["--model", str(SAMPLE), "--dtype", "float32", "--against", "float32", "--max-tokens", "20"]
        assert call(["check", *model, *rows, "--json", *flags]) == ExitCode.OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def plant(monkeypatch: pytest.MonkeyPatch, defect: Callable[[Tensor], Tensor]) -> list[weakref.ref[Decoder]]:
    """Let a defect change the logits of every form but the baseline; the models loaded."""
    loaded: list[weakref.ref[Decoder]] = []

    def load(*arguments: Any) -> Decoder:
        gc.collect()
        assert all(model() is None for model in loaded), "the one before is still in memory"
        model = load_weights(*arguments)
        model.kernels.recorder = lambda: None  # which would leave the defect out
        if loaded:
            plain = model.lm_head
            model.lm_head = lambda x, residual=None: defect(plain(x, residual))
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(against, "load_weights", load)
    return loaded


def test_a_form_does_not_differ_from_itself(compare: Compare) -> None:
    found = compare()
    assert found["forms"] == ["float32 on cpu"] * 2
    assert (found["num_rows"], found["num_same_rows"], found["different_rows"]) == (NUM_ROWS, NUM_ROWS, [])
    assert (found["agreeing_share"], found["perplexity_ratio"]) == (1.0, 1.0)
    assert found["num_scored_tokens"] == found["num_tokens"] > NUM_ROWS


def test_integers_are_compared_with_the_model_without_them(compare: Compare) -> None:
    found = compare(*BOTH, "--expected", "answer")
    assert found["forms"] == ["float32 on cpu", "float32 on cpu, int8 weights, int8 activations"]
    assert found["perplexity_ratio"] != 1.0
    assert found["perplexity_ratio"] == pytest.approx(1.0, abs=0.02)
    assert min(found["exact_match"]) >= NUM_ROWS - 2


def test_the_perplexity_is_that_of_the_expected_answers_after_their_prompts(compare: Compare) -> None:
    """Against the same texts scored as prompts, whose log-probabilities the engine gives one by one."""
    found = compare("--expected", "answer")
    tokenizer, model = Tokenizer.load(SAMPLE), load_model(str(SAMPLE), dtype="float32")
    rows = [json.loads(line) for line in (SAMPLE_DATA / "questions.jsonl").read_text().splitlines()[:NUM_ROWS]]
    prompts = list(tokenizer.render_chats([[{"role": "user", "content": row["question"]}] for row in rows]))
    losses: list[float] = []
    for prompt, row in zip(prompts, rows, strict=True):
        before, answer = tokenizer.encode_batch([str(prompt), row["answer"]], False)
        assert isinstance(before, list) and isinstance(answer, list)
        request = Request(0, (*before, *answer), SamplingParams(max_tokens=0, prompt_logprobs=0))
        (result,) = Engine(model, EngineConfig(kv_memory=1 << 20)).run([request])
        assert result.prompt_logprobs is not None
        losses += [-score.logprob for score in result.prompt_logprobs[len(before) - 1 :]]
    assert found["scored"] == "answer"
    assert found["num_scored_tokens"] == len(losses)
    assert found["perplexity"] == pytest.approx([math.exp(sum(losses) / len(losses))] * 2, rel=1e-5)


def test_answers_that_never_end_agree_up_to_the_end_token(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    eos = [7]

    def without_end(logits: Tensor) -> Tensor:
        return logits.index_fill(1, torch.tensor(eos), -30.0)

    plant(monkeypatch, without_end)
    found = compare()
    ended = round((1 - found["agreeing_share"]) * found["num_tokens"])
    assert found["num_rows"] - found["num_same_rows"] == ended == len(found["different_rows"]) > NUM_ROWS / 2
    assert found["perplexity_ratio"] > 2


def test_a_gate_closes_when_too_many_rows_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [9 + i, 10, 11]}) + "\n" for i in range(4)))
    loaded = plant(monkeypatch, lambda logits: logits.roll(1, 1))
    command = ["check", "--model", str(SAMPLE), "--dtype", "float32", "--against", "float32", "--input", str(path)]
    command += ["--max-tokens", "4"]
    assert call([*command, "--max-different-rows", "99%"]) == ExitCode.GATE_FAILED
    captured = capsys.readouterr()
    assert "100.0% of the rows differ, more than the 99.0% allowed" in captured.err.splitlines()[-1]
    assert "same tokens  0 of 4 rows (0.0%)" in captured.out
    assert "agreement    0.00% of" in captured.out
    assert "--expected COLUMN" in captured.out
    assert all(len(line) <= 80 for line in captured.out.splitlines() if str(SAMPLE) not in line)
    loaded.clear()
    assert call(command) == ExitCode.OK
    loaded.clear()
    assert call([*command, "--max-different-rows", "100%"]) == ExitCode.OK


def test_rows_are_answered_greedily_whatever_they_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt_token_ids": [9, 10, 11 + i], "sampling": {"temperature": 2.0, "max_tokens": 9}} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["check", "--model", str(SAMPLE), "--dtype", "float32", "--against", "float32", "--json"]
    assert call([*command, "--input", str(path), "--max-tokens", "3"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["num_same_rows"] == 3
    assert found["num_tokens"] <= 9


def test_logits_that_are_not_finite_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt_token_ids": [9]}\n')
    plant(monkeypatch, lambda logits: logits * torch.nan)
    command = ["check", "--model", str(SAMPLE), "--against", "float32", "--input", str(path)]
    assert call(command) == ExitCode.GATE_FAILED
    assert "row 0 cannot be run" in capsys.readouterr().err.splitlines()[-1]


AGAINST, ASKED = ["--against", "float32"], ["--input", "rows.jsonl", "--prompt", "{question}"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (AGAINST, "--against needs --input FILE"),
        ([*AGAINST, "--input", "rows.jsonl", "--activations", "int8"], 'needs model.weights = "int8"'),
        ([*AGAINST, *ASKED, "--expected", "anser"], 'did you mean "answer"'),
        ([*AGAINST, *ASKED, "--expected", "nothing"], "row 0 has no text"),
        # The proofs would hold, and a script take the gate for passed.
        (["--max-different-rows", "1%"], "--max-different-rows is for a comparison: it needs --against DTYPE"),
        (["--max-tokens", "9"], "--max-tokens is for a comparison: it needs --against DTYPE"),
        (["--expected", "answer"], "--expected is for a comparison: it needs --against DTYPE"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "?", "answer": "!", "nothing": ""}\n')
    assert call(["check", "--model", str(SAMPLE), *flags]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
