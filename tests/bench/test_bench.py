"""The benchmark: what it counts, what it prints, what it refuses. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.bench import roofline
from batchgen.bench.roofline import Ceilings, Work
from batchgen.bench.workload import PRESETS, LengthRange, Shape, from_file
from batchgen.cli import call
from batchgen.engine.stats import EngineStats
from batchgen.errors import ExitCode, UsageError
from batchgen.model.published import dummy_config

SAMPLE = str(Path(__file__).parents[2] / "sample_data" / "tiny-lfm2")


@pytest.fixture
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SUSTAINED_S", 0.0)
    monkeypatch.setattr(roofline, "_COPY_BYTES", 1 << 20)


def test_flop_of_the_published_350m_shape_are_those_of_its_description() -> None:
    stats = EngineStats(num_steps=1, num_prefill_tokens=10, num_output_tokens=1)
    work = roofline.count(stats, dummy_config("dummy:LFM2-350M"), itemsize=2)
    assert work.flops == pytest.approx(2 * 287.4e6 * 10 + 2 * 67.1e6, rel=1e-3)
    assert work.num_bytes == pytest.approx(2 * (287.4e6 + 67.1e6), rel=1e-3)


def test_attended_positions_and_read_kv_are_counted_from_the_steps() -> None:
    config = dummy_config("dummy:LFM2-350M")
    stats = EngineStats(num_attended=1000, num_kv_read=1000)
    work = roofline.count(stats, config, itemsize=2)
    assert work.flops == 4 * 16 * 64 * 6 * 1000
    assert work.num_bytes == 12 * 1024 * 1000  # 12 KiB a token


def test_the_floor_is_set_by_the_scarcer_resource() -> None:
    ceilings = Ceilings(flops_per_s=100.0, memory_bytes_per_s=10.0)
    assert Work(1000.0, 10.0).floor_s(ceilings) == 10.0
    assert Work(10.0, 1000.0).floor_s(ceilings) == 100.0


def test_the_same_shape_makes_the_same_requests_with_lengths_in_range() -> None:
    shape = Shape(20, LengthRange(3, 9), LengthRange(5, 5), shared_prefix=4)
    requests = shape.requests(100)
    assert requests == shape.requests(100)
    assert {r.prompt_token_ids[:4] for r in requests} == {requests[0].prompt_token_ids[:4]}
    assert all(7 <= len(r.prompt_token_ids) <= 13 and r.params.max_tokens == 5 for r in requests)
    assert all(8 <= token < 100 for r in requests for token in r.prompt_token_ids)


def test_every_preset_is_offered_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    call(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS)


@pytest.mark.parametrize("text", ["", "0", "9:3", "a", "-1:4", "1:2:3"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--input-len"):
        LengthRange.parse(text, "--input-len")


def test_a_workload_line_without_tokens_is_named(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n{"prompt": "no ids"}\n')
    with pytest.raises(UsageError, match="line 2"):
        from_file(path, ignore_eos=True)


@pytest.mark.usefixtures("_quick_ceilings")
def test_bench_prints_one_object_with_figures_and_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--num-requests", "3", "--input-len", "5:9", "--output-len", "4"]
    code = call(["bench", "--model", SAMPLE, "--dtype", "float32", *lengths, "--repeats", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == ExitCode.OK
    assert found["num_requests_tokens"]["output"] == 12
    assert len(found["runs"]) == 2
    assert {"wall_s", "output_tokens_per_s", "total_tokens_per_s", "roofline_share"} <= found.keys()
    assert found["roofline_flops_per_s"] > 0
    assert found["memory_bytes_per_s"] > 0
    assert sum(found["split_s"].values()) == pytest.approx(found["wall_s"], rel=0.5)


@pytest.mark.usefixtures("_quick_ceilings")
def test_bench_text_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--num-requests", "2", "--input-len", "5", "--output-len", "2"]
    call(["bench", "--model", SAMPLE, *lengths, "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert any("share of it" in line for line in lines)
    assert all(len(line) <= 80 + len(SAMPLE) for line in lines)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--preset", "single", "--num-requests", "3", "--input-len", "1", "--output-len", "1"],
        ["--num-requests", "3"],
        ["--workload", "no/such/file.jsonl"],
    ],
)
def test_bench_refuses_what_names_no_workload(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "--model", SAMPLE, *flags]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("batchgen: error: ")
