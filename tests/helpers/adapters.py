"""LoRA adapters as peft saves them, written without peft, and the sums that they make, computed element by element."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

RANK, ALPHA = 4, 10.0
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def settings_for(modules: Iterable[str], **changes: Any) -> dict[str, Any]:
    """An ``adapter_config.json`` with the keys that decide something, and one that does not."""
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(modules),
        "bias": "none",
        "lora_dropout": 0.1,
        "use_dora": False,
        "base_model_name_or_path": "",
        **changes,
    }


def matrices(weight: Tensor, seed: int, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] for a weight [out, in], float32."""
    generator = torch.Generator().manual_seed(seed)
    out, width = weight.shape
    return tuple(0.3 * torch.randn(shape, generator=generator) for shape in ((rank, width), (out, rank)))  # type: ignore[return-value]


def write_adapter(
    folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, infix: str = "", **changes: Any
) -> dict[str, Tensor]:
    """Write an adapter for the modules that ``weights`` are of; the tensors written."""
    tensors: dict[str, Tensor] = {}
    for seed, (module, weight) in enumerate(weights.items()):
        for part, matrix in zip("AB", matrices(weight, seed), strict=True):
            tensors[f"base_model.model.{module}.lora_{part}{infix}.weight"] = matrix.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings_for(weights, **changes)))
    save_file(tensors, folder / WEIGHTS)
    return tensors


def added(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``weight + scale * b a``, rounded to float32: products in float64, added one rank after the other."""
    total = np.zeros(weight.shape)
    for left, right in zip(b.double().numpy().T, a.double().numpy(), strict=True):
        total = total + np.multiply.outer(left, right)
    return torch.from_numpy(weight.double().numpy() + total * scale).float()


def merged(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The tensors of a checkpoint with those of an adapter added, in float32."""
    result = {}
    for name, weight in weights.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora"
        pair = [adapter.get(f"{stem}_{part}.weight") for part in "AB"]
        result[name] = weight if pair[0] is None or pair[1] is None else added(weight, pair[0], pair[1], scale)
    return result
