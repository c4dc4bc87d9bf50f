"""LoRA adapters: the model is the one merged beforehand, to the bit and in every form; or the adapter is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from adapters import ALPHA, CONFIG, RANK, WEIGHTS, added, matrices, merged, settings_for, write_adapter
from gguf_files import write_gguf
from safetensors.torch import save_file
from tiny_model import CPU, prefix_logits, write_checkpoint
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.model.adapter.settings import read_lora
from batchgen.model.adapter.source import LoraTensors
from batchgen.model.config import ModelConfig
from batchgen.model.load import load_model
from batchgen.model.registry import read_config
from batchgen.model.weights import Checkpoint, RandomTensors

SCALE = ALPHA / RANK
PROMPT = [1, 9, 10, 11, 12, 40, 41]
SHAPE: dict[str, Any] = {"tie_embedding": False, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}
INT8 = {"quantization": "w8a16"}
FORMS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {},
    "float32 of int8": INT8,
    "bfloat16 of int8": INT8,
    "float32 by int8": {"quantization": "w8a8"},
}
Q = "model.layers.1.self_attn.q_proj"
W1 = "model.layers.0.feed_forward.w1"


def linears(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of all linears, the untied head's too, by module."""
    found = {name.removesuffix(".weight"): weight for name, weight in tensors.items() if weight.dim() == 2}
    return {module: weight for module, weight in found.items() if "embed" not in module}


def logits(model: Path, adapter: Path | None = None, form: str = "float32") -> Tensor:
    settings = {"dtype": form.partition(" ")[0], "adapter": str(adapter or ""), "device": "cpu", **FORMS[form]}
    return prefix_logits(load_model(str(model), **settings), PROMPT)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["of float32", "of bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_with_an_adapter_is_the_model_merged_beforehand(tmp_path: Path, form: str, stored: torch.dtype) -> None:
    tensors = {name: weight.to(stored) for name, weight in write_checkpoint(tmp_path / "base", **SHAPE).items()}
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    adapter = write_adapter(tmp_path / "lora", linears(tensors))
    write_checkpoint(tmp_path / "merged", **SHAPE)
    save_file(merged(tensors, adapter, SCALE), tmp_path / "merged" / "model.safetensors")
    found = logits(tmp_path / "base", tmp_path / "lora", form)
    assert torch.equal(found, logits(tmp_path / "merged", form=form))
    assert not torch.equal(found, logits(tmp_path / "base", form=form))


def test_an_adapter_of_a_head_that_is_a_copy_of_the_embedding_changes_the_head_alone(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "base")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    adapter = write_adapter(tmp_path / "lora", {"lm_head": tensors["lm_head.weight"]})
    write_checkpoint(tmp_path / "merged", tie_embedding=False)
    save_file(merged(tensors, adapter, SCALE), tmp_path / "merged" / "model.safetensors")
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "base", tmp_path / "lora"), logits(tmp_path / "merged"))


def source(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[LoraTensors, ModelConfig]:
    """The tensors of the model in ``base`` with the adapter in ``lora``."""
    config = read_config(folder / "base")
    return LoraTensors(Checkpoint(folder / "base", dtype, CPU), read_lora(folder / "lora"), config), config


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_to_the_bit_in_any_number_of_threads_and_rounded_once(
    tmp_path: Path, threads: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(threads)  # one again after each test
    tensors = write_checkpoint(tmp_path / "base", hidden_size=720, num_attention_heads=4, block_ff_dim=1000)
    weight = tensors[f"{W1}.weight"].bfloat16()
    save_file({**tensors, f"{W1}.weight": weight}, tmp_path / "base" / "model.safetensors")
    adapter = write_adapter(tmp_path / "lora", {W1: weight}, infix=".default", r=33)
    a, b = matrices(weight, 0, 33)
    save_file({name: (a if "_A" in name else b) for name in adapter}, tmp_path / "lora" / WEIGHTS)
    found, _ = source(tmp_path, dtype)
    tensor = found.take(f"{W1}.weight", tuple(weight.shape))
    assert weight.numel() > 1 << 15  # more than is added up at once
    assert tensor.dtype == dtype
    assert torch.equal(tensor, added(weight, a, b, ALPHA / 33).to(dtype))


def test_under_float32_all_weights_are_float32(tmp_path: Path) -> None:
    """A sum is no bfloat16 number, and the memory and speed of a model are those of one type of weights."""
    tensors = {name: weight.bfloat16() for name, weight in write_checkpoint(tmp_path / "base").items()}
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    write_adapter(tmp_path / "lora", {Q: tensors[f"{Q}.weight"]})
    found, config = source(tmp_path)
    assert {found.take(name, tuple(weight.shape)).dtype for name, weight in tensors.items()} == {torch.float32}
    assert (config.saved_dtype, read_lora(tmp_path / "lora").added_to(config).saved_dtype) == ("float32", "")


def test_adapters_are_stored_in_any_floating_point_type(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "base")
    weight = tensors[f"{Q}.weight"]
    for dtype in (torch.bfloat16, torch.float16):
        a, b = write_adapter(tmp_path / "lora", {Q: weight}, dtype).values()
        found, _ = source(tmp_path)
        assert torch.equal(found.take(f"{Q}.weight", tuple(weight.shape)), added(weight, a, b, SCALE))


def test_random_weights_are_added_to_as_well(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    plain = RandomTensors(torch.bfloat16, CPU, saved=torch.bfloat16)
    weight = plain.take(f"{Q}.weight", (64, 64))
    a, b = write_adapter(tmp_path / "lora", {Q: weight}).values()
    found = LoraTensors(plain, read_lora(tmp_path / "lora"), read_config(tmp_path / "base"))
    assert torch.equal(found.take(f"{Q}.weight", (64, 64)), added(weight, a, b, SCALE).bfloat16())
    assert torch.equal(found.take(f"{W1}.weight", (64, 64)), plain.take(f"{W1}.weight", (64, 64)))


# ---------------------------------------------------------------- refusals

MODULES = {Q: torch.empty(64, 64), W1: torch.empty(64, 64)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder)
    return folder


def refusal(model: Path, adapter: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(model), adapter=str(adapter), dtype="float32", device="cpu")
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 600
    return said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only a plain LoRA is added here: merge it by what"),
        ({"peft_type": None}, "has no 'peft_type'"),
        ({"peft_type": ["LORA"]}, "peft_type is ['LORA']"),
        ({"use_dora": True}, "use_dora is True; only a plain LoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; only a plain LoRA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True; only a plain LoRA"),
        ({"lora_bias": True}, "lora_bias is True; only a plain LoRA"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters is ['experts.w1']; only a plain LoRA"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is [5]; only a plain LoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]]; only a plain LoRA"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]; only a plain LoRA"),
        ({"use_qalora": True}, "use_qalora is True; only a plain LoRA"),
        ({"something_new": 3}, "something_new is 3; only a plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the weights of the model too; only"),
        ({"lora_alpha": -1}, "lora_alpha must be a positive number that float32 can hold, not -1"),
        ({"use_rslora": 1}, "use_rslora must be true or false, not 1"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern must map regular expressions to positive numbers, not {'(': 4}"),
        ({"alpha_pattern": {"w1": 0}}, "alpha_pattern must map regular expressions to positive numbers"),
        ({"alpha_pattern": ["w1"]}, "alpha_pattern must map regular expressions to positive numbers"),
    ],
)
def test_anything_but_a_plain_lora_is_refused(base: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_adapter(tmp_path, MODULES, **changes)
    assert said in refusal(base, tmp_path)


PREFIX = "base_model.model."
HUGE = {f"{Q}.lora_{part}.weight": torch.full(shape, 1e30) for part, shape in {"A": (4, 64), "B": (64, 4)}.items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{Q}.lora_B.weight": None}, f"tensor '{PREFIX}{Q}.lora_A.weight' has no partner; save it again"),
        ({f"{Q}.lora_A.weight": None}, f"tensor '{PREFIX}{Q}.lora_B.weight' has no partner"),
        ({f"{Q}.lora_A.default.weight": torch.zeros(4, 64)}, "lora_A.weight' is not a lora_A or lora_B of a linear"),
        ({f"{Q}.weight": torch.zeros(64, 64)}, "q_proj.weight' is not a lora_A or lora_B of a linear, embedding or"),
        ({"model.embed_tokens.weight": torch.zeros(3, 64)}, "has shape [3, 64], but rank and model make it ["),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector' is not a lora_A or lora_B of a"),
        ({"model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}, "lora_embedding_A' is not a lora_A or lora_B of a"),
        ({f"{Q}.lora_B.bias": torch.ones(64)}, "lora_B.bias' is not a lora_A or lora_B of a linear"),
        ({"x" * 600 + ".lora_A.weight": torch.ones(4, 64)}, "is not a lora_A or lora_B of a linear"),
        ({f"{Q}.lora_A.weight": torch.ones(64, 4)}, "has shape [64, 4], but rank and model make it [64, 64]"),
        ({f"{Q}.lora_A.weight": torch.ones(0, 64)}, "has shape [64, 4], but rank and model make it [64, 0]"),
        ({f"{Q}.lora_A.weight": torch.ones(64)}, "has shape [64], but rank and model make it [64, 64]"),
        ({f"{Q}.lora_B.weight": torch.ones(64)}, "has shape [64], but rank and model make it [64, 4]"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64).double()}, "is torch.float64; save it in float32, bfloat16 or"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64).char()}, "is torch.int8; save it in float32, bfloat16 or float16"),
        ({f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)}, f"gives {Q!r} values that float32 cannot hold"),
        ({f"{Q}.lora_B.weight": torch.full((64, 4), -torch.inf)}, f"gives {Q!r} values that float32 cannot hold"),
        (HUGE, f"gives {Q!r} values that float32 cannot hold; it is damaged: download it again"),
    ],
)
def test_damaged_matrices_are_refused(base: Path, tmp_path: Path, changes: dict[str, Tensor | None], said: str) -> None:
    tensors = write_adapter(tmp_path, MODULES) | {f"{PREFIX}{name}": tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / WEIGHTS)
    assert said in refusal(base, tmp_path)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("model.layers.9.feed_forward.w1", "layers.9.feed_forward.w1', which is not a linear of this model"),
        ("model.layers.0.self_attn.q_proj", "which is not a linear of this model; its own model is 'some/other';"),
        ("lm_head", "changes 'lm_head', which is the embedding table of this model too"),
        ("model.embed_tokens", "changes 'model.embed_tokens', which is not a linear; train the adapter without it"),
        ("model.layers.1.operator_norm", "changes 'model.layers.1.operator_norm', which is not a linear"),
        ("model.layers.0.conv.conv", "changes 'model.layers.0.conv.conv', which is not a linear"),
    ],
)
def test_what_the_model_has_no_linear_for_is_refused_by_name(
    base: Path, tmp_path: Path, module: str, said: str
) -> None:
    write_adapter(tmp_path, {**MODULES, module: torch.empty(64, 64)}, base_model_name_or_path="some/other")
    assert said in refusal(base, tmp_path)


def test_a_tensor_that_the_model_has_no_place_for_is_refused_with_an_adapter_too(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "base")
    save_file({**tensors, f"{Q}.bias": torch.ones(64)}, tmp_path / "base" / "model.safetensors")
    write_adapter(tmp_path / "lora", MODULES)
    assert f"unknown tensor '{Q}.bias'" in refusal(tmp_path / "base", tmp_path / "lora")


def test_what_is_added_is_what_the_adapter_holds_whatever_its_settings_name(base: Path, tmp_path: Path) -> None:
    """Ranks are those of its matrices; modules that it was not said to be for have some."""
    write_adapter(tmp_path / "plain", MODULES)
    told = {"target_modules": ["v_proj"], "exclude_modules": "w1", "layers_to_transform": [7], "r": 2}
    write_adapter(tmp_path / "told", MODULES, **told, rank_pattern={"w1": 9}, layers_pattern="h")
    assert torch.equal(logits(base, tmp_path / "told"), logits(base, tmp_path / "plain"))
    assert not torch.equal(logits(base, tmp_path / "told"), logits(base))


def test_an_adapter_without_matrices_is_refused(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, {})
    assert "holds no tensors; save it again" in refusal(base, tmp_path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_folder_without_either_file_is_refused_pickles_or_not(base: Path, tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path, MODULES)
    (tmp_path / name).rename(tmp_path / "adapter_model.bin")
    said = f"{name}: cannot be read (No such file or directory); an adapter is a folder with {CONFIG} and {WEIGHTS}"
    assert f"adapter: {tmp_path}/{said} (no pickle is read)" in refusal(base, tmp_path)


def test_an_adapter_that_is_nowhere_is_refused_as_such(base: Path, tmp_path: Path) -> None:
    assert refusal(base, tmp_path / "gone").startswith(f"adapter: no model folder {tmp_path}/gone")


def test_a_gguf_file_takes_no_adapter(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "base")
    kind = gguf.GGMLQuantizationType.F32
    write_gguf(tmp_path / "model.gguf", read_config(tmp_path / "base"), tensors, lambda name: kind)
    write_adapter(tmp_path / "lora", MODULES)
    said = refusal(tmp_path / "model.gguf", tmp_path / "lora")
    assert "an adapter is not added to a .gguf file; give the safetensors of the model" in said


def test_settings_without_effect_are_not_looked_at(base: Path, tmp_path: Path) -> None:
    more = {"peft_version": "9", "task_type": "CAUSAL_LM", "lora_dropout": 0.5, "loftq_config": {"x": 1}, "new": None}
    write_adapter(tmp_path, MODULES, **more, init_lora_weights="gaussian", exclude_modules=None, rank_pattern=None)
    assert torch.isfinite(logits(base, tmp_path)).all()


def test_what_an_adapter_was_trained_on_is_known_by_its_last_part(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODULES, base_model_name_or_path="LiquidAI/LFM2-350M")
    lora = read_lora(tmp_path)
    assert lora.is_for("/models/lfm2-350m/")
    assert lora.is_for("LiquidAI/LFM2-350M")
    assert not lora.is_for("LiquidAI/LFM2-700M")
    (tmp_path / CONFIG).write_text(json.dumps(settings_for(MODULES)))
    assert read_lora(tmp_path).is_for("anything")
