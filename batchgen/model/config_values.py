"""Typed look-ups in a parsed ``config.json``, under each of the names that releases have used for a value.

A missing or impossible value is a ModelError that names the file and the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from batchgen.core.errors import ModelError
from batchgen.core.model_files import is_token_id, token_ids
from batchgen.core.units import shown
from batchgen.model.config import Experts, LayerShape, ModelConfig, Rope

T = TypeVar("T")
MAX_LAYERS = 128  # more than any release has; a larger number only delays the error
ROPE_KINDS = ("default", "linear", "llama3", "proportional", "yarn")
_YARN_BETAS = (("fast", 32.0), ("slow", 1.0))  # rotations within the old context, by default
_MAX_INT = 2**31 - 1  # the limit of the kernels' 32-bit indices
_MAX_FLOAT = 3.4e38  # the limit of float32


class ConfigValues:
    """The values of one ``config.json``; ``location`` names it in errors. Each method raises ModelError."""

    def __init__(self, raw: Mapping[str, Any], location: str) -> None:
        self.raw = raw
        self.location = location

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.location}: {message}")

    def get(self, *names: str, default: Any = ...) -> Any:
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is ...:
            raise self.error(f"has no {names[0]!r}")
        return default

    def _agreed(self, names: tuple[str, ...], default: Any) -> Any:
        """The value under any of the names; an error if two disagree, since families differ in which one counts."""
        values = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        (first, value), *others = values.items() or [(names[0], self.get(names[0], default=default))]
        for name, other in others:
            if other != value:
                raise self.error(f"{first} is {shown(value)} and {name} {shown(other)}; keep the one that is meant")
        return value

    def integer(self, *names: str, default: Any = ..., minimum: int = 1, maximum: int = _MAX_INT) -> int:
        value = self._agreed(names, default)
        if type(value) is not int or value < minimum:
            expected = "a positive integer" if minimum == 1 else f"an integer from {minimum} up"
            raise self.error(f"{self._name(names)} must be {expected}, not {shown(value)}")
        if value > maximum:
            raise self.error(f"{self._name(names)} must be at most {maximum}, not {shown(value)}")
        return value

    def number(self, *names: str, default: Any = ...) -> float:
        value = self._agreed(names, default)
        if type(value) not in (int, float) or not 0 < value <= _MAX_FLOAT:
            what = "a positive number that float32 can hold"
            raise self.error(f"{self._name(names)} must be {what}, not {shown(value)}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        return self._typed("true or false", names, default)

    def text(self, *names: str, default: str) -> str:
        return self._typed("a string", names, default)

    def _typed(self, expected: str, names: tuple[str, ...], default: T) -> T:
        """A value of the type of ``default``, which errors call ``expected``; for texts the newest name counts."""
        value = self.get(*names, default=default) if isinstance(default, str) else self._agreed(names, default)
        if not isinstance(value, type(default)):
            raise self.error(f"{self._name(names)} must be {expected}, not {shown(value)}")
        return value

    def _name(self, names: tuple[str, ...]) -> str:
        """The name among these that the file has, for errors; the first if it lacks all of them."""
        return next((name for name in names if self.raw.get(name) is not None), names[0])

    def rope(self, default_theta: float) -> Rope:
        """The rotary embedding, with ``default_theta`` if the config does not give a base. Unknown kinds are refused.

        As in transformers, a base in ``rope_parameters`` (transformers 5) wins over ``rope_theta`` (older files, which
        have ``rope_scaling`` too), and the original number of positions is taken from the config itself first.
        """
        new, old = (self.section(name, is_needed=False) for name in ("rope_parameters", "rope_scaling"))
        for part in (new, old):
            if nested := [name for name, value in part.raw.items() if isinstance(value, Mapping)]:
                raise part.error(f"{shown(nested[0])}: values for some of the layers are not supported in this family")
        rope_types = [values.text("rope_type", "type", default="default") for values in (new, old)]
        for rope_type in rope_types:
            if rope_type not in ROPE_KINDS:
                raise self.error(f"rope scaling {shown(rope_type)} is not supported (known: {', '.join(ROPE_KINDS)})")
        if new.raw and old.raw and new.raw != old.raw:
            raise self.error("rope_parameters and rope_scaling disagree; keep only one of them")
        theta = self.number("rope_theta", "theta", default=default_theta)
        theta = new.number("rope_theta", default=old.number("rope_theta", default=theta))
        if theta < 1:
            raise self.error(f"rope_theta must be at least 1, or angles exceed float32, not {theta}")
        values, rope_type = (old, rope_types[1]) if rope_types[0] == "default" else (new, rope_types[0])
        for part in (self, new, old) if rope_type != "proportional" else ():
            if (share := part.number("partial_rotary_factor", default=1.0)) != 1:
                raise part.error(f"partial_rotary_factor {share:g} is not supported with rope_type {rope_type!r}")
        positions = self.integer("original_max_position_embeddings", default=0, minimum=0)
        return values._scaled(theta, rope_type, positions)

    def _scaled(self, theta: float, rope_type: str, positions: int) -> Rope:
        """The rotary embedding of this type; ``positions`` comes from the config itself, or is 0 if it lacks them."""
        if rope_type == "llama3":
            low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
            if low >= high:
                raise self.error(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
            positions = positions or self.integer("original_max_position_embeddings")
            return Rope(theta, rope_type, self.number("factor"), low, high, positions)
        if rope_type == "yarn":
            return self._yarn(theta, positions or self.integer("original_max_position_embeddings"))
        if rope_type == "linear":
            return Rope(theta, rope_type, self.number("factor"))
        if rope_type == "proportional":
            share = self.number("partial_rotary_factor", default=1.0)
            if share > 1:
                raise self.error(f"partial_rotary_factor must be at most 1, not {share:g}")
            return Rope(theta, rope_type, rotated_share=share)
        return Rope(theta)

    def _yarn(self, theta: float, positions: int) -> Rope:
        """YaRN (arXiv:2309.00071); cosines and sines have a factor, given or from ``factor`` as in the paper."""
        self.expect("truncate", True, "it is not computed here")
        factor, fast, slow = self.number("factor"), *(self.number(f"beta_{n}", default=d) for n, d in _YARN_BETAS)
        if theta == 1 or fast < slow or not 1 <= factor <= _MAX_INT / positions:
            values = f"factor {factor:g}, beta_fast {fast:g}, beta_slow {slow:g}, {positions} positions"
            raise self.error(f"{values}: no context can be stretched by these")
        scales = [self.get(name, default=None) for name in ("mscale", "mscale_all_dim")]
        weights = [self.number("mscale"), self.number("mscale_all_dim")] if all(scales) else [1.0, 0.0]
        attention, whole = (0.1 * weight * math.log(factor) + 1 for weight in weights)
        scale = self.number("attention_factor", default=attention / whole)
        return Rope(theta, "yarn", factor, slow, fast, positions, scale=scale)

    def experts(self, scores: str, *, is_normalized: bool, **more: Any) -> Experts:
        """Experts with the function ``scores``; ``is_normalized``: the config's default; ``more``: further fields."""
        for name in ("num_shared_experts", "n_shared_experts", "shared_expert_intermediate_size"):
            self.expect(name, 0, "experts that every token meets are not supported")
        num_experts = self.integer("num_experts", "num_local_experts")
        num_active = self.integer("num_experts_per_tok", maximum=num_experts)
        is_normalized = self.flag("norm_topk_prob", default=is_normalized)
        ff_dim = self.integer("moe_intermediate_size")
        return Experts(num_experts, num_active, ff_dim, scores, is_normalized=is_normalized, **more)

    def layer_types(self, *names: str) -> tuple[str, ...]:
        """The kind of each layer, as ``layer_types`` lists them."""
        num_layers, listed = self.integer("num_hidden_layers", maximum=MAX_LAYERS), self.get("layer_types")
        if not isinstance(listed, list) or len(listed) != num_layers or not all(name in names for name in listed):
            raise self.error(f"layer_types must name {num_layers} layers as {' or '.join(map(repr, names))}")
        return tuple(listed)

    def section(self, name: str, *, is_needed: bool = True) -> ConfigValues:
        """A nested object, named in its errors; an empty one if it is missing, unless it ``is_needed``."""
        empty: dict[str, Any] = {}
        if is_needed:
            self.get(name)
        return ConfigValues(self._typed("an object", (name,), empty), f"{self.location}: {shown(name)[1:-1]}")

    def expect(self, name: str, value: object, why: str) -> None:
        """Refuse any value except the supported one, ``value``, which is the default; ``why`` ends the message."""
        if (other := self.get(name, default=value)) != value:
            raise self.error(f"{name} is {shown(other)}; {why}")

    def refuse_window(self, default: int | None = None) -> None:
        """Refuse a window of positions that a text could exceed; ``default`` is used if the config does not say."""
        if self.raw.get("sliding_window", default) is None:
            return
        window = self.integer("sliding_window", default=default)
        if window < self.integer("max_position_embeddings"):
            verb = "is" if "sliding_window" in self.raw else "is missing, which means"
            remedy = "not supported in this family; write null if the model was trained without one"
            raise self.error(f"sliding_window {verb} {window}, which is {remedy}")

    def refuse(self, *names: str) -> None:
        """Refuse a flag that is switched on."""
        for name in names:
            if self.flag(name, default=False):
                raise self.error(f"{name} true is not computed here")

    def model(
        self,
        layers: Sequence[LayerShape],
        tensor_names: Mapping[str, str],
        *,
        norm_eps: float,
        is_tied: bool,
        head_dim: int | None = None,
        **more: Any,
    ) -> ModelConfig:
        """The shape of a model with these layers; ``more`` are further fields.

        ``norm_eps``, ``is_tied`` and ``head_dim`` (by default the heads' share of the width) are used if the config
        does not say.
        """
        num_heads, hidden_size = (
            self.integer("num_attention_heads", "num_heads"),
            self.integer("hidden_size", "block_dim"),
        )
        return ModelConfig(
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            layers=tuple(layers),
            num_heads=num_heads,
            num_kv_heads=self.integer("num_key_value_heads", default=num_heads),
            head_dim=self.integer("head_dim", default=head_dim or hidden_size // num_heads),
            norm_eps=self.number("norm_eps", "rms_norm_eps", "block_norm_eps", default=norm_eps),
            max_position_embeddings=max(
                self.integer("max_position_embeddings"),
                *(layer.rope.num_positions for layer in layers if layer.rope),
                0,
            ),
            tie_embedding=self.flag("tie_embedding", "tie_word_embeddings", default=is_tied),
            bos_token_id=self._bos_token_id(),
            eos_token_ids=token_ids(self.raw, "eos_token_id", self.location),
            dtype=self.text("dtype", "torch_dtype", default="bfloat16"),
            tensor_names=tensor_names,
            **more,
        )

    def _bos_token_id(self) -> int | None:
        value: int | None = self.get("bos_token_id", default=None)
        if value is not None and not is_token_id(value):
            raise self.error(f"bos_token_id must be a token id, not {shown(value)}")
        return value


class Family(NamedTuple):
    """A family: name in messages, published ``config.json`` by model name, and their parser (raises ModelError)."""

    title: str
    shapes: Mapping[str, Mapping[str, Any]]
    read_config: Callable[[ConfigValues], ModelConfig]
