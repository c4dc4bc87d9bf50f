"""``batchgen check``: it holds on a sound engine, and finds each planted defect with its place."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from repeats import slow
from run_helpers import Shell, write_lines
from tiny_model import write_checkpoint
from torch import Tensor

from batchgen.check import run as check_run
from batchgen.check.run import LENGTHS, PREFIX, SUFFIXES, requests_for, room
from batchgen.cli.main import call
from batchgen.core.errors import ExitCode
from batchgen.engine import Engine, sampler, self_test
from batchgen.engine.invariants import Prompt, Trace, made_up_prompts
from batchgen.engine.load import load_weights
from batchgen.engine.replay import CpuRecordings
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.model.state import StateCache

pytestmark = pytest.mark.usefixtures("threads_as_before")

SAMPLE = str(Path(__file__).parents[2] / "sample_data" / "tiny-lfm2")
PLAIN = ["batched = solo", "chunked = whole", "cached = cold", "preempted = undisturbed", "decoded = prefilled"]
INTEGERS = ("--quantization", "w8a8")
FAST = "kernels ~ plain torch"


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """Flags that name three short prompts, two of them with a common beginning."""
    stem = list(range(20, 60))
    rows = [[9, 10, 11], [*stem, 70, 71, 72], [*stem, 80]]
    return ["--input", str(write_lines(tmp_path / "prompts.jsonl", ({"prompt_token_ids": row} for row in rows)))]


@pytest.fixture
def no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording leaves out what a test puts around a kernel, and its results last for one step only."""
    monkeypatch.setattr(CpuRecordings, "takes", staticmethod(lambda inputs: False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_moe"])
def test_near_ties_between_experts_fail_no_proof(family: str, dtype: str, tmp_path: Path, prompts: list[str]) -> None:
    write_checkpoint(tmp_path / "model", model_type=family)
    assert call(["check", "--model", str(tmp_path / "model"), "--dtype", dtype, *prompts, "--json"]) == 0


Found = tuple[int, dict[str, Any], str]


@pytest.fixture
def check(prompts: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., Found]:
    """Runs the command on the sample model; exit code, the object printed, what was said besides."""

    def run(*flags: str) -> Found:
        code = call(["check", "--model", SAMPLE, "--dtype", "float32", *prompts, "--json", *flags])
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    return run


def failed(found: dict[str, Any]) -> list[str]:
    return [proof["name"] for proof in found["proofs"] if proof["divergence"]]


def made_up(vocab_size: int, max_model_len: int) -> list[Prompt]:
    return made_up_prompts(vocab_size, room(max_model_len), LENGTHS, PREFIX, SUFFIXES)


def test_made_up_prompts_reach_beyond_blocks_and_steps_and_share_a_beginning() -> None:
    made = made_up(1000, 128_000)
    assert made == made_up(1000, 128_000)
    assert min(map(len, made)) == 1
    assert max(map(len, made)) > 512
    assert len({prompt[:64] for prompt in made}) < len(made)
    assert all(8 <= token < 1000 for prompt in made for token in prompt)


@pytest.mark.parametrize(("vocab_size", "max_model_len"), [(1, 2), (3, 16), (9, 60)])
def test_made_up_prompts_fit_any_model(vocab_size: int, max_model_len: int) -> None:
    for request in requests_for(made_up(vocab_size, max_model_len)):
        assert 1 <= len(request.prompt_token_ids) < max_model_len
        assert all(0 <= token < vocab_size for token in request.prompt_token_ids)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", slow("int8")])
def test_every_proof_holds_with_keys_and_values_of_fewer_bits(check: Callable[..., Found], kv_cache_dtype: str) -> None:
    code, found, _ = check("--kv-cache-dtype", kv_cache_dtype)
    assert (code, found["kv_cache_dtype"], failed(found)) == (ExitCode.OK, kv_cache_dtype, [])


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        *(("float32", ()), slow("bfloat16", ()), slow("float32", INTEGERS[:2])),
        *(slow("float32", INTEGERS), ("bfloat16", INTEGERS)),
    ],
)
def test_all_proofs_hold_on_the_sample(dtype: str, form: tuple[str, ...], shell: Shell) -> None:
    captured = shell("check", "--model", SAMPLE, "--dtype", dtype, *form)
    lines = captured.out.splitlines()
    assert lines[2] == "self-test of the kernels: holds"
    assert [line[: len(name)] for line, name in zip(lines[3:], [*PLAIN, FAST], strict=False)] == [*PLAIN, FAST]
    assert all("128 tokens" in line for line in lines[3:-1])
    assert "0 preemptions" not in captured.out
    assert ", 0 tokens cached" not in captured.out
    assert all(len(line) <= 80 for line in lines if SAMPLE not in line)
    assert "proving chunked = whole" in captured.err


def test_the_object_says_what_was_proved_on_what(check: Callable[..., Found]) -> None:
    code, found, _ = check()
    assert code == ExitCode.OK
    assert found["ok"] is True
    assert found["failed"] == []
    assert "kv_cache_dtype" not in found
    assert [found[key] for key in ("dtype", "device", "backend", "num_prompts")] == ["float32", "cpu", "cpu", 3]
    for done in found["proofs"][:-1]:
        assert (done["largest_gap"], done["tolerance"], done["num_tokens"]) == (0.0, 0.0, 48)
    assert 0 < found["proofs"][-1]["largest_share"] < found["proofs"][-1]["tolerance"]


@pytest.mark.usefixtures("no_recordings")
def test_the_digest_is_that_of_every_logit(check: Callable[..., Found]) -> None:
    found = [check("--threads", threads)[1]["digest"] for threads in ("1", "2")]
    assert found[0] == found[1]
    assert check("--dtype", "bfloat16")[1]["digest"] != found[0]
    one, other = (Trace(logits={0: {0: torch.zeros(4), 1: torch.full((4,), bit)}}) for bit in (0.0, 1e-30))
    assert one.digest != other.digest


def test_overlapping_steps_are_proved_as_single_ones(
    check: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the engine of ``run`` launches a step before it knows the tokens of the last."""
    assert Engine.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "overlaps", True)
    code, found, _ = check()
    assert code == ExitCode.OK
    assert [proof["num_tokens"] for proof in found["proofs"]] == [48] * 6


@pytest.mark.usefixtures("no_recordings")
def test_a_kernel_that_leaks_between_rows_is_found_with_its_place(
    prompts: list[str], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CpuKernels.rms_norm

    def leaking(self: CpuKernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = plain(self, x, weight, eps)
        out[1:] += 1e-4 * out[:-1]
        return out

    monkeypatch.setattr(CpuKernels, "rms_norm", leaking)
    captured = shell("check", "--model", SAMPLE, "--dtype", "float32", *prompts, code=4)
    lines = captured.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("batched = solo"))
    assert lines[at].endswith("DIVERGES")
    assert "prompt 1 (43 tokens, sampled), output 0" in lines[at + 1]
    assert "largest gap" in lines[at + 2]
    assert all(len(line) <= 80 for line in lines if SAMPLE not in line)
    error = captured.err.splitlines()[-1]
    assert error.startswith("batchgen: error: batched = solo: prompt 1")
    assert "more proofs" in error


def test_convolution_state_that_is_not_restored_fails_the_proof_of_the_cache_alone(
    check: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateCache, "restore_conv", lambda self, blocks, slots: None)
    code, found, error = check()
    assert code == ExitCode.GATE_FAILED
    assert failed(found) == ["cached = cold"]
    assert "cached = cold: prompt 2 (41 tokens, greedy), output 0" in error


def test_randomness_that_depends_on_the_order_is_found_though_every_logit_is_right(
    check: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count()

    def drawn(seeds: list[int], *others: object) -> np.ndarray:
        return np.array([next(calls) * 0.6180339887 % 1.0 for _ in seeds])

    monkeypatch.setattr(sampler, "uniforms", drawn)
    code, found, error = check()
    assert code == ExitCode.GATE_FAILED
    first = found["proofs"][0]
    assert (first["name"], first["largest_gap"]) == ("batched = solo", 0.0)
    assert first["divergence"]["key"] == 1
    assert first["divergence"]["got"] != first["divergence"]["expected"]
    assert "sampled" in error


@pytest.mark.usefixtures("no_recordings")
def test_a_kernel_that_is_wrong_for_every_row_fails_only_against_the_reference(
    check: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CpuKernels.short_conv
    monkeypatch.setattr(CpuKernels, "short_conv", lambda *arguments: plain(*arguments) * 1.01)
    code, found, _ = check()
    assert code == ExitCode.GATE_FAILED
    assert failed(found) == [FAST]
    assert found["proofs"][-1]["largest_share"] > 1e-4


@pytest.mark.usefixtures("no_recordings")
def test_a_model_whose_logits_are_not_finite_fails_the_check_with_one_line(
    prompts: list[str], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CpuKernels.short_conv
    monkeypatch.setattr(CpuKernels, "short_conv", lambda *arguments: plain(*arguments) * torch.nan)
    said = shell("check", "--model", SAMPLE, "--dtype", "float32", *prompts, code=4).err
    assert "not finite" in said.splitlines()[-1]


@pytest.mark.breadth
def test_a_model_is_let_go_before_the_next_is_loaded(
    check: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    still_there: list[bool] = []

    def load(*arguments: Any, **named: Any) -> Any:
        gc.collect()
        still_there.extend(model() is not None for model in loaded)
        model = load_weights(*arguments, **named)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(check_run, "load_weights", load)
    assert check()[0] == ExitCode.OK
    assert still_there == [False]


ON_ROWS = ("--model", SAMPLE, "--input", "rows.jsonl")


@pytest.mark.parametrize(
    ("flags", "rows", "messages"),
    [
        ([], "", ["--model is missing"]),
        (["--model", SAMPLE, "--input", "no/such.jsonl"], "", ["no input file"]),
        (["--model", "no/such/folder"], "", ["no/such/folder"]),
        (["--model", SAMPLE, "--dtype", "int3"], "", ["dtype"]),
        (["--model", SAMPLE, "--dtype", "float16", "--device", "cpu"], "", ["a CPU has no kernels for it; use auto"]),
        ([*ON_ROWS], '{"prompt_token_ids": [9]}\n{"question": "?"}\n', ["rows.jsonl:2: missing_column"]),
        ([*ON_ROWS], "", ["no rows"]),
        ([*ON_ROWS, "--prompt", "{qestion}"], '{"question": "?"}\n', ["did you mean", "columns found: 'question'"]),
    ],
)
def test_what_is_not_checkable_is_a_usage_error(
    flags: list[str], rows: str, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(rows)
    out, err = shell("check", *flags, code=2)
    assert all(message in err for message in messages)
    assert out == ""


def test_rows_may_be_templates_over_columns(shell: Shell) -> None:
    rows = Path(SAMPLE).parent / "questions.jsonl"
    flags = ("--input", rows, "--prompt", "{question}", "--limit", 2, "--json")
    assert shell("check", "--model", SAMPLE, *flags).json["num_prompts"] == 2


@pytest.mark.breadth
def test_kernels_that_failed_their_self_test_are_named(
    check: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "find_fault", lambda *_: "draws differ from plain torch")
    code, found, _ = check("--limit", "2")
    assert found["backend"] == "plain"
    assert "(draws differ from plain torch)" in found["notes"][0]
    assert code in (ExitCode.OK, ExitCode.GATE_FAILED)  # plain torch promises no equal bits
