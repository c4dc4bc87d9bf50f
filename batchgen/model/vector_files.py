"""Settings of a checkpoint for vectors of hidden states, from the files that sentence-transformers writes.

Classes named there are never imported: a module is recognized by the last part of its name, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.model_files import is_gguf, read_object, read_text
from batchgen.core.units import one_line, shown
from batchgen.model.config_values import ConfigValues
from batchgen.model.gguf.config import read_gguf_pooling
from batchgen.model.late_interaction import Side, read_sides

_MAX_BYTES = 1 << 20  # of each file; published ones have kilobytes
_ENDLESS = int(1e30)  # tokens, where a tokenizer names no limit
_ORDER = ("Transformer", "Pooling", "Dense", "MultiVectorMask", "Normalize")
_POOLINGS = {"cls": "cls", "cls_token": "cls", "lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_ACTIVATIONS = {"Identity": False, "Tanh": True}


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after the model, in a separate folder; ``has_tanh``: a hyperbolic tangent follows."""

    folder: Path
    inputs: int
    outputs: int
    has_bias: bool
    has_tanh: bool


@dataclass(frozen=True, slots=True)
class VectorFiles:
    """Settings in the files; ``pooling`` is "" if they do not name it; ``sides`` are for late interaction."""

    pooling: str = ""
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int | None = None
    sides: Mapping[str, Side] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint was published to make vectors."""
        return self.pooling not in ("", "tokens") or bool(self.dense)


def read_vector_files(folder: Path) -> VectorFiles:
    """Settings in a model's folder or GGUF file, defaults for missing ones. Raises ModelError for unknown modules."""
    if is_gguf(folder):
        pooling = read_gguf_pooling(folder)
        return VectorFiles(pooling, normalize=pooling not in ("", "tokens"))  # as llama.cpp's server
    path = folder / "modules.json"
    settings: dict[str, Any] = {}
    last, mask = 0, None
    for module in _modules(path) if path.exists() else ():
        role, module_folder = str(module.get("type", "")).rpartition(".")[2], folder / _folder_of(path, module)
        role = "Transformer" if role == "ColBERT" else role
        if role not in _ORDER:
            raise ModelError(
                f"{path}: the module {shown(module.get('type'))} is not known (known: {', '.join(_ORDER)})"
            )
        if _ORDER.index(role) < last:
            raise ModelError(f"{path}: {role} after {_ORDER[last]} is not supported (in order: {', '.join(_ORDER)})")
        last = _ORDER.index(role)
        if role == "Pooling":
            settings["pooling"] = _pooling(module_folder / "config.json")
        elif role == "Dense":
            settings["dense"] = (*settings.get("dense", ()), _dense(module_folder))
        elif role == "MultiVectorMask":
            mask = module_folder
        elif role == "Normalize":
            settings["normalize"] = True
    if settings.get("dense") and "pooling" not in settings:
        settings["pooling"] = "tokens"  # a vector for each token, as late interaction has it
    sides = read_sides(folder, mask) if path.exists() else {}
    if sides:
        settings |= {"pooling": "tokens", "normalize": True}
    max_tokens = _max_tokens(folder) if path.exists() else None
    return VectorFiles(**settings, **_prompts(folder), max_tokens=max_tokens, sides=sides)


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        listed = json.loads(read_text(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({one_line(error)})") from None
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ModelError(f"{path}: expected a list of modules")
    return listed


def _folder_of(path: Path, module: Mapping[str, Any]) -> str:
    """The folder of a module, inside the model's folder."""
    name = module.get("path", "")
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{path}: the module's path {shown(name)} leaves the model's folder")
    return name


def _pooling(path: Path) -> str:
    raw = read_object(path, _MAX_BYTES)
    modes = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    modes = [raw["pooling_mode"]] if "pooling_mode" in raw else [name.removeprefix("pooling_mode_") for name in modes]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        raise ModelError(f"{path}: pools by {shown(modes)}; one of cls, lasttoken and mean is supported")
    if raw.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt false is not supported: the prompt's tokens are pooled too")
    return _POOLINGS[modes[0]]


def _dense(folder: Path) -> Dense:
    values = ConfigValues(read_object(folder / "config.json", _MAX_BYTES), str(folder / "config.json"))
    name = values.text("activation_function", default="Identity").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise values.error(f"activation_function {shown(name)} is not supported (known: {', '.join(_ACTIVATIONS)})")
    values.refuse("use_residual")
    sizes = values.integer("in_features"), values.integer("out_features")
    return Dense(folder, *sizes, values.flag("bias", default=True), _ACTIVATIONS[name])


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    raw = read_object(path, _MAX_BYTES) if path.exists() else {}
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of texts")
    if default and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {shown(default)} is not among the prompts")
    return {"prompts": prompts, "default_prompt": default}


def _max_tokens(folder: Path) -> int | None:
    """The most tokens of a text, which newer releases only write into the tokenizer's settings; None if not given."""
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        path = folder / name
        values = ConfigValues(read_object(path, _MAX_BYTES) if path.exists() else {}, str(path))
        values.refuse("do_lower_case")
        if values.get(key, default=None) is not None:
            return values.integer(key, maximum=_ENDLESS)
    return None
