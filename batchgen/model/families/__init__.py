"""Model families: parsers of ``config.json``, tensor names and published shapes.

A family is data: ``docs/internals.md`` says how to add one, and ``dense`` reads configs like Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.model.config_values import Family
from batchgen.model.families import gemma3, granite, lfm2, lfm3, llama, mistral, qwen

FAMILIES: Mapping[str, Family] = {  # by model_type
    "gemma3_text": gemma3.GEMMA3,
    "granite": granite.GRANITE,
    "granitemoehybrid": granite.GRANITE4,
    "lfm2": lfm2.LFM2,
    "lfm2_moe": lfm2.LFM2_MOE,
    "lfm3": lfm3.LFM3,
    "llama": llama.LLAMA,
    "ministral3": mistral.MINISTRAL3,
    "mistral": mistral.MISTRAL,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "smollm3": llama.SMOLLM3,
}
