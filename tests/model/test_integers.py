"""Models whose linears keep integers: which model they are, what they refuse, and how much memory they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import raw_config
from reference_kernels import ReferenceKernels
from safetensors.torch import save_file
from tiny_model import CPU, DTYPES, prefix_logits, tiny_model, write_checkpoint

from batchgen.core.errors import ModelError
from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.kernels.cpu.linear import PackedLinear
from batchgen.kernels.interface import TableEmbedding
from batchgen.kernels.quantize import quantize_weight
from batchgen.kernels.select import select
from batchgen.model import load as loading
from batchgen.model.load import load_model
from batchgen.model.rates import weight_bytes
from batchgen.model.registry import dummy_config, load_config

PROMPT = [1, 9, 10, 11, 12, 40, 41]
SHAPE = {"tie_embedding": False, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}
FORMS: dict[str, dict[str, str]] = {
    "none": {},
    "w8a16": {"weights": "int8"},
    "w8a8": {"weights": "int8", "activations": "int8"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_reference", [True, False])
def test_int8_weights_make_the_plain_model_of_those_numbers(tmp_path: Path, dtype: str, is_reference: bool) -> None:
    """Linears and output projection; the embedding table, norms and convolutions stay as they are."""
    tensors = write_checkpoint(tmp_path / "original", **SHAPE)
    rounded = {
        name: tensor
        if tensor.dim() != 2 or "embed_tokens" in name
        else quantize_weight(tensor).dequantize(torch.float32)
        for name, tensor in tensors.items()
    }
    assert sum(not torch.equal(rounded[name], tensor) for name, tensor in tensors.items()) == 2 * 5 + 2 * 7 + 1
    (tmp_path / "rounded").mkdir()
    (tmp_path / "rounded" / "config.json").write_text(json.dumps(raw_config(**SHAPE)))
    save_file(rounded, tmp_path / "rounded" / "model.safetensors")

    def logits(folder: str, quantization: str = "none") -> torch.Tensor:
        kernels = ReferenceKernels(**FORMS[quantization]) if is_reference else None
        path = str(tmp_path / folder)
        model = load_model(path, dtype=dtype, device="cpu", kernels=kernels, quantization=quantization)
        return prefix_logits(model, PROMPT)

    if dtype == "float32":  # in bfloat16 a checkpoint is rounded before its weights are
        assert torch.equal(logits("original", "w8a16"), logits("rounded"))
    assert not torch.equal(logits("original", "w8a16"), logits("original"))
    assert not torch.equal(logits("original", "w8a8"), logits("original", "w8a16"))


def test_numerics_name_integers_only_where_there_are_some(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)

    def named(quantization: str) -> dict[str, str]:
        numerics = load_model(str(tmp_path), device="cpu", quantization=quantization).numerics
        return {key: value for key, value in numerics.items() if key not in ("dtype", "device", "kernels")}

    assert {quantization: named(quantization) for quantization in FORMS} == FORMS


def test_a_quantization_that_there_is_not_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="quantization 'int4' is not one of none, w8a16, w8a8"):
        load_model(str(tmp_path), device="cpu", quantization="int4")


def test_a_gpu_refuses_integer_activations_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loading, "Decoder", None)
    with pytest.raises(ModelError, match=r"quantization 'w8a8' on device 'cuda'.*use 'w8a16', or --device cpu"):
        load_model(str(tmp_path), device="cuda", quantization="w8a8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_bytes_of_a_model_and_of_a_weight_are_those_of_its_panels_and_each_form_of_its_table(
    dtype: str, settings: dict[str, str], is_tied: bool
) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 16, "block_ff_dim": 384, "tie_embedding": is_tied}
    model = tiny_model(DTYPES[dtype], select(CPU, DTYPES[dtype], **settings), **shape, torch_dtype=dtype)
    linears = [linear for layer in model.layers for linear, _ in layer.linears] + [model.lm_head]
    if not all(isinstance(linear, PackedLinear) for linear in linears):
        pytest.skip("a library computes the products of this machine")
    table = model.embedding.table.nbytes if isinstance(model.embedding, TableEmbedding) else 0
    panels, kernels, config = sum(linear.packed.strips.nbytes for linear in linears), model.kernels, model.config
    assert config.model_bytes(dtype, kernels.weights, kernels.activations, is_cpu=True) == panels + table
    assert (config.linear_params_per_token + config.logits_params_per_token) * weight_bytes(model) == panels


def test_memory_is_that_of_the_form_in_which_weights_are_kept() -> None:
    config = dummy_config("dummy:LFM2-350M")
    params = config.linear_params_per_token + config.logits_params_per_token
    table = 2 * config.vocab_size * config.hidden_size  # in bfloat16, beside the head in another form
    assert config.model_bytes("bfloat16", is_cpu=True) == 2 * params
    assert config.model_bytes("bfloat16", "int8", is_cpu=True) == round(1.0625 * params) + table
    assert config.model_bytes("float32", "int8", "int8", is_cpu=True) == round(1.03125 * params) + table
    assert config.model_bytes("float32", is_cpu=True) == 2 * params  # the checkpoint's bfloat16 numbers
    assert config.model_bytes("float32", "int8", is_cpu=False) == 4 * params  # dequantized


def test_a_model_too_large_for_this_machine_fits_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("dummy:LFM2-350M")
    monkeypatch.setattr(loading, "physical_bytes", lambda: config.model_bytes("float32", is_cpu=True) - 1)
    monkeypatch.setattr(loading, "Decoder", lambda config, source, kernels: kernels.weights)
    with pytest.raises(ModelError, match=r"the weights take 70\d,\d{3},\d{3} bytes in float32, more than"):
        load_model("dummy:LFM2-350M", dtype="float32", device="cpu")
    assert load_model("dummy:LFM2-350M", dtype="float32", device="cpu", quantization="w8a16") == "int8"
    monkeypatch.setattr(loading, "physical_bytes", lambda: 1 << 20)
    with pytest.raises(ModelError, match=r"bytes in int8 under float32"):
        load_model("dummy:LFM2-350M", dtype="float32", device="cpu", quantization="w8a16")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_not_finite_is_told_by_every_row(
    tmp_path: Path, dtype: str, quantization: str, value: float
) -> None:
    """As integers it must not become a number that looks like any other."""
    tensors = write_checkpoint(tmp_path)
    tensors["model.layers.0.conv.in_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(str(tmp_path), dtype=dtype, device="cpu", quantization=quantization)
    (result,) = Engine(model, EngineConfig(kv_cache_memory=1 << 20)).run([Request(0, tuple(PROMPT), SamplingParams())])
    assert result.error is not None
    assert "not finite" in result.error.message
