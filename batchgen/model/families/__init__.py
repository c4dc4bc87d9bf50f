"""Model families, one module each: the parser of ``config.json``, tensor names and published shapes.

To add a family, write a module with the names of ``Family``, enter it in ``FAMILIES`` and add a tiny config to
``tests/helpers/families.py``: all tests of families then run for it. The decoder has SwiGLU, grouped-query attention,
optionally with norms per head of queries and keys, and short convolutions; the fields of ``ModelConfig`` and
``LayerShape`` name the rest. ``dense`` reads configs like Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues
from batchgen.model.families import (
    gemma3,
    granite,
    granite4,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    ministral3,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)


class Family(Protocol):
    """The names that a family's module defines; ``SHAPES`` are published ``config.json`` values by model name."""

    TITLE: str
    SHAPES: Mapping[str, Mapping[str, Any]]

    def read_config(self, values: ConfigValues) -> ModelConfig: ...


FAMILIES: Mapping[str, Family] = {  # by model_type
    "gemma3_text": gemma3,
    "granite": granite,
    "granitemoehybrid": granite4,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "lfm3": lfm3,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
}
