"""Checkpoints in the forms in which they are published, run by the command: the tokens and vectors of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import randomize, raw_config, saved_by_transformers
from run_helpers import read_lines, write_lines
from safetensors.torch import load_file, save_file
from vector_models import MEAN, pooling_of, vector_settings

from batchgen.cli.main import call

LENGTHS = (1, 2, 17, 300)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40}
TEXT_ONLY = {
    "qwen2": raw_config("qwen2"),
    "biased llama": raw_config("llama", attention_bias=True),
    "yarn": raw_config("qwen3", rope_scaling=YARN),
    "granite 4": raw_config("granitemoehybrid"),
    "granite 4 without rotation": raw_config("granitemoehybrid", position_embedding_type="nope"),
    "ministral 3": raw_config("ministral3"),
}
_SIGLIP = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
TWO_PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the class, the text part, the vision part
    "gemma3": ("Gemma3", "gemma3_text", {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}),
    "lfm2_vl": ("Lfm2Vl", "lfm2", {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14}),
    "mistral3": ("Mistral3", "mistral", {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}),
    "mistral3 of ministral3": ("Mistral3", "ministral3", {"model_type": "pixtral", "image_size": 28, "patch_size": 14}),
}


def saved_in_two_parts(name: str, folder: Path, *, is_tied: bool = True) -> Any:
    """A random model with a vision part, saved as transformers saves it."""
    import transformers

    prefix, text, vision = TWO_PARTS[name]
    config = transformers.AutoConfig.for_model(
        name.split(maxsplit=1)[0],
        text_config=raw_config(text, tie_word_embeddings=is_tied),
        vision_config=_SIGLIP | vision,
        image_token_index=3,
        tie_word_embeddings=is_tied,
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    randomize(model, 0)
    model.save_pretrained(folder)
    return model


def prompts(folder: Path) -> list[list[int]]:
    """Prompts of ids, written to ``rows.jsonl``."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(20, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    write_lines(folder / "rows.jsonl", ({"prompt_token_ids": row} for row in rows))
    return rows


def run(model: Path, *flags: str) -> int:
    place = model.parent
    words = ["run", place / "rows.jsonl", "--model", model, "--output", place / "run", "--dtype", "float32"]
    return call([*map(str, words), *flags])


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", [*TEXT_ONLY, *TWO_PARTS])
def test_the_command_gives_the_greedy_tokens_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    is_text = name in TEXT_ONLY
    model = saved_by_transformers(TEXT_ONLY[name], folder) if is_text else saved_in_two_parts(name, folder)
    wanted = [greedy(model, prompt, 6) for prompt in prompts(tmp_path)]
    assert run(folder, "--max-tokens", "6", "--ignore-eos", "--token-ids") == 0
    assert [row["token_ids"] for row in read_lines(tmp_path / "run" / "outputs.jsonl")] == wanted
    told = capsys.readouterr().err
    assert told.count("the vision part of this checkpoint is not read: it runs as a model of text") == (not is_text)


def test_a_head_outside_of_the_text_part_is_the_same_model(tmp_path: Path) -> None:
    model = saved_in_two_parts("mistral3", tmp_path / "model", is_tied=False)
    wanted = [greedy(model, prompt, 6) for prompt in prompts(tmp_path)]
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    assert "language_model.lm_head.weight" in tensors
    newer = {name.replace("language_model.model.", "language_model."): value for name, value in tensors.items()}
    newer = {f"model.{name}".replace("model.language_model.lm_head", "lm_head"): newer[name] for name in newer}
    save_file(newer, path, {"format": "pt"})
    assert run(tmp_path / "model", "--max-tokens", "6", "--ignore-eos", "--token-ids") == 0
    assert [row["token_ids"] for row in read_lines(tmp_path / "run" / "outputs.jsonl")] == wanted


def test_a_tensor_of_neither_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_in_two_parts("gemma3", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path) | {"audio_tower.weight": torch.zeros(2)}, path, {"format": "pt"})
    prompts(tmp_path)
    assert run(tmp_path / "model") == 2
    assert "unknown tensor 'audio_tower.weight'" in capsys.readouterr().err


def test_embeddinggemma_gives_the_vectors_of_transformers(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    raw = raw_config("gemma3_text", use_bidirectional_attention=True, sliding_window=40)
    model = transformers.Gemma3TextModel(transformers.AutoConfig.for_model(**raw)).float().eval()
    randomize(model, 0)
    model.save_pretrained(folder)
    torch.manual_seed(0)
    weights = [torch.randn(96, 64), torch.randn(32, 96)]
    dense = [
        {
            **{"type": "sentence_transformers.models.Dense", "in_features": w.shape[1], "out_features": len(w)},
            **{"bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
        }
        for w in weights
    ]
    vector_settings(folder, pooling_of(MEAN), *dense, {"type": "sentence_transformers.models.Normalize"})
    for number, weight in enumerate(weights, 2):
        save_file({"linear.weight": weight}, folder / f"{number}_Dense" / "model.safetensors")
    wanted = []
    for prompt in prompts(tmp_path):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        vector = states.mean(0) @ weights[0].T @ weights[1].T
        wanted.append((vector / vector.norm()).numpy())
    assert run(folder) == 0
    found = [row["embedding"] for row in read_lines(tmp_path / "run" / "outputs.jsonl")]
    assert np.allclose(found, wanted, atol=2e-5)
