"""The one place where sampling values are judged: of the job's [sampling], a row's overrides, an OpenAI body.

Names, ranges and meanings are vLLM's. A key is one line of ``_RULES``; it knows no file format and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from batchgen.config.presets import PRESET_NAMES, card_values
from batchgen.core.records import SamplingParams
from batchgen.core.units import shown

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_SAMPLES = 128
MAX_LOGPROBS = 20  # as of OpenAI's API, and vLLM's default
MAX_CHOICES = 1000
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
            number = float(value) + 0.0  # never -0.0, whose bits are those of a huge number
            if low <= number <= high and not (above_low and number == low):
                return number
        raise ValueError(f"must be a finite number {bounds}")

    return parse


def _temperature(value: object) -> float:
    number = _number(0)(value)
    return max(number, _MIN_TEMPERATURE) if number else 0.0


def _top_k(value: object) -> int:
    return max(_integer(-1, _INT32_MAX)(value), 0)  # vLLM writes "off" as 0 or -1


def _num_logprobs(value: object) -> int | None:
    if isinstance(value, bool):
        return 0 if value else None  # OpenAI's chats say true for "the chosen token's"
    return _integer(0, MAX_LOGPROBS)(value)


def _max_repeats(value: object) -> int:
    number = _integer(0, _INT32_MAX)(value)
    if number == 1:
        raise ValueError("must be 0 (never) or an integer of at least 2")  # every token is there once
    return number


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _texts(value: object, low: int, high: int, max_chars: float = math.inf) -> tuple[str, ...]:
    """``value`` if it is a list of sound texts; raises ValueError saying what is wrong, without the value."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of strings")
    if not low <= len(value) <= high:
        raise ValueError(f"must be a list of {low} to {high} strings, not of {len(value)}")
    if not all(value):
        raise ValueError("holds an empty string")
    if max(map(len, value), default=0) > max_chars:
        raise ValueError(f"holds a string of more than {max_chars} characters")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no text") from None
    return tuple(value)


def _stop(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    return tuple(dict.fromkeys(_texts(items, 0, MAX_STOP_STRINGS, MAX_STOP_CHARS)))


def _choices(value: object) -> tuple[str, ...]:
    if value in ([], ()):
        return ()  # a row that is not to be scored in a job whose other rows are
    choices = _texts(value, 2, MAX_CHOICES)
    if len(set(choices)) < len(choices):
        raise ValueError("holds the same choice twice")
    return choices


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of token ids")
    try:
        return tuple(_integer(0, _INT32_MAX)(item) for item in value)
    except ValueError:
        raise ValueError(f"must be a list of token ids from 0 to {_INT32_MAX}") from None


_RULES: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _integer(0, _INT32_MAX),
    "min_tokens": _integer(0, _INT32_MAX),
    "temperature": _temperature,
    "top_p": _number(0, 1, above_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),  # vLLM: above 0; beyond these, float32 logits overflow
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "seed": _integer(-_INT64_MAX - 1, _INT64_MAX),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "n": _integer(1, MAX_SAMPLES),
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    "max_repeats": _max_repeats,
    "choices": _choices,
}

PARAM_KEYS: tuple[str, ...] = (*_RULES, "preset")


def merge_params(
    base: SamplingParams, overrides: Mapping[str, Any], card: Mapping[str, Any] | None = None
) -> SamplingParams:
    """``base`` with the given values in place of its own; a null means "not given".

    ``preset = "card"`` stands for the values of ``card``, by default those of LFM2's card: they replace the base's,
    and what ``overrides`` says besides wins over them. A temperature between 0 and 0.01 becomes 0.01 and
    ``top_k = -1`` becomes 0, as in vLLM. Raises ParamError on an unknown key, a wrong type, a value out of range, or
    values that contradict each other.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    preset = given.pop("preset", None)
    if preset is not None:
        if preset not in PRESET_NAMES:
            raise ParamError("preset", f"preset = {shown(preset, 80)} is not known; known is {', '.join(PRESET_NAMES)}")
        given = {**(card_values("") if card is None else card), **given}
    if not given:
        return base
    merged = replace(base, **{key: _parsed(key, value) for key, value in given.items()})
    for keys, message in _contradictions(merged):
        raise ParamError(next((key for key in keys if key in given), keys[0]), message)
    return merged


def _contradictions(params: SamplingParams) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values that are each fine but not together: the keys it is about, the most telling first, and a sentence."""
    p = params
    if p.choices:
        asked = {"n": p.n > 1, "stop": p.stop, "max_repeats": p.max_repeats}
        asked |= {"logprobs": p.logprobs is not None, "prompt_logprobs": p.prompt_logprobs is not None}
        for key in [key for key, is_asked in asked.items() if is_asked]:
            value = shown(getattr(p, key), 80)
            yield (key, "choices"), f"{key} = {value} does not go with choices: they are scored, nothing is generated"
    if p.max_tokens == 0:
        keys = ("max_tokens", "prompt_logprobs", "choices")
        if p.prompt_logprobs is None:
            yield keys, "max_tokens = 0 must be at least 1: only a row with prompt_logprobs may generate nothing"
        if p.n > 1:
            yield ("n", "max_tokens"), f"n = {p.n} does not go with max_tokens = 0: nothing is generated"
    if p.min_tokens > p.max_tokens:
        message = f"min_tokens = {p.min_tokens} is above max_tokens = {p.max_tokens}"
        yield ("min_tokens", "max_tokens"), message


def _parsed(key: str, value: Any) -> Any:
    if key not in _RULES:
        close = get_close_matches(key, PARAM_KEYS, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(PARAM_KEYS)}"
        raise ParamError(key, f"no sampling key {shown(key, 80)}; {hint}")
    try:
        return _RULES[key](value)
    except ValueError as error:
        raise ParamError(key, f"{key} = {shown(value, 80)} {error}") from None
