"""Adapters that peft saves: the weights are those of its ``merge_and_unload``, the tokens those of its own model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import RAW, randomize, raw_config, reference_model, saved_by_transformers
from safetensors.torch import load_file
from tiny_model import CPU, random_requests, tokens_of

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.model.adapter.settings import read_lora
from batchgen.model.adapter.source import LoraTensors
from batchgen.model.load import load_model
from batchgen.model.registry import read_config
from batchgen.model.weights import Checkpoint

SIZES = EngineConfig(kv_cache_memory=1 << 22)
ROWS = random_requests(2, seed=3, prompt=(3, 20), output=(12, 12), params=SamplingParams(ignore_eos=True))
ALL = ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"]
SETTINGS: dict[str, dict[str, Any]] = {
    "a list": {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
    "all that recipes name": {"target_modules": ALL, "lora_alpha": 16, "use_rslora": True},
    "a regular expression": {"target_modules": r"model\.layers\.[13]\..*?(?:k_proj|w[12])"},
    "all linears": {"target_modules": "all-linear", "r": 3},
    "whole names": {"target_modules": ["model.layers.0.conv.in_proj", "layers.1.self_attn.q_proj"]},
    "an untied head": {"target_modules": ["lm_head", "w3"]},
    "some layers": {"target_modules": ALL, "layers_to_transform": [0, 3], "layers_pattern": "layers"},
    "one layer": {"target_modules": ["w1"], "layers_to_transform": 2},
    "all but some": {"target_modules": ALL, "exclude_modules": ["model.layers.0.conv.out_proj", "w2"]},
    "patterns of alpha and rank": {
        "target_modules": ALL,
        "alpha_pattern": {"w1": 3, r"layers\.[01]\..*_proj": 5.5, "q_proj": 9},
        "rank_pattern": {"w[12]": 7, "layers.3.self_attn.q_proj": 1},
    },
    "a new embedding and head": {"target_modules": ["w1"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "all but a regular expression": {"target_modules": ALL, "exclude_modules": r".*layers\.1\..*"},
}
TABLES = ("lm_head", "embed_tokens")
MODELS = {
    **{name: (raw_config(tie_word_embeddings=False), settings) for name, settings in SETTINGS.items()},
    "a tied model with a new head": (raw_config(), {"target_modules": ["w1"], "modules_to_save": ["lm_head"]}),
    "a tied model with a new embedding": (
        raw_config(),
        {"target_modules": ["w1"], "modules_to_save": ["embed_tokens"]},
    ),
    **{name: (raw, {"target_modules": "all-linear"}) for name, raw in RAW.items() if "num_experts" not in raw},
    # Peft makes no linears of experts, which transformers holds together.
    **{name: (raw, {"target_modules": ["q_proj", "v_proj"]}) for name, raw in RAW.items() if "num_experts" in raw},
}


QUICK = ("patterns of alpha and rank", "all that recipes name", "a new embedding and head", "qwen3")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """What peft makes of a random adapter that it has saved, and the folder with ``base`` and ``lora``."""
    folder = tmp_path_factory.mktemp("trained")
    raw, settings = MODELS[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about other packages
        from peft import LoraConfig, PeftModel, get_peft_model

        settings = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **settings}
        adapted = get_peft_model(saved_by_transformers(raw, folder / "base"), LoraConfig(**settings))
        lora = {name.replace(".", "/"): values for name, values in adapted.named_parameters() if values.requires_grad}
        randomize(torch.nn.ParameterDict(lora), seed=4)
        adapted.save_pretrained(folder / "lora", save_embedding_layers=False)
        adapted = PeftModel.from_pretrained(reference_model(raw), str(folder / "lora")).eval()
    yield adapted, folder


@torch.no_grad()
def reference_continuation(model: Any, row: Request) -> tuple[int, ...]:
    """Greedy tokens, each from a forward pass over the whole prefix."""
    tokens = list(row.prompt_token_ids)
    for _ in range(row.params.max_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(row.prompt_token_ids) :])


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_tokens_and_weights_are_those_of_peft(trained: tuple[Any, Path]) -> None:
    adapted, folder = trained
    model = load_model(str(folder / "base"), adapter=str(folder / "lora"), dtype="float32", device="cpu")
    wanted = {row.key: reference_continuation(adapted, row) for row in ROWS}  # with the adapter beside the weights
    assert tokens_of(Engine(model, SIZES).run(ROWS)) == wanted
    plain = load_model(str(folder / "base"), dtype="float32", device="cpu")
    assert tokens_of(Engine(plain, SIZES).run(ROWS)) != wanted

    config = read_config(folder / "base")
    found = LoraTensors(Checkpoint(folder / "base", torch.float32, CPU), read_lora(folder / "lora"), config)
    wanted_weights = {config.stored_name(name): part for name, part in adapted.merge_and_unload().named_parameters()}
    num_changed = 0
    for name, tensor_before in load_file(folder / "base" / "model.safetensors").items():
        tensor = found.take(name, tuple(tensor_before.shape))
        weight = wanted_weights.get(name, tensor_before)  # of experts, which stay as they are
        assert (tensor - weight).abs().max() <= 1e-6 * weight.abs().max(), name
        num_changed += not torch.equal(tensor, tensor_before)
    if found.holds(head := f"{config.tensor_names['head']}.weight"):
        found.take(head, (config.vocab_size, config.hidden_size))
    found.finish()
    assert num_changed > 0
