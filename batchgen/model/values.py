"""Typed look-ups in a parsed ``config.json``, for the modules of the families.

A value is looked up under each of the names that releases have used for it. A missing or impossible value is a
ModelError that names the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from batchgen.core.errors import ModelError
from batchgen.core.model_files import is_token_id, token_ids
from batchgen.core.units import shown

T = TypeVar("T")
_MAX_INT = 2**31 - 1  # the limit of the kernels' 32-bit indices
_MAX_FLOAT = 3.4e38  # the limit of float32


class ConfigValues:
    """The values of one ``config.json``; ``where`` names it in errors. Each method raises ModelError."""

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
        if type(value) is not int or value < 1:
            raise self.error(f"{names[0]} must be a positive integer, not {shown(value)}")
        if value > most:
            raise self.error(f"{names[0]} must be at most {most}, not {shown(value)}")
        return value

    def number(self, *names: str, default: float) -> float:
        value = self.get(*names, default=default)
        if type(value) not in (int, float) or not 0 < value <= _MAX_FLOAT:
            raise self.error(f"{names[0]} must be a positive number that float32 can hold, not {shown(value)}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        return self._typed("true or false", names, default)

    def text(self, *names: str, default: str) -> str:
        return self._typed("a string", names, default)

    def _typed(self, kind: str, names: tuple[str, ...], default: T) -> T:
        """A value of the type of ``default``, which ``kind`` names in errors."""
        value = self.get(*names, default=default)
        if not isinstance(value, type(default)):
            raise self.error(f"{names[0]} must be {kind}, not {shown(value)}")
        return value

    def rope_theta(self, default: float) -> float:
        """Base of the rotary embedding, ``default`` if the config has none; any scaling of it is refused."""
        empty: dict[str, Any] = {}
        ropes = [self._typed("an object", (name,), empty) for name in ("rope_parameters", "rope_scaling")]
        for rope in ropes:
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise self.error(f"rope scaling {shown(kind)} is not supported")
        plain = self.number("rope_theta", "theta", default=default)
        theta = ConfigValues(ropes[0], self.where).number("rope_theta", default=plain)
        if theta < 1:
            raise self.error(f"rope_theta must be at least 1, or angles exceed float32, not {theta}")
        return theta

    def bos_token_id(self) -> int | None:
        value: int | None = self.get("bos_token_id", default=None)
        if value is not None and not is_token_id(value):
            raise self.error(f"bos_token_id must be a token id, not {shown(value)}")
        return value

    def eos_token_ids(self) -> tuple[int, ...]:
        return token_ids(self.raw, "eos_token_id", self.where)
