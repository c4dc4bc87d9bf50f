"""The benchmark: what it counts, what it prints, what it refuses. No test asserts a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Shell, write_lines
from tiny_model import tiny_model

from batchgen.bench import measure as bench
from batchgen.bench.workload import NAMED, EndAfter, LengthRange, Shape, from_file, hide_lengths
from batchgen.core.errors import UsageError
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.generation import TextTools
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.model import rates
from batchgen.model.load import load_model
from batchgen.model.rates import MeasureConfig
from batchgen.model.registry import load_config

pytestmark = pytest.mark.usefixtures("threads_as_before")

SAMPLE = str(Path(__file__).parents[2] / "sample_data" / "tiny-lfm2")
BENCH = ("bench", "--model", SAMPLE)
FEW = MeasureConfig((8,), repeats=1, sustained_s=0.0, buffer_bytes=1 << 20)


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures ceilings in next to no time."""
    monkeypatch.setattr(bench, "measure", lambda model: rates.measure(model, FEW))


def test_the_same_shape_makes_the_same_requests_with_lengths_in_range() -> None:
    shape = Shape(20, LengthRange(3, 9), LengthRange(5, 5))
    requests = shape.requests(100)
    assert requests == shape.requests(100)
    assert all(3 <= len(r.prompt_token_ids) <= 9 and r.params.max_tokens == 5 for r in requests)
    assert all(8 <= token < 100 for r in requests for token in r.prompt_token_ids)


@pytest.mark.parametrize("text", ["", "0", "9:3", "a", "-1:4", "1:2:3"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--input-len"):
        LengthRange.parse(text, "--input-len")


@pytest.mark.parametrize(
    "line",
    [
        *("[1, 2]", "7", '{"prompt_token_ids": "12"}', '{"prompt_token_ids": [1.5]}', '{"prompt_token_ids": 5}'),
        '{"prompt": "no ids"}',
        *(f'{{"prompt_token_ids": [1], "max_tokens": {value}}}' for value in ("-3", "1.7", "true", '"9"')),
    ],
)
def test_a_workload_line_with_a_value_that_does_not_fit_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text(f'{{"prompt_token_ids": [1, 2], "max_tokens": null}}\n{line}\n')
    with pytest.raises(UsageError, match="line 2"):
        from_file(path, SamplingParams())


@pytest.mark.usefixtures("quick_ceilings")
def test_real_prompts_end_with_the_models_own_end_token(
    tmp_path: Path, runs: list[tuple[list[Request], list[Result]]], shell: Shell
) -> None:
    rows = [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}, {"prompt_token_ids": [5, 6]}]
    path = write_lines(tmp_path / "work.jsonl", rows)
    found = shell(*BENCH, "--workload", path, "--max-tokens", 9, "--repeats", 1, "--json").json
    assert found["ends"] == "model"
    given, answers = runs[-1]
    assert [(r.params.max_tokens, r.params.ignore_eos, r.params.stop) for r in given] == [(9, False, ())] * 3
    assert given[0].prompt_token_ids == given[1].prompt_token_ids, "a prompt is one message"
    assert found["num_requests_tokens"]["output"] == sum(len(r.first.token_ids) for r in answers if r.key != 1)
    path.write_text('{"prompt": "Hello"}\n')
    said = shell("bench", "--model", "dummy:LFM2-350M", "--workload", path, code=2).err
    assert "line 1: " in said and "prompt_token_ids" in said


def test_the_workload_of_nano_vllm_has_the_tokens_that_its_table_names() -> None:
    requests = NAMED["nano-vllm"](151_936)
    assert sum(request.params.max_tokens for request in requests) == 133_966
    assert sum(len(request.prompt_token_ids) for request in requests) == 142_827
    assert max(max(request.prompt_token_ids) for request in NAMED["nano-vllm"](100)) < 100


@pytest.mark.usefixtures("quick_ceilings")
def test_bench_prints_an_object_of_figures_and_roofline(shell: Shell) -> None:
    lengths = ("--num-requests", 3, "--input-len", "5:9", "--output-len", 4)
    found = shell(*BENCH, "--dtype", "float32", *lengths, "--repeats", 2, "--json").json
    assert found["num_requests_tokens"]["output"] == 12
    assert len(found["runs"]) == 2
    assert {"wall_s", "output_tokens_per_s", "total_tokens_per_s", "roofline_share"} <= found.keys()
    assert found["backend"] == "cpu"
    assert found["kernels"].startswith(CpuKernels().variant)
    assert found["roofline_flops_per_s"] > 0
    assert found["memory_bytes_per_s"] > 0
    assert found["engine"].keys() >= {"max_num_batched_tokens", "max_num_seqs", "block_size", "kv_bytes"}
    assert found["peak_memory_bytes"] > 0


@pytest.mark.usefixtures("quick_ceilings")
def test_an_engine_is_gone_before_the_next_one_takes_the_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Engine]] = []

    class Watched(Engine):
        def __init__(self, *arguments: Any, **parts: Any) -> None:
            assert not any(engine() for engine in made)
            super().__init__(*arguments, **parts)
            made.append(weakref.ref(self))

    monkeypatch.setattr(bench, "Engine", Watched)
    gc.disable()
    try:
        bench.benchmark(
            bench.Bench(tiny_model(), EngineConfig()), [Request(0, (5, 6, 7), SamplingParams(max_tokens=3))], 3
        )
    finally:
        gc.enable()
    assert len(made) >= 4


def test_ceilings_are_measured_with_as_many_experts_as_a_token_meets() -> None:
    model = tiny_model(model_type="lfm2_moe")
    dense, sparse = (layer.linears for layer in model.layers[:2])
    assert (len(dense), len(sparse)) == (2 + 2, 2 + 2 * 2)


LENGTHS = [3, 1, 7, 4, 7]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """A file of requests with answers of ``LENGTHS``."""
    rows = ({"prompt_token_ids": [5, 6, 7 + i], "max_tokens": n} for i, n in enumerate(LENGTHS))
    return write_lines(tmp_path / "work.jsonl", rows)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Request], list[Result]]]:
    """What engines were given and what they answered, filled as they run."""
    seen: list[tuple[list[Request], list[Result]]] = []

    class Watched(Engine):
        def run(self, requests: Iterable[Request]) -> Iterator[Result]:
            seen.append((list(requests), []))
            for result in super().run(seen[-1][0]):
                seen[-1][1].append(result)
                yield result

    monkeypatch.setattr(bench, "Engine", Watched)
    return seen


@pytest.mark.usefixtures("quick_ceilings")
@pytest.mark.parametrize("lengths", [None, "unknown", "known"])
def test_answers_have_the_lengths_of_the_workload_whether_the_engine_knows_them_or_not(
    workload: Path, runs: list[tuple[list[Request], list[Result]]], lengths: str | None, shell: Shell
) -> None:
    flags = ["--lengths", lengths] if lengths else []
    found = shell(*BENCH, "--workload", workload, "--ignore-eos", "--repeats", 1, "--json", *flags).json
    assert found["lengths"] == (lengths or "unknown")
    assert found["num_requests_tokens"]["output"] == sum(LENGTHS)
    given, answers = runs[-1]
    told = LENGTHS if lengths == "known" else [max(LENGTHS)] * len(LENGTHS)
    assert [request.key for request in given] == list(range(len(LENGTHS)))
    assert [request.params.max_tokens for request in given] == told
    assert {result.key: len(result.first.token_ids) for result in answers} == dict(enumerate(LENGTHS))


@pytest.mark.usefixtures("quick_ceilings")
def test_the_scheduler_finds_nothing_longer_than_another_where_lengths_are_unknown(workload: Path) -> None:
    requests = hide_lengths(from_file(workload, SamplingParams(ignore_eos=True)))
    engine = Engine(
        load_model(SAMPLE, dtype="float32"), EngineConfig(threads=1, max_num_seqs=1), text=TextTools(EndAfter)
    )
    assert [result.key for result in engine.run(requests)] == list(range(len(LENGTHS)))
    requests = [Request(key, (5, 6), SamplingParams(max_tokens=n)) for key, n in enumerate([0, 2])]
    assert [request.params.max_tokens for request in hide_lengths(requests)] == [0, 2], "nothing stays nothing"


@pytest.mark.usefixtures("quick_ceilings")
def test_hidden_lengths_that_the_memory_cannot_hold_are_named_in_the_error(tmp_path: Path, shell: Shell) -> None:
    rows = [{"prompt_token_ids": [5] * 10, "max_tokens": 60}, {"prompt_token_ids": [5] * 60, "max_tokens": 4}]
    path = write_lines(tmp_path / "work.jsonl", rows)
    memory = ("--block-size", 8, "--kv-cache-memory", 10 * load_config(SAMPLE).kv_block_bytes(8, 4))
    words = (*BENCH, "--dtype", "float32", "--workload", path, "--ignore-eos", *memory, "--repeats", 1)
    said = shell(*words, code=2).err
    assert "all rows have the largest max_tokens here; --lengths known gives each its own" in said
    shell(*words, "--lengths", "known")


@pytest.mark.usefixtures("quick_ceilings")
def test_a_model_too_small_to_share_runs_in_one_thread_by_default(shell: Shell) -> None:
    lengths = ("--num-requests", 1, "--input-len", 5, "--output-len", 2, "--repeats", 1, "--json")
    assert [shell(*BENCH, *lengths, *more).json["threads"] for more in ((), ("--threads", 2))] == [1, 2]


@pytest.mark.usefixtures("quick_ceilings")
def test_bench_text_fits_80_columns(shell: Shell) -> None:
    lengths = ("--num-requests", 2, "--input-len", 5, "--output-len", 2)
    lines = shell(*BENCH, *lengths, "--repeats", 1, "--quantization", "w8a8").out.splitlines()
    assert any("share of it" in line for line in lines)
    assert any("int8 weights, int8 activations" in line for line in lines)
    assert all(len(line) <= 80 + len(SAMPLE) for line in lines)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--workload", "no/such/file.jsonl", "--num-requests", "3", "--input-len", "1", "--output-len", "1"],
        ["--limit", "2", "--num-requests", "3", "--input-len", "1", "--output-len", "1"],
        ["--num-requests", "3"],
        ["--workload", "no/such/file.jsonl"],
        ["--workload", "nano-vllm", "--limit", "1", "--max-tokens", "5"],
    ],
)
def test_bench_refuses_what_names_no_workload(flags: list[str], shell: Shell) -> None:
    assert shell(*BENCH, *flags, code=2).err.startswith("batchgen: error: ")
