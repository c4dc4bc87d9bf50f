"""Settings of a LoRA adapter, from its ``adapter_config.json``; without torch, so that a plan can check them.

Keys mean the same as in peft. Unknown keys are refused, and keys that ask for more than products and a new head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.core.errors import ModelError
from batchgen.core.model_files import ADAPTER_CONFIG, ADAPTER_FILES, read_object, resolve_model
from batchgen.core.units import shown
from batchgen.model.config import ModelConfig
from batchgen.model.config_values import ConfigValues

_MAX_BYTES = 1 << 20  # of the settings
_KNOWN = frozenset(
    (
        *("peft_type", "lora_alpha", "use_rslora", "init_lora_weights", "base_model_name_or_path"),
        # Which modules have matrices or weights, and of which rank, is read off the tensors.
        *("r", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("alpha_pattern", "rank_pattern", "modules_to_save"),
        # They do not change what a trained adapter computes; ``init_lora_weights`` says which of the configs is used.
        *("auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "task_type", "velora_config"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    )
)
_OFF: tuple[object, ...] = (None, False, "none", "", [], {})
_PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")  # others change the model's own weights
USE_MERGED = "only a plain LoRA is added here: merge it by what it was trained with, and give the merged model"


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA, which adds ``scale * B A``, a product of rank ``rank``, to the weight of each of its modules.

    The scale is alpha / rank, or alpha / sqrt(rank) if the adapter is rank-stabilized (rsLoRA). ``alphas`` has an alpha
    for each pattern: the first pattern that matches the end of a module's name counts, and the last matches any name.
    """

    folder: Path
    base: str
    alphas: Mapping[str, float]
    is_rank_stabilized: bool

    @property
    def location(self) -> str:
        """The file of these settings, for errors."""
        return str(self.folder / ADAPTER_CONFIG)

    def is_for(self, model: str) -> bool:
        """Whether the adapter may have been trained on ``model``, a path or Hub id, judging by the last part."""
        return not self.base or Path(self.base).name.casefold() == Path(model).name.casefold()

    def added_to(self, config: ModelConfig) -> ModelConfig:
        """The model with this adapter. Raises ModelError for a GGUF file."""
        if config.is_gguf:
            raise ModelError(
                f"{self.location}: an adapter is not added to a .gguf file; give the safetensors of the model"
            )
        return replace(config, has_adapter=True)

    def scale(self, module: str, rank: int) -> float:
        """The scale of a module with matrices of rank ``rank``. The first pattern that matches counts, as in peft."""
        alpha = next(alpha for pattern, alpha in self.alphas.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def resolve_adapter(path: str) -> Path:
    """The folder of the adapter that ``path`` names, a folder or a Hub id. Raises ModelError."""
    try:
        return resolve_model(path, "main", ADAPTER_FILES)
    except ModelError as error:
        raise ModelError(f"adapter: {error}") from None


def read_lora(folder: Path) -> Lora:
    """The settings of the adapter in ``folder``. Raises ModelError if they are damaged or not for a plain LoRA."""
    path = folder / ADAPTER_CONFIG
    values = ConfigValues(read_object(path, _MAX_BYTES), str(path))
    if (peft_type := values.get("peft_type")) != "LORA":
        raise values.error(f"peft_type is {shown(peft_type)}; {USE_MERGED}")
    for key, value in values.raw.items():
        if key not in _KNOWN and value not in _OFF:
            raise values.error(f"{shown(key)[1:-1]} is {shown(value)}; {USE_MERGED}")
    if (beginning := values.get("init_lora_weights", default=True)) not in _PLAIN_BEGINNINGS:
        raise values.error(f"init_lora_weights {shown(beginning)} changes the weights of the model too; {USE_MERGED}")
    return Lora(
        folder,
        base=values.text("base_model_name_or_path", default=""),
        alphas=_alphas(values),
        is_rank_stabilized=values.flag("use_rslora", default=False),
    )


def _alphas(values: ConfigValues) -> dict[str, float]:
    patterns = values.get("alpha_pattern", default=None) or {}
    try:
        alphas = {str(re.compile(pattern).pattern): float(alpha) for pattern, alpha in patterns.items()}
    except (AttributeError, TypeError, ValueError, re.error):
        alphas = {"": math.nan}
    if not all(0 < alpha < math.inf for alpha in alphas.values()):
        raise values.error(f"alpha_pattern must map regular expressions to positive numbers, not {shown(patterns)}")
    return {**alphas, ".*": values.number("lora_alpha", default=8.0)}


def doubts(lora: Lora | None, model: str, folder: Path | None) -> list[str]:
    """A line if the adapter was trained on another model, or if the model's ``folder`` has one that is not added."""
    if lora is not None and not lora.is_for(model):
        return [f"the adapter was trained on {shown(lora.base)}, and is added to {model}"]
    if lora is None and folder is not None and (folder / ADAPTER_CONFIG).exists():
        return [f"{model} has an adapter in its folder, which is not added; --adapter adds one that is not merged"]
    return []
