"""The script that times kernels: what it counts and prints. No test asserts a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import time_kernels
import torch
from tiny_model import ragged_input, random_state, tiny_model, write_checkpoint

from batchgen.kernels.interface import Heads
from batchgen.model import rates
from batchgen.model.rates import MeasureConfig

pytestmark = pytest.mark.usefixtures("threads_as_before")
FEW = MeasureConfig((8,), repeats=1, sustained_s=0.0, buffer_bytes=1 << 20)


@pytest.mark.parametrize(("is_causal", "attended"), [(True, 6 + 820), (False, 9 + 1600)])
def test_attention_is_counted_by_what_its_tokens_see(is_causal: bool, attended: int) -> None:
    model = tiny_model()
    inputs, num_blocks = ragged_input([(0, 3), (0, 40)], 8, is_causal=is_causal)
    cache = random_state(model, num_blocks=num_blocks, block_size=8, num_slots=2).kv[0]
    kernels = time_kernels.TimedKernels(model.kernels)
    heads = Heads(4, 16, None, None, 1e-5)
    kernels.attention(torch.zeros(43, 4, cache.width), torch.zeros(43, 0), heads, inputs, cache)
    assert kernels.work["attention"][0] == 4 * 4 * 16 * attended


def test_each_kind_of_work_is_a_line_and_none_is_counted_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_kernels, "measure", lambda model: rates.measure(model, FEW))
    write_checkpoint(tmp_path / "model", model_type="lfm2_moe")
    flags = ["--num-requests", "2", "--input-len", "5", "--output-len", "2", "--dtype", "float32"]
    time_kernels.main(["--model", str(tmp_path / "model"), *flags])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    kinds = {line[0] for line in lines}
    assert kinds >= {"linear", "rms_norm", "attention", "short_conv", "router", "experts", "gated_linear", "host"}
    assert not any("_and_norm" in kind or "project" in kind for kind in kinds)
    assert all(float(line[1]) >= 0 for line in lines)
    assert [line[0] for line in lines if "roofline" not in line] == ["host"]
