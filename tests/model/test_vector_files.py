"""What sentence-transformers writes beside a model is read as data, or refused in one line; its layers run there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import raw_config
from reference_kernels import ReferenceKernels
from safetensors.torch import save_file
from torch import Tensor
from vector_models import CLS, LAST, MEAN, pooling_of, vector_settings

from batchgen.core.errors import ModelError
from batchgen.model.registry import parse_config
from batchgen.model.vector_files import Dense, VectorFiles, read_vector_files
from batchgen.model.vectors import VectorHead, VectorSettings

DENSE = {"type": "sentence_transformers.models.Dense", "in_features": 64, "out_features": 8, "bias": True}


def test_a_folder_without_settings_has_the_defaults(tmp_path: Path) -> None:
    assert read_vector_files(tmp_path) == VectorFiles()
    assert not VectorFiles().is_there


@pytest.mark.parametrize(("mode", "name"), [(CLS, "cls"), (LAST, "last"), (MEAN, "mean")])
def test_pooling_normalization_and_prompts_are_read(mode: str, name: str, tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": ""}
    vector_settings(tmp_path, pooling_of(mode), {"type": "x.Normalize"}, prompts=prompts)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 512}', encoding="utf-8")
    assert read_vector_files(tmp_path) == VectorFiles(name, (), True, prompts, "", 512)


@pytest.mark.parametrize(("limit", "longest"), [(256, 256), (int(1e30), int(1e30)), (None, None)])
def test_newer_releases_write_the_longest_text_to_the_tokenizer(
    limit: int | None, longest: int | None, tmp_path: Path
) -> None:
    vector_settings(tmp_path, pooling_of(CLS))
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}', encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}), encoding="utf-8")
    assert read_vector_files(tmp_path).max_tokens == longest
    (tmp_path / "modules.json").unlink()
    assert read_vector_files(tmp_path).max_tokens is None


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "mean"])
def test_the_newer_name_of_the_pooling_is_read(mode: str, tmp_path: Path) -> None:
    vector_settings(tmp_path, {"type": "x.Pooling", "pooling_mode": mode})
    assert read_vector_files(tmp_path).pooling == mode.removesuffix("token")


def test_dense_layers_without_pooling_are_those_of_tokens(tmp_path: Path) -> None:
    vector_settings(tmp_path, {**DENSE, "activation_function": "torch.nn.modules.activation.Tanh"})
    found = read_vector_files(tmp_path)
    assert found.pooling == "tokens"
    assert (found.dense[0].inputs, found.dense[0].outputs, found.dense[0].has_tanh) == (64, 8, True)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "models.LSTM"}, "not known"),
    ({"type": "custom_code.MyPooling"}, "not known"),
    ({"type": "x.Pooling"}, "pools by"),
    ({"type": "x.Pooling", "pooling_mode_max_tokens": True}, "pools by"),
    ({"type": "x.Pooling", CLS: True, MEAN: True}, "pools by"),
    ({"type": "x.Pooling", CLS: True, "include_prompt": False}, "include_prompt"),
    ({"type": "x.Pooling", "pooling_mode": "weightedmean"}, "pools by"),
    ({"type": "x.Pooling", "pooling_mode": ["cls", "mean"]}, "pools by"),
    ({**DENSE, "activation_function": "os.system"}, "activation_function"),
    ({**DENSE, "in_features": -1}, "in_features"),
    ({**DENSE, "in_features": "64"}, "in_features"),
]


@pytest.mark.parametrize(("module", "told"), BAD)
def test_what_is_not_known_is_refused(module: dict[str, Any], told: str, tmp_path: Path) -> None:
    vector_settings(tmp_path, module)
    with pytest.raises(ModelError, match=told) as refused:
        read_vector_files(tmp_path)
    assert "\n" not in str(refused.value)


def test_modules_in_another_order_are_refused(tmp_path: Path) -> None:
    vector_settings(tmp_path, {"type": "x.Normalize"}, DENSE)
    with pytest.raises(ModelError, match="Dense after Normalize"):
        read_vector_files(tmp_path)


BROKEN = ["{}", "[1]", "[", "[" * 100_000, '[{"type": "x.Pooling", "path": "../../etc"}]', '[{"path": "/etc"}]']
PROMPTS = ['{"prompts": 3}', '{"prompts": {"q": 1}}', '{"default_prompt_name": "x"}']


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
        *(("modules.json", text, "modules.json") for text in BROKEN),
        *(("config_sentence_transformers.json", text, "prompt") for text in PROMPTS),
    ],
)
def test_a_hostile_file_and_one_of_lowered_texts_are_refused(name: str, text: str, told: str, tmp_path: Path) -> None:
    vector_settings(tmp_path, pooling_of(CLS))
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=told):
        read_vector_files(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "is_causal", "has_head"),
    [
        ("Lfm2ForCausalLM", True, True),
        ("Lfm2Model", True, False),
        ("Lfm2BidirectionalModel", False, False),
        ("Lfm2BidirectionalForMaskedLM", False, False),
        ("Lfm2BidirectionalForSequenceClassification", False, False),
    ],
)
def test_the_architecture_says_what_a_model_is_for(architecture: str, is_causal: bool, has_head: bool) -> None:
    config = parse_config(raw_config(architectures=[architecture]), "tiny")
    assert (config.is_causal, config.has_head) == (is_causal, has_head)
    assert config.labels == (("LABEL_0", "LABEL_1") if "Sequence" in architecture else ())


@pytest.mark.parametrize("labels", [{}, {"1": "a"}, {"0": "a", "1": "a"}, {"0": 1}, ["a"], {"0": "a", "2": "b"}])
def test_hostile_labels_are_refused(labels: Any) -> None:
    with pytest.raises(ModelError, match="id2label"):
        parse_config(raw_config(architectures=["LlamaForSequenceClassification"], id2label=labels), "tiny")


def test_a_window_that_looks_both_ways_is_refused() -> None:
    raw = raw_config("lfm3", architectures=["Lfm3BidirectionalModel"])
    with pytest.raises(ModelError, match="window"):
        parse_config(raw, "tiny")


# ---------------------------------------------------------------- layers behind the model


ELSEWHERE = torch.device("meta")


class Elsewhere(ReferenceKernels):
    """Kernels of a device of their own, as Triton's refuse what lies on another one; they give zeros."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        assert weight.device == ELSEWHERE and bias is not None and bias.device == ELSEWHERE

        def product(x: Tensor) -> Tensor:
            assert x.device == ELSEWHERE
            return torch.zeros(len(x), len(weight))

        return product


def test_dense_layers_are_loaded_and_run_on_the_device_of_the_model(tmp_path: Path) -> None:
    save_file({"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    settings = VectorSettings((Dense(tmp_path, 4, 3, has_bias=True, has_tanh=True),))
    head = VectorHead(settings, Elsewhere(), 4, torch.float32, ELSEWHERE)
    assert head(np.ones((2, 4), np.float32)).shape == (2, 3)
