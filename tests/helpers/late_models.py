"""Checkpoints of late interaction as PyLate and sentence-transformers 6 save them, and their formulas in torch."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import raw_config, saved_by_transformers
from safetensors.torch import load_file, save_file
from vector_models import vector_settings

MODEL = Path(__file__).resolve().parents[2] / "sample_data" / "tiny-lfm2"
SIDES = ("query", "document")
WIDTH = 16
MARKERS = {"query": "<|im_start|>", "document": "<|im_end|>"}
FILLER = "<|pad|>"
PYLATE: dict[str, Any] = {
    "model_type": "ColBERT",
    "prompts": {},
    "default_prompt_name": None,
    **{f"{side}_prefix": marker for side, marker in MARKERS.items()},
    **{"query_length": 12, "document_length": 40, "do_query_expansion": True, "attend_to_expansion_tokens": False},
    "skiplist_words": [".", ",", "!", "?"],
}


def texts(count: int) -> list[str]:
    """Texts of 1 to 80 words with marks between them."""
    rng = random.Random(0)
    words = ["capital", "of", "France", "color", "red", "blue", "is", "the", "water", "rain", ".", ",", "?"]
    return [" ".join(rng.choices(words, k=rng.choice((1, 2, 5, 8, 20, 80)))) for _ in range(count)]


def saved_late(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint of PyLate: the sample model, or a random one with its tokenizer, and a dense layer."""
    if family == "lfm2":
        shutil.copytree(MODEL, folder)
    else:
        vocab_size = json.loads((MODEL / "config.json").read_bytes())["vocab_size"]
        saved_by_transformers(raw_config(family, vocab_size=vocab_size), folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes()) | {"mask_token": FILLER}
    path.write_text(json.dumps(settings), encoding="utf-8")
    width = json.loads((folder / "config.json").read_bytes())["hidden_size"]
    dense = {"type": "pylate.models.Dense.Dense", "in_features": width, "out_features": WIDTH, "bias": False}
    vector_settings(folder, {**dense, "activation_function": "torch.nn.modules.linear.Identity"})
    torch.manual_seed(0)
    save_file({"linear.weight": torch.randn(WIDTH, width) / width**0.5}, folder / "1_Dense" / "model.safetensors")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 39}), encoding="utf-8")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PYLATE | changes), encoding="utf-8")
    return folder


def as_sentence_transformers(folder: Path) -> None:
    """Rewrite the settings of a PyLate checkpoint as sentence-transformers 6 saves them."""
    path = folder / "config_sentence_transformers.json"
    old = json.loads(path.read_bytes())
    new = {"model_type": "MultiVectorEncoder", "prompts": {side: old[f"{side}_prefix"] for side in SIDES}}
    path.write_text(json.dumps(new), encoding="utf-8")
    expansion = {"strategy": "fixed", "attend": old["attend_to_expansion_tokens"], "length": old["query_length"]}
    lengths = {"query_expansion": expansion, "document_length": old["document_length"]}
    (folder / "sentence_bert_config.json").write_text(json.dumps(lengths), encoding="utf-8")
    path = folder / "modules.json"
    modules = json.loads(path.read_bytes())
    for name, kind in (("2_MultiVectorMask", "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
                       ("3_Normalize", "sentence_transformer.modules.normalize.Normalize")):  # fmt: skip
        modules.append({"idx": len(modules), "name": name, "path": name, "type": f"sentence_transformers.{kind}"})
        (folder / name).mkdir()
    path.write_text(json.dumps(modules), encoding="utf-8")
    mask = {"skiplist_words": old["skiplist_words"], "skiplist_tasks": ["document"]}
    (folder / "2_MultiVectorMask" / "config.json").write_text(json.dumps(mask), encoding="utf-8")


@torch.no_grad()
def late_vectors(folder: Path, side: str, given: Sequence[str]) -> list[np.ndarray]:
    """The vectors of each text [tokens, WIDTH] by transformers' model, one text at a time."""
    from tokenizers import Tokenizer
    from transformers import AutoModel

    settings = json.loads((folder / "config_sentence_transformers.json").read_bytes())
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    load: Any = AutoModel.from_pretrained  # has no annotations
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    dense = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    marker, filler = (tokenizer.token_to_id(token) for token in (settings[f"{side}_prefix"], FILLER))
    skipped = [tokenizer.token_to_id(word) for word in settings["skiplist_words"]] if side == "document" else []
    length, found = settings[f"{side}_length"], []
    for text in given:
        ids = tokenizer.encode(text.strip()).ids[: length - 1]
        ids = [ids[0], marker, *ids[1:]]
        mask = [1] * len(ids)
        if side == "query" and settings["do_query_expansion"]:
            mask += [int(settings["attend_to_expansion_tokens"])] * (length - len(ids))
            ids += [filler] * (length - len(ids))
        states = model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask]), use_cache=False)
        vectors = torch.nn.functional.normalize(states.last_hidden_state[0] @ dense.T, dim=1)
        found.append(vectors[~torch.isin(torch.tensor(ids), torch.tensor(skipped))].numpy())
    return found
