"""The one place where sampling values are judged: of the job's [sampling], a row's overrides, an OpenAI body.

Names, ranges and meanings are vLLM's. A key is one line of ``_RULES``; it knows no file format and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from batchgen.records import SamplingParams

_MIN_TEMPERATURE = 0.01  # vLLM raises smaller positive ones to this: dividing logits by less overflows float16
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


class ParamError(ValueError):
    """A sampling key that does not exist or a value that makes no sense; ``str()`` names key, value and range."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas stores an integer column with gaps as floats
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return value

    return parse


def _number(low: float, high: float = math.inf, *, above_low: bool = False) -> Callable[[Any], float]:
    bounds = f"{'above' if above_low else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")

    def parse(value: object) -> float:
        if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 1e300:
            number = float(value)
            if low <= number <= high and not (above_low and number == low):
                return number
        raise ValueError(f"must be a finite number {bounds}")

    return parse


def _temperature(value: object) -> float:
    number = _number(0)(value)
    return max(number, _MIN_TEMPERATURE) if number else 0.0


def _top_k(value: object) -> int:
    return max(_integer(-1, _INT32_MAX)(value), 0)  # vLLM writes "off" as 0 or -1


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of token ids")
    try:
        return tuple(_integer(0, _INT32_MAX)(item) for item in value)
    except ValueError:
        raise ValueError(f"must be a list of token ids from 0 to {_INT32_MAX}") from None


_RULES: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _integer(1, _INT32_MAX),
    "min_tokens": _integer(0, _INT32_MAX),
    "temperature": _temperature,
    "top_p": _number(0, 1, above_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "seed": _integer(-_INT64_MAX - 1, _INT64_MAX),
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
}

# Keys that vLLM has and this engine has not yet: the values that ask for nothing pass, others are refused.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "stop": ([], ""),
    "n": (1,),
    "logprobs": (False, 0),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "preset": (),
}

PARAM_KEYS: frozenset[str] = frozenset(_RULES) | frozenset(_UNSUPPORTED)


def merge_params(base: SamplingParams, overrides: Mapping[str, Any]) -> SamplingParams:
    """``base`` with the given values in place of its own; a null means "not given".

    A temperature between 0 and 0.01 becomes 0.01 and ``top_k = -1`` becomes 0, as in vLLM. Raises ParamError on
    an unknown key, a wrong type, a value out of range, or ``min_tokens`` above ``max_tokens``.
    """
    changes = {key: _parsed(key, value) for key, value in overrides.items() if value is not None}
    for key in changes.keys() & _UNSUPPORTED.keys():
        del changes[key]
    if not changes:
        return base
    merged = replace(base, **changes)
    if merged.min_tokens > merged.max_tokens:
        raise ParamError("min_tokens", f"min_tokens = {merged.min_tokens} is above max_tokens = {merged.max_tokens}")
    return merged


def _parsed(key: str, value: Any) -> Any:
    if key in _UNSUPPORTED:
        if value in _UNSUPPORTED[key]:
            return None
        raise ParamError(key, f"{key} = {_shown(value)}: this key is not supported")
    if key not in _RULES:
        close = get_close_matches(key, PARAM_KEYS, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_RULES)}"
        raise ParamError(key, f"no sampling key {_shown(key)}; {hint}")
    try:
        return _RULES[key](value)
    except ValueError as error:
        raise ParamError(key, f"{key} = {_shown(value)} {error}") from None


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "(a huge number)"  # Python refuses to print one of more than 4300 digits
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
