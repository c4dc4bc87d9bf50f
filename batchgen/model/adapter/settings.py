"""Settings of a LoRA adapter, from its ``adapter_config.json``; torch-free, so that a plan refuses what a run would.

What each key means is what peft makes of it. Whatever makes an adapter more than products that are added to linears is
refused by name, and so is a key that is not known. Regular expressions are matched by RE2, in linear time, because
they come with the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.hub import resolve_model
from batchgen.core.model_files import ADAPTER_CONFIG, ADAPTER_FILES, read_object
from batchgen.core.units import shown
from batchgen.model.config import ModelConfig
from batchgen.model.values import ConfigValues

_MAX_BYTES = 1 << 20  # of the settings; with a rank for each module they have 100 kB
_MAX_PATTERNS = 1000  # each of which is matched with each module
_ALL_LINEAR = "all-linear"
_KNOWN = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "base_model_name_or_path"),
    )
)
_WITHOUT_EFFECT = frozenset(  # on what a trained adapter computes
    (
        *("auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "task_type", "velora_config"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # ``init_lora_weights`` says which is used
    )
)
_OFF: tuple[object, ...] = (None, False, "none", "", [], {})
_PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")  # others change the model's own weights
REMEDY = "only a plain LoRA is added here: merge it by what it was trained with, and give the merged model"


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA: to the weight of each of its modules is added ``scale * B A``, of matrices with ``rank`` inner numbers.

    ``targets`` and ``excluded`` are names of modules or their last parts, or one regular expression; ``layers`` limits
    names to those layers. The patterns are regular expressions of modules' last parts, of which the first counts.
    """

    folder: Path
    base: str
    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[str] | None

    @property
    def where(self) -> str:
        """The file of these settings, for errors."""
        return str(self.folder / ADAPTER_CONFIG)

    def is_for(self, model: str) -> bool:
        """Whether ``model``, a path or Hub id, may be what the adapter was trained on: by its last part."""
        return not self.base or Path(self.base).name.casefold() == Path(model).name.casefold()

    def added_to(self, config: ModelConfig) -> ModelConfig:
        """The model with this adapter. Raises ModelError for a GGUF file."""
        if config.is_gguf:
            raise ModelError(
                f"{self.where}: an adapter is not added to a .gguf file; give the safetensors of the model"
            )
        return replace(config, has_adapter=True)

    def scales(self, modules: Sequence[str], head: str) -> dict[str, tuple[int, float]]:
        """Rank and scale of each of the adapter's ``modules``; ``head`` is the model's output projection.

        Raises ModelError for a module that is not among the targets.
        """
        targets = set(modules) - {head} if self._is_all_linear else self._chosen(self.targets, modules)
        if self.layers is not None:
            targets = {module for module in targets if _layer(module) in self.layers}
        targets -= self._chosen(self.excluded, modules)
        if other := sorted(set(modules) - targets):
            raise ModelError(
                f"{self.where}: the adapter has weights for {shown(other[0])}, which is not among its targets "
                f"({len(other)} such modules); save it again"
            )
        ranks = self._first_matching(self.ranks, modules, self.rank)
        alphas = self._first_matching(self.alphas, modules, self.alpha)
        root = math.sqrt if self.is_rank_stabilized else float
        return {module: (ranks[module], alphas[module] / root(ranks[module])) for module in modules}

    @property
    def _is_all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == _ALL_LINEAR

    def _chosen(self, names: str | tuple[str, ...], modules: Sequence[str]) -> set[str]:
        if isinstance(names, str):
            return self._matching(names, modules)
        known = frozenset(names)
        return {module for module in modules if not known.isdisjoint(_endings(module))}

    def _first_matching(self, patterns: Mapping[str, Any], modules: Sequence[str], default: Any) -> dict[str, Any]:
        found = dict.fromkeys(modules, default)
        for pattern, value in reversed([*patterns.items()]):
            found |= dict.fromkeys(self._matching(rf"(.*\.)?({pattern})", modules), value)
        return found

    def _matching(self, pattern: str, modules: Sequence[str]) -> set[str]:
        """The modules that the whole of a pattern matches."""
        import pyarrow as pa
        from pyarrow import compute

        try:
            compute.match_substring_regex(pa.array([""]), pattern)  # by itself: parentheses may close what is not open
            found = compute.match_substring_regex(pa.array(modules, pa.string()), rf"\A(?:{pattern})\z")
        except (pa.ArrowException, ValueError) as error:
            why = " ".join(str(error).split())[:100].encode(errors="replace").decode()
            raise ModelError(
                f"{self.where}: the regular expression {shown(pattern)} is not read ({why}); "
                "give the names of the modules instead"
            ) from None
        return {module for module, is_match in zip(modules, found.to_pylist(), strict=True) if is_match}


def resolve_adapter(path: str) -> Path:
    """The folder of the adapter that ``path`` names, a folder or a Hub id. Raises ModelError."""
    try:
        return resolve_model(path, "main", ADAPTER_FILES)
    except ModelError as error:
        raise ModelError(f"adapter: {error}") from None


def read_lora(folder: Path) -> Lora:
    """The settings of the adapter in ``folder``. Raises ModelError: they are damaged, or those of no plain LoRA."""
    path = folder / ADAPTER_CONFIG
    values = ConfigValues(read_object(path, _MAX_BYTES), str(path))
    if (kind := values.get("peft_type")) != "LORA":
        raise values.error(f"peft_type is {shown(kind)}; {REMEDY}")
    for key, value in values.raw.items():
        if key not in _KNOWN | _WITHOUT_EFFECT and value not in _OFF:
            raise values.error(f"{shown(key)[1:-1]} is {shown(value)}; {REMEDY}")
    if (beginning := values.get("init_lora_weights", default=True)) not in _PLAIN_BEGINNINGS:
        raise values.error(f"init_lora_weights {shown(beginning)} changes the weights of the model too; {REMEDY}")
    ranks, alphas = _patterns(values, "rank_pattern"), _patterns(values, "alpha_pattern")
    alpha, targets = values.number("lora_alpha", default=8.0), _names(values, "target_modules")
    return Lora(
        folder,
        base=values.text("base_model_name_or_path", default=""),
        rank=values.integer("r", default=8),
        alpha=alpha,
        is_rank_stabilized=values.flag("use_rslora", default=False),
        ranks={key: ranks.integer(key) for key in ranks.raw},
        alphas={key: alphas.number(key, default=alpha) for key in alphas.raw},
        targets=targets,
        excluded=_names(values, "exclude_modules", default=[]),
        layers=_layers(values, targets),
    )


def _patterns(values: ConfigValues, key: str) -> ConfigValues:
    """Values by regular expression."""
    raw = values.get(key, default={})
    if not isinstance(raw, dict) or len(raw) > _MAX_PATTERNS:
        raise values.error(f"{key} must be an object of at most {_MAX_PATTERNS} keys, not {shown(raw)}")
    return ConfigValues(raw, f"{values.where}: {key}")


def _names(values: ConfigValues, key: str, **default: Any) -> str | tuple[str, ...]:
    """A regular expression or a list of names."""
    found = values.get(key, **default)
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return tuple(found)
    if not isinstance(found, str):
        raise values.error(f"{key} must be a string or a list of strings, not {shown(found)}")
    return found


def _layers(values: ConfigValues, targets: str | tuple[str, ...]) -> frozenset[str] | None:
    """The numbers of the layers that the adapter is limited to; None for all."""
    found = values.get("layers_to_transform", default=[])
    listed = found if isinstance(found, list) else [found]
    if not all(type(number) is int for number in listed):
        raise values.error(f"layers_to_transform must be a number or a list of them, not {shown(found)}")
    if not listed:
        return None
    if isinstance(targets, str):
        raise values.error("layers_to_transform needs target_modules to be a list of names")
    if (pattern := values.get("layers_pattern", default=[])) not in ([], "", "layers", ["layers"]):
        raise values.error(f"layers_pattern is {shown(pattern)}, not 'layers'; {REMEDY}")
    return frozenset(map(str, listed))


def _endings(module: str) -> Iterator[str]:
    """The name of a module, and what is left of it after each of its dots."""
    while module:
        yield module
        module = module.partition(".")[2]


def _layer(module: str) -> str:
    """The number of a module's layer, which is the first number in its name; empty if there is none."""
    return next((part for part in module.split(".")[2:-1] if part.isdecimal()), "")
