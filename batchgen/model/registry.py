"""The published dense LFM2 shapes, for random-weight models named ``dummy:LFM2-350M`` and so on."""

from __future__ import annotations

from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.hub import resolve_folder
from batchgen.model.config import ModelConfig

PREFIX = "dummy:"

_COMMON: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128_000,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
}
_SIXTEEN = {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
_THIRTY = {"num_hidden_layers": 30, "full_attn_idxs": [2, 5, 9, 13, 17, 21, 24, 27]}

_SHAPES: dict[str, dict[str, Any]] = {
    "LFM2-350M": {"hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656, **_SIXTEEN},
    "LFM2-700M": {"hidden_size": 1536, "num_attention_heads": 24, "block_ff_dim": 10240, **_SIXTEEN},
    "LFM2-1.2B": {"hidden_size": 2048, "num_attention_heads": 32, "block_ff_dim": 12288, **_SIXTEEN},
    "LFM2-2.6B": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "block_ff_dim": 10752,
        **_THIRTY,
        "block_auto_adjust_ff_dim": False,
    },
}


def dummy_config(path: str) -> ModelConfig:
    """The shape that ``dummy:NAME`` stands for.

    Raises:
        ModelError: no published shape of that name.
    """
    name = path.removeprefix(PREFIX)
    if name not in _SHAPES:
        raise ModelError(f"{path}: no published shape {name!r}; there are {', '.join(_SHAPES)}")
    return ModelConfig.from_dict({**_COMMON, **_SHAPES[name]}, path)


def is_dummy(path: str) -> bool:
    """Whether ``path`` names a random-weight model (``dummy:LFM2-350M``)."""
    return path.startswith(PREFIX)


def load_config(path: str, revision: str = "main") -> ModelConfig:
    """Shape of the model at ``path``: a folder, a Hub id or ``dummy:NAME``.

    Raises:
        ModelError: it cannot be found, read, or run by this engine.
    """
    if is_dummy(path):
        return dummy_config(path)
    return ModelConfig.from_folder(resolve_folder(path, revision, ("*.json", "*.jinja")))
