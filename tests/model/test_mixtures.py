"""Mixtures of experts against transformers: who is chosen, in which type, and from which tensors experts are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import raw_config, reference_model, saved_by_transformers
from safetensors.torch import load_file, save_file
from tiny_model import BACK_ENDS, CPU, prefix_logits
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.interface import Kernels
from batchgen.model.decoder import Decoder
from batchgen.model.layers import ExpertFeedForward
from batchgen.model.registry import read_config
from batchgen.model.weights import Checkpoint

FAMILIES = ("lfm2_moe", "qwen3_moe")
TOKENS = [5, 9, 100, 3, 77, 12, 64]


def loaded(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> Decoder:
    return Decoder(read_config(folder), Checkpoint(folder, dtype, CPU), kernels or CpuKernels(dtype))


def rewritten(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def chosen_by(model: Decoder, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    feed = model.layers[layer].feed_forward
    assert isinstance(feed, ExpertFeedForward)
    return feed.route(x)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_routing_of_ten_thousand_tokens_equals_that_of_transformers(family: str, back_end: str, tmp_path: Path) -> None:
    raw = raw_config(family, num_experts=32, num_experts_per_tok=4, num_hidden_layers=2)
    if family == "lfm2_moe":
        raw["layer_types"] = ["conv", "full_attention"]
    reference = saved_by_transformers(raw, tmp_path)
    model, layer = loaded(tmp_path, kernels=BACK_ENDS[back_end]()), reference.model.layers[1]
    x = torch.randn(10_000, 64, generator=torch.Generator().manual_seed(0))
    weight = (layer.feed_forward if family == "lfm2_moe" else layer.mlp).gate.weight
    low = torch.linalg.lstsq(
        weight, torch.full((32, 1), -14.0)
    ).solution.T  # scores as small as what their sum is given
    x = torch.cat((x, low))
    if family == "lfm2_moe":
        bias = layer.feed_forward.expert_bias
        logits, weights, ids = layer.feed_forward.gate(x, bias)
        ranks = logits.sigmoid() + bias
    else:
        logits, weights, ids = layer.mlp.gate(x)
        ranks = logits.softmax(-1)
    ranked = ranks.sort(descending=True).values
    is_clear = ranked[:, 3] - ranked[:, 4] > 1e-6  # no rounding could swap these
    assert is_clear.float().mean() > 0.999
    order = ids.sort(-1)
    found_ids, found = chosen_by(model, 1, x)
    assert torch.equal(found_ids[is_clear], order.values[is_clear].int())
    torch.testing.assert_close(found[is_clear], weights.gather(1, order.indices)[is_clear], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routers_and_their_bias_keep_the_numbers_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    """The second expert leads by less than bfloat16 could tell, by its bias or by its weight."""
    saved_by_transformers(raw_config("lfm2_moe", num_experts_per_tok=1), tmp_path)
    gate, bias = (f"model.layers.{{}}.feed_forward.{part}" for part in ("gate.weight", "expert_bias"))

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in (1, 2):
            tensors[gate.format(layer)].zero_()
            tensors[bias.format(layer)] = torch.full((6,), 1.0)
        tensors[bias.format(1)][1] += 2**-10
        tensors[gate.format(2)][:] = 1.0
        tensors[gate.format(2)][1] += 2**-10
        assert torch.equal(tensors[bias.format(1)].bfloat16(), torch.ones(6).bfloat16())

    rewritten(tmp_path, change)
    model, x = loaded(tmp_path, dtype), torch.full((3, 64), 2**-6, dtype=dtype)
    for layer in (1, 2):
        assert chosen_by(model, layer, x)[0].tolist() == [[1]] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_one_tensor_load_to_the_bits_of_experts_by_themselves(family: str, tmp_path: Path) -> None:
    reference = saved_by_transformers(raw_config(family), tmp_path)
    split = prefix_logits(loaded(tmp_path), TOKENS)
    assert any(".experts.5." in name for name in load_file(tmp_path / "model.safetensors"))
    fused = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    if not read_config(tmp_path).tie_embedding:
        fused["lm_head.weight"] = reference.lm_head.weight.data
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file({name: tensor.contiguous() for name, tensor in fused.items()}, tmp_path / "model.safetensors")
    assert torch.equal(prefix_logits(loaded(tmp_path), TOKENS), split)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_misshapen_and_left_over_tensors_of_experts_are_named(family: str, tmp_path: Path) -> None:
    saved_by_transformers(raw_config(family), tmp_path)
    names = read_config(tmp_path).tensor_names
    last = names["expert_down"].format(layer=1, expert=5) + ".weight"
    (tmp_path / "config.json").write_text(json.dumps(raw_config(family, num_experts=5)))
    with pytest.raises(ModelError, match=r"tensor '.*gate.weight' has shape \[6, 64\]"):
        loaded(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw_config(family)))
    rewritten(tmp_path, lambda tensors: tensors.update({last.replace(".5.", ".6."): tensors[last].clone()}))
    with pytest.raises(ModelError, match=r"unknown tensor '.*experts\.6\."):
        loaded(tmp_path)
    rewritten(tmp_path, lambda tensors: (tensors.pop(last), tensors.pop(last.replace(".5.", ".6."))))
    with pytest.raises(ModelError, match=r"lack tensor '.*experts\.5\..*', which config.json asks for"):
        loaded(tmp_path)


def test_the_reference_of_these_tests_has_a_bias_that_matters() -> None:
    biases = [value for name, value in reference_model(raw_config("lfm2_moe")).named_buffers() if "expert_bias" in name]
    assert len(biases) == 3
    assert all(bias.std() > 0.05 for bias in biases)
