"""The shape of a model of any supported family.

A model is a folder, a GGUF file, a Hub id, or the name of a published shape with random weights (``dummy:LFM2-350M``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.model_files import TOKENIZER_FILES, generation_eos_token_ids, is_gguf, read_object, resolve_model
from batchgen.core.units import shown
from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families import FAMILIES
from batchgen.model.gguf.config import read_gguf_config

_PREFIX = "dummy:"
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # transformers; the same once; MLX
_TRUNKS = {"llama_bidirec": "llama"}  # the family of a model_type that only states a purpose
_TEXT_PARTS: Mapping[str, Mapping[str, Any]] = {  # of models that also see images: values that a file may leave out
    "gemma3": {
        "model_type": "gemma3_text",
        **{"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
    },
    "lfm2_vl": {"model_type": "lfm2"},
    "mistral3": {"model_type": "mistral"},
}
_OF_BOTH_PARTS = (  # keys outside the text part that count for it
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", *_QUANTIZED),
)
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_MAX_LABELS = 10_000
# The function from logits to scores, by ``problem_type`` and by the function that sentence-transformers writes.
_PROBLEMS = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "logits",
}
_FUNCTIONS = {
    "torch.nn.modules.linear.Identity": "logits",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_MAX_BYTES = 1 << 20  # of a config file; published ones have 1 to 2 kB


def parse_config(raw: Mapping[str, Any], location: str) -> ModelConfig:
    """The shape that a parsed ``config.json`` describes; ``location`` names it in errors.

    Raises ModelError for an unknown family, a quantized checkpoint, a missing or impossible value.
    """
    values = ConfigValues(raw, location)
    stated = raw.get("model_type")
    outer = stated if isinstance(stated, str) else ""
    if outer in _TEXT_PARTS:
        text = {**_TEXT_PARTS[outer], **values.section("text_config").raw}
        shared = {key: raw[key] for key in _OF_BOTH_PARTS if raw.get(key) is not None}
        return replace(parse_config({**text, **shared}, f"{location}: text_config"), unread_parts=_VISION)
    family = FAMILIES.get(_TRUNKS.get(outer, outer))
    if family is None:
        families = ", ".join(f"{name!r} ({family.title})" for name, family in FAMILIES.items())
        parts = ", ".join(map(repr, _TEXT_PARTS))
        raise values.error(
            f"model_type is {shown(stated)}; this engine runs {families}, and the text part of {parts} only"
        )
    _refuse_quantized(values)
    config = replace(family.read_config(values), **_purpose(values))
    if config.window and config.num_conv_layers and not config.is_causal:
        raise values.error("windows and convolutions in a model that looks both ways are not computed here")
    if config.num_heads % config.num_kv_heads:
        raise values.error(f"num_attention_heads {config.num_heads} is not a multiple of {config.num_kv_heads}")
    if config.head_dim % 2:
        raise values.error(f"head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    widths = [layer.experts.ff_dim if layer.experts else layer.ff_dim for layer in config.layers]
    for name, width in (("hidden_size", config.hidden_size), *(("a feed-forward's width", width) for width in widths)):
        if width % 2:
            raise values.error(f"{name} {width} is odd; the CPU multiplies inputs in pairs")
    return config


def _refuse_quantized(values: ConfigValues) -> None:
    """Refuse a checkpoint whose integers would only be widened at load. Raises ModelError."""
    if (key := next((key for key in _QUANTIZED if values.raw.get(key) is not None), None)) is None:
        return
    settings = values.section(key).raw
    method = "MLX" if "quant_method" not in settings and "bits" in settings else shown(settings.get("quant_method"))
    raise values.error(
        f'{key} by {method} is not supported; give the bfloat16 release of the model: [model] quantization = "w8a16" '
        "quantizes it as it is loaded"
    )


def _purpose(values: ConfigValues) -> dict[str, Any]:
    """Settings of an encoder or classifier, by the class that the checkpoint names. Raises ModelError."""
    names = values.raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    is_both_ways = values.raw.get("model_type") in _TRUNKS or "Bidirec" in name
    is_both_ways |= values.flag("use_bidirectional_attention", default=False)
    if not is_both_ways and not values.flag("is_causal", default=True):  # attention looks both ways in any class
        values.expect("conv_L_cache", None, "is_causal false with convolutions is not supported")
        is_both_ways = True
    settings: dict[str, Any] = {"is_causal": not is_both_ways}
    if name.endswith("ForSequenceClassification"):
        labels = _labels(values)
        settings |= {"labels": labels, "has_head": False, "scores": _scores(values, len(labels))}
    elif not settings["is_causal"] or (name.endswith("Model") and name):
        settings["has_head"] = False
    return settings


def _labels(values: ConfigValues) -> tuple[str, ...]:
    """The names of a classifier's labels, in the order of its scores. Raises ModelError."""
    named = values.get("id2label", default=None)
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(values.integer("num_labels", default=2, maximum=_MAX_LABELS)))
    keys = [str(i) for i in range(len(named))] if isinstance(named, dict) else []
    if not keys or len(keys) > _MAX_LABELS or not all(isinstance(named.get(key), str) for key in keys):
        raise values.error(f"id2label must name labels by their numbers from 0 on, not {shown(named)}")
    if len(labels := tuple(named[key] for key in keys)) > len(set(labels)):
        raise values.error("id2label holds the same name twice")
    return labels


def _scores(values: ConfigValues, num_labels: int) -> str:
    """Function from logits of labels to scores, as in sentence-transformers and transformers. Raises ModelError."""
    ours, older = values.section("sentence_transformers", is_needed=False), "sbert_ce_default_activation_function"
    function = ours.text("activation_fn", default=values.text(older, default=""))
    problem = values.text("problem_type", default="")
    usual = _PROBLEMS["multi_label_classification" if num_labels == 1 else "single_label_classification"]
    for name, value, functions in (("activation_fn", function, _FUNCTIONS), ("problem_type", problem, _PROBLEMS)):
        if value and value not in functions:
            raise values.error(f"{name} is {shown(value)}; known are {', '.join(map(repr, functions))}")
    scores = _FUNCTIONS.get(function) or _PROBLEMS.get(problem) or usual
    return usual if num_labels == 1 and scores == "softmax" else scores


def read_config(model: Path) -> ModelConfig:
    """The shape of the model in a folder or GGUF file; for a folder with the end tokens of its generation config.

    Raises ModelError for a missing or broken file, or anything that ``parse_config`` refuses.
    """
    if is_gguf(model):
        raw, tensor_names = read_gguf_config(model)
        config = parse_config(raw, str(model))
        return replace(config, tensor_names=tensor_names, is_gguf=True, norm_offset=0.0)  # added to the file's norms
    path = model / "config.json"
    config = parse_config(read_object(path, _MAX_BYTES), str(path))
    eos_token_ids = dict.fromkeys((*config.eos_token_ids, *generation_eos_token_ids(model)))
    return replace(config, eos_token_ids=tuple(eos_token_ids))


def is_dummy(path: str) -> bool:
    """Whether ``path`` names a published shape with random weights (``dummy:LFM2-350M``)."""
    return path.startswith(_PREFIX)


def dummy_config(path: str) -> ModelConfig:
    """The shape that ``dummy:NAME`` names. Raises ModelError if there is no such published shape."""
    name = path.removeprefix(_PREFIX)
    shapes = {name: shape for family in FAMILIES.values() for name, shape in family.shapes.items()}
    if name not in shapes:
        raise ModelError(f"{path}: no published shape {name!r}; there are {', '.join(shapes)}")
    return parse_config(shapes[name], path)


def load_config(path: str, revision: str = "main") -> ModelConfig:
    """Shape of the model at ``path``: a folder, a GGUF file, a Hub id or ``dummy:NAME``.

    Raises ModelError if it cannot be found, read, or run by this engine.
    """
    return dummy_config(path) if is_dummy(path) else read_config(resolve_model(path, revision, TOKENIZER_FILES))
