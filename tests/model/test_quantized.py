"""Quantized checkpoints: what is read means what its format says, and everything else is refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import FLOAT8, INT4, KINDS, compressed, set_quantization, write_quantized
from safetensors.torch import load_file, save_file
from tiny_model import CPU, DTYPES, prefix_logits, write_checkpoint
from torch import Tensor

from batchgen.core.errors import ExitCode, ModelError
from batchgen.kernels.reference import ReferenceKernels
from batchgen.model.config_values import ConfigValues
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model
from batchgen.model.quantized.checkpoint import QuantizedCheckpoint
from batchgen.model.quantized.settings import parse_quantization
from batchgen.model.registry import read_config

PROMPT = [9, 30, 77, 12, 5]
MODULE = "model.layers.0.feed_forward.w1"  # [64, 64]


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_model(str(folder), dtype=dtype, device="cpu", kernels=ReferenceKernels())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_has_the_logits_of_the_values_it_stands_for(tmp_path: Path, kind: str, dtype: str) -> None:
    write_quantized(tmp_path, kind)
    found, expected = load(tmp_path, dtype), load(tmp_path / "plain", dtype)
    assert found.dtype == DTYPES[dtype]
    assert torch.equal(prefix_logits(found, PROMPT), prefix_logits(expected, PROMPT))


@pytest.mark.parametrize("kind", ["packed int4", "fp8", "gptq", "awq"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "lfm2_moe", "qwen3_moe"])
def test_quantized_models_of_other_families_are_read_alike(tmp_path: Path, family: str, kind: str) -> None:
    write_quantized(tmp_path, kind, model_type=family, num_experts=8, moe_intermediate_size=64)
    assert torch.equal(prefix_logits(load(tmp_path), PROMPT), prefix_logits(load(tmp_path / "plain"), PROMPT))


def refusal(folder: Path, dtype: str = "float32") -> str:
    """The one line with which loading the folder fails."""
    with pytest.raises(ModelError) as caught:
        load(folder, dtype)
    message = str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in message and len(message) < 500
    assert message.startswith(str(folder))
    return message


def test_modules_that_were_left_out_are_taken_as_they_are(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "int8")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    del stored[f"{MODULE}.weight_scale"]
    save_file(stored | {f"{MODULE}.weight": plain[f"{MODULE}.weight"]}, tmp_path / "model.safetensors")
    assert torch.equal(prefix_logits(load(tmp_path), PROMPT), prefix_logits(load(tmp_path / "plain"), PROMPT))


@pytest.mark.parametrize("kind", ["int8", "packed int4", "fp8", "gptq", "awq"])
def test_a_quantized_head_is_used_under_a_config_that_says_tied(tmp_path: Path, kind: str) -> None:
    stored = write_quantized(tmp_path, kind, tie_embedding=False)
    for folder in (tmp_path, tmp_path / "plain"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_embedding": True}))
    assert torch.equal(prefix_logits(load(tmp_path), PROMPT), prefix_logits(load(tmp_path / "plain"), PROMPT))
    save_file(stored | {"lm_head.bias": torch.ones(128)}, tmp_path / "model.safetensors")
    assert "unknown tensor 'lm_head.bias'" in refusal(tmp_path)


def test_scales_of_activations_are_not_needed(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "int8")
    more = {f"{MODULE}.input_scale": torch.ones(1), "model.layers.1.self_attn.k_scale": torch.ones(1)}
    save_file(stored | more, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(stored | {"model.layers.0.other.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "unknown tensor 'model.layers.0.other.weight_scale'" in refusal(tmp_path)


def test_groups_of_several_kinds_are_read_together(tmp_path: Path) -> None:
    stored, other = write_quantized(tmp_path, "packed int8"), write_quantized(tmp_path / "other", "packed int4")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name, part in other.items():
        if name.startswith(f"{MODULE}."):
            stored[name] = part
    name = f"{MODULE}.weight"
    plain[name] = load_file(tmp_path / "other" / "plain" / "model.safetensors")[name]
    save_file(stored, tmp_path / "model.safetensors")
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    groups = [{"num_bits": 8, "strategy": "channel"}, INT4]
    set_quantization(
        tmp_path, compressed("mixed-precision", *groups, config_groups=groups_of("pack-quantized", groups))
    )
    assert torch.equal(prefix_logits(load(tmp_path), PROMPT), prefix_logits(load(tmp_path / "plain"), PROMPT))


def groups_of(file_format: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"group_{n}": {"format": file_format, "weights": weights} for n, weights in enumerate(groups)}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
REFUSED: list[tuple[Any, str]] = [
    ({"group_size": 64, "bits": 4}, "quantization_config by MLX is not supported"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by 'bitsandbytes' is not supported"),
    ({"quant_method": "mxfp4"}, "by 'mxfp4' is not supported"),
    ({"quant_method": ["gptq"]}, "by ['gptq'] is not supported"),
    ({}, "by None is not supported"),
    ([], "quantization_config must be an object"),
    ("int8", "quantization_config must be an object"),
    (compressed("marlin-24", INT4), "format 'marlin-24' is not supported"),
    (compressed("nvfp4-pack-quantized", INT4), "format 'nvfp4-pack-quantized' is not supported"),
    (compressed("mixed-precision", INT4), "format 'mixed-precision' is not supported"),
    (compressed("pack-quantized", INT4, transform_config={"config_groups": {}}), "transform_config is not supported"),
    (compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not"),
    (compressed("pack-quantized", INT4, config_groups=[]), "config_groups must be an object"),
    (compressed("pack-quantized", INT4, config_groups={"group_0": 7}), "group_0 must be an object"),
    (compressed("pack-quantized", INT4, config_groups={"group_0": {"weights": []}}), "weights must be an object"),
    (compressed("pack-quantized", INT4 | {"num_bits": 3}), "num_bits 3 is not supported"),
    (compressed("pack-quantized", INT4 | {"num_bits": "4"}), "num_bits must be a positive integer"),
    *((compressed("pack-quantized", INT4 | {"group_size": n}), "group_size must be") for n in (0, -2, "16", 1.5, True)),
    (compressed("pack-quantized", INT4 | {"group_size": 2**40}), "group_size must be at most"),
    (compressed("pack-quantized", INT4 | {"group_size": 48}), "no whole number of groups of [48]"),
    (compressed("naive-quantized", FLOAT8, FLOAT8 | {"block_structure": [2, 2]}), "blocks beside other groups"),
    (compressed("naive-quantized", FLOAT8 | {"block_structure": [128]}), "block_structure must be two positive"),
    (compressed("naive-quantized", FLOAT8 | {"block_structure": "128x128"}), "block_structure must be two positive"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be two positive integers"),
    ({"quant_method": "fp8", "weight_block_size": [2**60, 2**60]}, "weight_block_size must be two positive"),
    (GPTQ | {"bits": 3}, "bits 3 is not supported"),
    (GPTQ | {"bits": None}, "has no 'bits'"),
    (GPTQ | {"group_size": None}, "has no 'group_size'"),
    (GPTQ | {"group_size": 0}, "group_size must be a positive integer"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    (GPTQ | {"checkpoint_format": 4}, "checkpoint_format must be a string"),
    (GPTQ | {"is_marlin_format": True}, "is not supported"),
    (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic is not supported"),
    (AWQ | {"version": "gemv"}, "version 'gemv' is not supported"),
    (AWQ | {"bits": 8}, "bits 8 is not supported"),
]


def test_settings_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    write_quantized(tmp_path, "packed int4")
    for settings, words in REFUSED:
        set_quantization(tmp_path, settings)
        assert words in refusal(tmp_path), settings


def test_mlx_is_refused_by_the_key_that_it_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    set_quantization(tmp_path, {"group_size": 64, "bits": 4}, "quantization")
    assert "config.json: quantization by MLX is not supported" in refusal(tmp_path)
    assert "use the bfloat16 release" in refusal(tmp_path)


Change = Callable[[Tensor], Tensor]
DAMAGED: list[tuple[str, str, Change | None, str]] = [
    ("int8", "weight_scale", None, "quantized weights need their scales"),
    ("int8", "weight_scale", lambda t: t[:-1], "weight_scale' has shape [63, 1]; config.json asks for [64, 1] or [64]"),
    ("int8", "weight_scale", lambda t: t.expand(64, 4), "has shape [64, 4]"),
    ("int8", "weight_scale", lambda t: t * math.nan, "has values that float32 cannot hold"),
    ("int8", "weight_scale", lambda t: t * math.inf, "has values that float32 cannot hold"),
    ("int8", "weight_scale", lambda t: t.int(), "weight_scale' is torch.int32, not"),
    ("int8", "weight", lambda t: t.float(), "weight' is torch.float32, not torch.int8 or"),
    ("int8", "weight", lambda t: t[:, :-1], "weight' has shape [64, 63]"),
    ("int8", "weight", None, "lack tensor 'model.layers.0.feed_forward.w1.weight'"),
    ("int8 with zero points", "weight_zero_point", lambda t: t[:, :1], "weight_zero_point' has shape [64, 1]"),
    (
        "packed int4",
        "weight_packed",
        lambda t: t[:, :-1],
        "weight_packed' has shape [64, 7]; config.json asks for [64, 8]",
    ),
    ("packed int4", "weight_packed", lambda t: t.float(), "weight_packed' is torch.float32, not torch.int32"),
    ("packed int4", "weight_packed", lambda t: t.flatten(), "weight_packed' has shape [512]"),
    ("packed int4", "weight_shape", lambda t: t * 2**40, "weight_shape' is not [64, 64]"),
    ("packed int4", "weight_shape", lambda t: t[:1], "weight_shape' has shape [1]"),
    ("packed int4", "weight_scale", None, "lack tensor 'model.layers.0.feed_forward.w1.weight_scale'"),
    ("packed int4", "weight_scale", lambda t: t[:, :2], "weight_scale' has shape [64, 2]"),
    ("packed int4 with zero points", "weight_zero_point", lambda t: t[:-1], "weight_zero_point' has shape [7, 4]"),
    ("packed int4 out of order", "weight_g_idx", lambda t: t + 1, "names groups beyond the 4"),
    ("packed int4 out of order", "weight_g_idx", lambda t: -t, "names groups beyond the 4"),
    ("packed int4 out of order", "weight_g_idx", lambda t: t[1:], "weight_g_idx' has shape [63]"),
    ("packed int4 out of order", "weight_g_idx", lambda t: t.float(), "weight_g_idx' is torch.float32"),
    ("float8 of blocks", "weight_scale", lambda t: t[:1], "weight_scale' has shape [1, 2]"),
    ("fp8", "weight_scale_inv", None, "quantized weights need their scales"),
    ("gptq", "scales", None, "lack tensor 'model.layers.0.feed_forward.w1.scales'"),
    ("gptq", "qzeros", lambda t: t[:, :-1], "qzeros' has shape [4, 7]"),
    ("gptq", "qweight", lambda t: t.T.contiguous(), "qweight' has shape [64, 8]; config.json asks for [8, 64]"),
    ("gptq", "g_idx", lambda t: t + 7, "names groups beyond the 4"),
    ("awq", "qweight", lambda t: t.T.contiguous(), "qweight' has shape [8, 64]; config.json asks for [64, 8]"),
    ("awq", "scales", lambda t: t * math.inf, "has values that float32 cannot hold"),
]


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in DAMAGED))
def test_parts_that_do_not_fit_are_named(tmp_path: Path, kind: str) -> None:
    whole = write_quantized(tmp_path, kind)
    for _, part, change, words in (row for row in DAMAGED if row[0] == kind):
        stored = dict(whole)
        damaged = stored.pop(f"{MODULE}.{part}")
        if change:
            stored[f"{MODULE}.{part}"] = change(damaged).contiguous()
        save_file(stored, tmp_path / "model.safetensors")
        assert words in refusal(tmp_path), part


def test_scales_beyond_the_dtype_are_refused_where_they_overflow(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "int8")
    name = f"{MODULE}.weight_scale"
    save_file(stored | {name: stored[name].float() * 1e6}, tmp_path / "model.safetensors")
    load(tmp_path)
    assert "has values that float16 cannot hold" in refusal(tmp_path, "float16")


def test_what_is_no_matrix_is_not_quantized(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "int8")
    save_file(stored | {"model.embedding_norm.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "quantizes what is no matrix" in refusal(tmp_path)


def test_zero_points_of_other_groups_than_their_scales_are_refused(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "int8 with zero points")
    groups = [{"num_bits": 8, "group_size": 16}, {"num_bits": 8, "strategy": "channel"}]
    set_quantization(tmp_path, compressed("naive-quantized", *groups))
    load(tmp_path)
    name = f"{MODULE}.weight_zero_point"
    save_file(stored | {name: stored[name][:, :1].contiguous()}, tmp_path / "model.safetensors")
    assert "weight_zero_point' has shape [64, 1], its scales [64, 4]" in refusal(tmp_path)


def test_matrices_that_do_not_fill_their_words_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    set_quantization(tmp_path, GPTQ | {"group_size": 48})
    assert "no whole number of groups" in refusal(tmp_path)


def test_the_parts_of_another_method_are_not_read(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    set_quantization(tmp_path, compressed("pack-quantized", INT4))
    assert "lack tensor" in refusal(tmp_path)


def test_a_config_names_how_its_checkpoint_is_quantized(tmp_path: Path) -> None:
    write_quantized(tmp_path, "int8")
    found = read_config(tmp_path).quantization
    assert found is not None
    assert (found.method, found.has_activations) == ("compressed-tensors", True)
    assert read_config(tmp_path / "plain").quantization is None


# ---------------------------------------------------------------- compressed-tensors


INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
BY_GROUP: dict[str, Any] = {"strategy": "group", "group_size": 32}
ASYMMETRIC: dict[str, Any] = {"symmetric": False}
COMPRESSED = [
    ("int-quantized", INT8 | {"strategy": "channel"}),
    ("int-quantized", INT8 | {"strategy": "tensor"}),
    ("int-quantized", INT8 | BY_GROUP | ASYMMETRIC),
    ("naive-quantized", INT8 | {"strategy": "channel"} | ASYMMETRIC),
    ("pack-quantized", INT8 | {"strategy": "channel"}),
    ("pack-quantized", INT8 | BY_GROUP | ASYMMETRIC),
    ("pack-quantized", INT8 | {"num_bits": 4} | BY_GROUP),
    ("pack-quantized", INT8 | {"num_bits": 4, "strategy": "channel"} | ASYMMETRIC),
    ("pack-quantized", INT8 | {"num_bits": 4} | BY_GROUP | ASYMMETRIC),
    ("float-quantized", FP8 | {"strategy": "tensor"}),
    ("float-quantized", FP8 | {"strategy": "channel"}),
    ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 48]}),
]


def scale_shape(weights: dict[str, Any], out: int, width: int) -> tuple[int, ...]:
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        return -(-out // rows), -(-width // columns)
    per_output = {"channel": (out, 1), "group": (out, width // 32), "tensor": (1,)}
    return per_output[weights["strategy"]]


# The library imports half of transformers: a test does, not the collection.
@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize(("file_format", "weights"), COMPRESSED, ids=str)
@pytest.mark.parametrize(("out", "width"), [(64, 96), (21, 160), (330, 160)])
def test_what_the_library_compresses_is_read_as_it_decompresses_it(
    tmp_path: Path, file_format: str, weights: dict[str, Any], out: int, width: int
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(out)
    shape = scale_shape(weights, out, width)
    state = {"weight": torch.randn(out, width), "weight_scale": torch.rand(shape) * 0.02 + 0.01}
    if not weights.get("symmetric", True):
        half = 1 << (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(file_format)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {"quantization_config": compressed(file_format, scheme.weights.model_dump(mode="json"))}
    settings = parse_quantization(ConfigValues(config, "here"))
    assert settings is not None
    save_file({f"layer.{name}": part.contiguous() for name, part in stored.items()}, tmp_path / "model.safetensors")
    source = QuantizedCheckpoint(tmp_path, torch.float32, CPU, settings)
    assert torch.equal(source.take("layer.weight", (out, width)), expected)
    source.finish()
