"""The shape of an LFM2 model, read from the checkpoint's own ``config.json``.

Knows every alias under which releases have written a value and refuses what the forward pass does not
implement (another architecture, a rope scaling, a biased attention). Imports no torch, so planning can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.model_files import read_object
from batchgen.core.units import shown

MODEL_TYPE = "lfm2"
ATTENTION = "full_attention"
CONV = "conv"
LANES = 16  # values per vector of the CPU kernels: keys and head_dim are padded to whole vectors
_MAX_LAYERS = 128  # four times those of the largest release; each costs time before a file is found to lack it
_MAX_INT = 2**31 - 1  # what the kernels' 32-bit indices hold
_MAX_FLOAT = 3.4e38  # what float32 holds
_MAX_BYTES = 1 << 20  # of a config file; those published have 1 to 2 kB


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense LFM2, all derived sizes resolved.

    ``layer_types`` holds ``"conv"`` or ``"full_attention"`` per layer; ``ff_dim`` is the feed-forward width
    the weights really have; ``eos_token_ids`` end a generation.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ff_dim: int
    conv_l_cache: int
    conv_bias: bool
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_embedding: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layer_types)

    @property
    def num_attention_layers(self) -> int:
        """Number of blocks that need KV memory."""
        return self.layer_types.count(ATTENTION)

    @property
    def num_conv_layers(self) -> int:
        """Number of blocks that carry a convolution state."""
        return self.layer_types.count(CONV)

    @property
    def num_tail_layers(self) -> int | None:
        """Blocks after the last one with attention; None if none has any."""
        return self.layer_types[::-1].index(ATTENTION) if ATTENTION in self.layer_types else None

    @property
    def tail_reach(self) -> int | None:
        """Earlier tokens that the blocks after the last attention look back on; None if there is no attention."""
        return None if self.num_tail_layers is None else self.num_tail_layers * (self.conv_l_cache - 1)

    @property
    def linear_params_per_token(self) -> int:
        """Weights of all linears but the output projection; to multiply a token with one costs 2 FLOP."""
        h, d = self.hidden_size, self.head_dim
        conv = 4 * h * h
        attention = h * d * (2 * self.num_heads + 2 * self.num_kv_heads)
        feed_forward = 3 * h * self.ff_dim
        return self.num_conv_layers * conv + self.num_attention_layers * attention + self.num_layers * feed_forward

    @property
    def tail_params_per_token(self) -> int:
        """Those of them behind the last attention's keys and values, met by tokens that something depends on."""
        if self.num_tail_layers is None:
            return 0
        h = self.hidden_size
        attention = 2 * h * self.head_dim * self.num_heads
        feed_forward = 3 * h * self.ff_dim
        return attention + self.num_tail_layers * 4 * h * h + (self.num_tail_layers + 1) * feed_forward

    @property
    def logits_params_per_token(self) -> int:
        """Weights of the output projection, multiplied only where logits are needed."""
        return self.vocab_size * self.hidden_size

    def kv_block_bytes(self, block_size: int, itemsize: int) -> int:
        """Bytes of one block over all layers, its padding and the convolution state at its end included."""
        per_layer = self.num_kv_heads * padded(self.head_dim) * (padded(block_size) + block_size)
        return self.num_attention_layers * per_layer * itemsize + self.conv_slot_bytes(itemsize)

    def conv_slot_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's convolution state over all layers."""
        return self.num_conv_layers * (self.conv_l_cache - 1) * self.hidden_size * itemsize

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Build from the parsed ``config.json``; ``where`` names it in errors.

        Raises:
            ModelError: another architecture, a missing or impossible value, an unknown rope scaling.
        """
        values = _Values(raw, where)
        values.refuse_unsupported()
        num_heads = values.integer("num_attention_heads", "num_heads")
        hidden_size = values.integer("hidden_size", "block_dim")
        config = cls(
            vocab_size=values.integer("vocab_size"),
            hidden_size=hidden_size,
            layer_types=values.layer_types(),
            num_heads=num_heads,
            num_kv_heads=values.integer("num_key_value_heads", default=num_heads),
            head_dim=values.integer("head_dim", default=hidden_size // num_heads),
            ff_dim=values.ff_dim(),
            conv_l_cache=values.integer("conv_L_cache"),
            conv_bias=values.flag("conv_bias", default=False),
            norm_eps=values.number("norm_eps", "block_norm_eps", default=1e-5),
            rope_theta=values.rope_theta(),
            max_position_embeddings=values.integer("max_position_embeddings"),
            tie_embedding=values.flag("tie_embedding", "tie_word_embeddings", default=True),
            bos_token_id=values.bos_token_id(),
            eos_token_ids=values.eos_token_ids(),
            dtype=values.text("torch_dtype", "dtype", default="bfloat16"),
        )
        if config.num_heads % config.num_kv_heads:
            raise values.error(f"num_attention_heads {config.num_heads} is no multiple of {config.num_kv_heads}")
        if config.head_dim % 2:
            raise values.error(f"head_dim {config.head_dim} is odd; rotary embedding needs pairs")
        return config

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder/config.json`` (end tokens of ``generation_config.json`` are added).

        Raises:
            ModelError: missing or broken file, or anything ``from_dict`` refuses.
        """
        raw = read_object(folder / "config.json", _MAX_BYTES)
        config = cls.from_dict(raw, str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.exists():
            return config
        extra = _as_ids(read_object(generation, _MAX_BYTES).get("eos_token_id"), str(generation))
        merged = tuple(dict.fromkeys(config.eos_token_ids + extra))
        return replace(config, eos_token_ids=merged)


def padded(n: int) -> int:
    """``n`` rounded up to whole vectors of ``LANES`` values."""
    return -(-n // LANES) * LANES


def _as_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_id(i) for i in ids):
        raise ModelError(f"{where}: eos_token_id must be a token id or a list of them, not {shown(value)}")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT


class _Values:
    """Typed look-ups under any of a value's names."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.where}: {message}")

    def get(self, *names: str, default: Any = ...) -> Any:
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is ...:
            raise self.error(f"has no {names[0]!r}")
        return default

    def integer(self, *names: str, default: Any = ..., most: int = _MAX_INT) -> int:
        value = self.get(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{names[0]} must be a positive integer, not {shown(value)}")
        if value > most:
            raise self.error(f"{names[0]} must be at most {most}, not {shown(value)}")
        return value

    def number(self, *names: str, default: float) -> float:
        value = self.get(*names, default=default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_FLOAT:
            raise self.error(f"{names[0]} must be a positive number that float32 can hold, not {shown(value)}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.error(f"{names[0]} must be true or false, not {shown(value)}")
        return value

    def text(self, *names: str, default: str) -> str:
        value = self.get(*names, default=default)
        if not isinstance(value, str):
            raise self.error(f"{names[0]} must be a string, not {shown(value)}")
        return value

    def rope(self, name: str) -> Mapping[str, Any]:
        """``rope_parameters`` or ``rope_scaling``; empty where the config has none."""
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self.error(f"{name} must be an object, not {shown(value)}")
        return value

    def refuse_unsupported(self) -> None:
        model_type = self.raw.get("model_type")
        if model_type != MODEL_TYPE:
            raise self.error(f"model_type is {shown(model_type)}; this engine runs {MODEL_TYPE!r} (dense LFM2) only")
        for rope in (self.rope("rope_parameters"), self.rope("rope_scaling")):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise self.error(f"rope scaling {shown(kind)} is not supported")
        if self.raw.get("quantization_config") is not None:
            raise self.error("quantized checkpoints are not supported; use the bfloat16 release")

    def layer_types(self) -> tuple[str, ...]:
        num_layers = self.integer("num_hidden_layers", most=_MAX_LAYERS)
        listed = self.get("layer_types", default=None)
        if listed is None:
            attention = self.get("full_attn_idxs")
            if not isinstance(attention, list) or not all(type(i) is int and 0 <= i < num_layers for i in attention):
                raise self.error(f"full_attn_idxs must list layers from 0 to {num_layers - 1}, not {shown(attention)}")
            attention = set(attention)
            listed = [ATTENTION if i in attention else CONV for i in range(num_layers)]
        if (
            not isinstance(listed, list)
            or len(listed) != num_layers
            or not all(kind in (ATTENTION, CONV) for kind in listed)
        ):
            raise self.error(f"layer_types must name {num_layers} layers as {ATTENTION!r} or {CONV!r}")
        return tuple(listed)

    def ff_dim(self) -> int:
        width = self.integer("block_ff_dim", "intermediate_size")
        if not self.flag("block_auto_adjust_ff_dim", default=True):
            return width
        scaled = self.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3)
        if not 1 <= scaled < 2**31:
            raise self.error(f"block_ff_dim {width} makes feed-forward layers of width {scaled:g}")
        multiple = self.integer("block_multiple_of", default=256)
        return multiple * -(-int(scaled) // multiple)

    def rope_theta(self) -> float:
        nested = _Values(self.rope("rope_parameters"), self.where)
        theta = nested.number("rope_theta", default=self.number("rope_theta", "theta", default=1e6))
        if theta < 1:
            raise self.error(f"rope_theta must be at least 1, or angles grow beyond float32, not {theta}")
        return theta

    def bos_token_id(self) -> int | None:
        value: int | None = self.get("bos_token_id", default=None)
        if value is not None and not _is_id(value):
            raise self.error(f"bos_token_id must be a token id, not {shown(value)}")
        return value

    def eos_token_ids(self) -> tuple[int, ...]:
        return _as_ids(self.get("eos_token_id", default=None), self.where)
