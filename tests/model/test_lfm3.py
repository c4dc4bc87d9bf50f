"""What LFM3 alone has: each part makes a difference that the comparison with transformers would notice.

``test_families`` holds the family to transformers' model; here parts of ours are changed one at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import raw_config, saved_by_transformers
from tiny_model import CPU, prefix_logits
from torch import Tensor

from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.interface import Heads
from batchgen.model.config import LayerShape, ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.registry import dummy_config, parse_config, read_config
from batchgen.model.rope import frequencies
from batchgen.model.weights import Checkpoint

TOLERANCE = 2e-5  # of the comparison with transformers
PROMPT = torch.randint(8, 128, (50,), generator=torch.Generator().manual_seed(0)).tolist()


def gap(expected: Tensor, folder: Path, config: ModelConfig | None = None) -> float:
    """The largest difference from what the folder's model computes, over the largest logit."""
    model = Decoder(config or read_config(folder), Checkpoint(folder, torch.float32, CPU), CpuKernels())
    return float((prefix_logits(model, PROMPT) - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Path]:
    """Logits of transformers' model and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("lfm3")
    model = saved_by_transformers(raw_config("lfm3"), folder)
    with torch.no_grad():
        return model(torch.tensor([PROMPT]), use_cache=False).logits[0], folder


def in_attention(change: Callable[[LayerShape, LayerShape], LayerShape]) -> Callable[[ModelConfig], ModelConfig]:
    """A change of each layer with attention, given one of the other kind too."""

    def changed(config: ModelConfig) -> ModelConfig:
        attention = [layer for layer in config.layers if layer.rope]
        other = {bool(layer.window): layer for layer in attention}
        layers = [change(layer, other[not layer.window]) if layer.rope else layer for layer in config.layers]
        return replace(config, layers=tuple(layers))

    return changed


WRONG = {
    "no window": in_attention(lambda layer, _: replace(layer, window=0)),
    "a window too wide by one": in_attention(lambda layer, _: replace(layer, window=layer.window and layer.window + 1)),
    "all pairs rotated": in_attention(lambda layer, _: replace(layer, rope=replace(layer.rope, rotated_share=1.0))),
    "the other layers' base": in_attention(
        lambda layer, other: replace(layer, rope=replace(layer.rope, theta=other.rope.theta))
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_window_or_rotation_is_noticed(name: str, saved: tuple[Tensor, Path]) -> None:
    expected, folder = saved
    assert gap(expected, folder) <= TOLERANCE
    assert gap(expected, folder, WRONG[name](read_config(folder))) > 10 * TOLERANCE


def test_gates_that_are_left_out_are_noticed(saved: tuple[Tensor, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CpuKernels.attend

    def ungated(kernels: CpuKernels, qkv: Tensor, heads: Heads, *rest: Any, **named: Any) -> Tensor:
        return attend(kernels, qkv, replace(heads, is_gated=False), *rest, **named)

    monkeypatch.setattr(CpuKernels, "attend", ungated)
    assert gap(*saved) > 10 * TOLERANCE


def test_norms_behind_a_layer_left_out_are_noticed(saved: tuple[Tensor, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    add_and_norm = CpuKernels.add_and_norm
    monkeypatch.setattr(CpuKernels, "add_and_norm", lambda *inputs: add_and_norm(*inputs[:-1], None))
    assert gap(*saved) > 10 * TOLERANCE


def test_the_half_rotation_that_the_released_config_calls_default_is_the_proportional_one(
    saved: tuple[Tensor, Path], tmp_path: Path
) -> None:
    expected, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_parameters"]["full_attention"]["rope_type"] = "default"
    for name in ("use_attention_gate", "use_sandwich_norm"):  # which it leaves out
        del raw[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == read_config(folder)
    assert gap(expected, tmp_path) <= TOLERANCE
    del raw["rope_parameters"]
    assert parse_config(raw, "config.json") == read_config(folder), "both libraries take these for the default"


def test_rotary_frequencies_have_the_bits_of_transformers() -> None:
    from transformers import AutoConfig
    from transformers.models.lfm3.modeling_lfm3 import Lfm3RotaryEmbedding

    config = dummy_config("dummy:LFM3-1.7B")
    full, sliding = config.layers[2].rope, config.layers[4].rope
    assert full
    assert sliding
    expected = Lfm3RotaryEmbedding(AutoConfig.for_model("lfm3"))
    assert torch.equal(frequencies(sliding, 128), expected.sliding_attention_inv_freq)
    assert torch.equal(frequencies(full, 128), expected.full_attention_inv_freq)
    assert expected.full_attention_inv_freq.count_nonzero() == 32


def test_the_published_shape_has_its_layers() -> None:
    config = dummy_config("dummy:LFM3-1.7B")
    windows = {i: layer.window for i, layer in enumerate(config.layers) if layer.rope}
    assert windows == dict.fromkeys((2, 6, 10, 14, 18, 22), 0) | dict.fromkeys((4, 8, 12, 16, 20), 256)
    assert config.num_conv_layers == 13
    assert config.kv_position_bytes(2) == 22_528
