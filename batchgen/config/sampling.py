"""Merging and checking of sampling values: of a job's [sampling] and [classify], a row's overrides, an OpenAI body.

``SamplingParams`` declares single values; combinations that contradict each other are refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from batchgen.core.errors import ModelError
from batchgen.core.keys import Key, keys_of, nearest, one_of
from batchgen.core.model_files import GENERATION_CONFIG, generation_config
from batchgen.core.records import SamplingParams
from batchgen.core.structured import OLD_NAMES, canonical, from_response_format, object_of, parsed
from batchgen.core.units import shown

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # keys of generation_config.json
# Unsupported keys of generation_config.json that would change the answer, with the values that do not.
_ALWAYS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (None, 1)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "penalty_alpha"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "stop_strings", "suppress_tokens", "begin_suppress_tokens"), (None, [])),
    **dict.fromkeys(("sequence_bias", "exponential_decay_length_penalty", "watermarking_config"), (None, {}, [])),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "dola_layers", "constraints"), (None,)),
}
_IF_DRAWN = {"typical_p": (None, 1), "epsilon_cutoff": (None, 0), "eta_cutoff": (None, 0), "top_h": (None,)}


class ParamError(ValueError):
    """An unknown sampling key or an impossible value; ``str()`` names key, value and range."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


_PARAMS = keys_of(SamplingParams)
CLASSIFY_KEYS = {name: _PARAMS[name] for name in ("labels", "by")}
SAMPLING_KEYS = {
    **{name: item for name, item in _PARAMS.items() if name not in CLASSIFY_KEYS},
    "generation_config": Key(
        "generation_config",
        "none",
        one_of("none", "auto"),
        "auto: the model's sampling values",
        "generation-config",
        "same",
    ),
}
# Ways to ask for structured outputs in a row, with their translations to the first one.
_WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "structured_outputs": object_of,
    "response_format": from_response_format,
}
ROW_KEYS = tuple(dict.fromkeys((*_PARAMS, *_WAYS)))
_GIVES_A_KEY = re.compile(rf"\A\s*\[?\s*{{|\b(?:{'|'.join(ROW_KEYS)})\b[\"']?\s*[:=]")
_Made = TypeVar("_Made")
_PARSE = {name: item.kind.parse for name, item in _PARAMS.items()}


def recommended_values(folder: Path) -> Mapping[str, Any] | None:
    """Sampling values of a model's ``generation_config.json``, if it has one, for ``generation_config = "auto"``.

    ``do_sample = false`` is greedy, as in transformers, and so is a file that has neither that key nor a temperature.
    Raises ModelError naming the file and a key whose value is impossible or not supported.
    """
    raw = generation_config(folder)
    if raw is None:
        return None
    values: dict[str, Any] = {}
    for name in _RECOMMENDED:
        try:
            values |= {} if raw.get(name) is None else {name: _PARSE[name](raw[name])}
        except ValueError as error:
            wrong = f"{name} = {shown(raw[name], 80)} {error}"
            raise ModelError(
                f"{folder / GENERATION_CONFIG}: {wrong}; fix it, or leave out sampling.generation_config"
            ) from None
    samples = raw.get("do_sample")
    if not isinstance(samples, bool | None):
        raise ModelError(f"{folder / GENERATION_CONFIG}: do_sample = {shown(samples, 80)} must be true or false")
    is_drawn = samples or (samples is None and "temperature" in values)
    for name, neutral in {**_ALWAYS, **(_IF_DRAWN if is_drawn else {})}.items():
        if raw.get(name) not in neutral:
            wrong = f"{name} = {shown(raw[name], 80)} is not done here"
            raise ModelError(
                f"{folder / GENERATION_CONFIG}: {wrong}; take it out of a copy, or leave out sampling.generation_config"
            )
    if is_drawn:
        return {"temperature": 1.0, **values}
    return {name: value for name, value in values.items() if name == "repetition_penalty"} | {"temperature": 0.0}


def values_of(params: SamplingParams) -> dict[str, Any]:
    """The values of ``params`` that are not the defaults, by key, as ``merge_params`` takes them."""
    default = SamplingParams()
    return {name: value for name in _PARAMS if (value := getattr(params, name)) != getattr(default, name)}


def merge_params(base: SamplingParams, overrides: Mapping[str, Any]) -> SamplingParams:
    """``base`` with the values of ``overrides`` in place of its own; null means "not given".

    All ``ROW_KEYS`` may be given. Raises ParamError on an unknown key, a wrong type, a value out of range, or values
    that contradict each other.
    """
    set_values = {key: value for key, value in overrides.items() if value is not None}
    values = {key: _parsed(key, value) for key, value in _translated(set_values).items()}
    if not values:
        return base
    merged = replace(base, **values)
    for keys, message in _contradictions(merged):
        raise ParamError(next((key for key in keys if key in values), keys[0]), message)
    return merged


def in_object(value: Any) -> Mapping[str, Any] | None:
    """The sampling values in a column ``sampling``: an object, or the JSON text of one; None for other data.

    Words and numbers are other data. Raises ValueError for a value that is not an object but seems to set a sampling
    key.
    """
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value) if value else {}
        except (ValueError, RecursionError):
            parsed = None
    elif value is None:
        return {}
    if isinstance(parsed, Mapping):
        return parsed
    if _GIVES_A_KEY.search(value if isinstance(value, str) else json.dumps(value, default=str)):
        raise ValueError("gives sampling values, but is not an object; if it is other data, rename the column")
    return None


def _parsed(key: str, value: Any) -> Any:
    if key in OLD_NAMES:
        raise ParamError(key, f'{key} is structured_outputs = {{"{OLD_NAMES[key]}": ...}} here, as in vLLM since 0.12')
    if key == "generation_config":
        raise ParamError(key, "generation_config is a key of jobs: a row gives the values themselves")
    if key not in _PARSE:
        raise ParamError(key, f"not a sampling key: {shown(key, 80)}{nearest(key, tuple(_PARSE))}")
    return _checked(key, value, _PARSE[key])


def _checked(key: str, value: object, parse: Callable[[Any], _Made]) -> _Made:
    """Result of ``parse`` on the value of a key; its ValueError becomes a ParamError that names both."""
    try:
        return parse(value)
    except ValueError as error:
        raise ParamError(key, f"{key} = {shown(value, 80)} {error}") from None


def _translated(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """``overrides`` with ``structured_outputs`` in place of its other names. Raises ParamError if two are given."""
    names = [name for name in _WAYS if name in overrides]
    if not names:
        return overrides
    outputs: dict[str, Any] = {}
    source = ""
    for name in names:
        parts = _checked(name, overrides[name], _WAYS[name])
        if any(part not in (None, False) for part in parts.values()):
            if source:
                raise ParamError(name, f"{source} and {name} both say what the text must look like: give one of them")
            source = name
        outputs |= parts
    text = _checked(source or names[0], overrides[source or names[0]], lambda _: canonical(outputs))
    return {**{key: value for key, value in overrides.items() if key not in _WAYS}, "structured_outputs": text}


def _contradictions(params: SamplingParams) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values that are impossible together: their keys, the main one first, and a sentence."""
    p = params
    if p.labels:
        conflicts = {"n": p.n > 1, "stop": p.stop, "max_repeats": p.max_repeats}
        conflicts |= {"logprobs": p.logprobs is not None, "prompt_logprobs": p.prompt_logprobs is not None}
        conflicts |= {"thinking_token_budget": p.thinking_token_budget is not None}
        conflicts |= {"logit_bias": p.logit_bias, "allowed_token_ids": p.allowed_token_ids, "bad_words": p.bad_words}
        for key in [key for key, is_set in conflicts.items() if is_set]:
            value = shown(getattr(p, key), 80)
            yield (key, "labels"), f"{key} = {value} does not go with labels: they are scored, nothing is generated"
    if p.structured_outputs:
        conflicts = {
            "labels": p.labels,
            "ignore_eos": p.ignore_eos,
            "min_tokens": p.min_tokens,
            "max_tokens": p.max_tokens == 0,
            "allowed_token_ids": p.allowed_token_ids,
            "bad_words": p.bad_words,
        }
        for key in [key for key, is_set in conflicts.items() if is_set]:
            why = f"{key} = {shown(getattr(p, key), 80)} does not go with structured_outputs"
            yield (key, "structured_outputs"), f"{why}: change {key}, or give structured_outputs = {{}} for free text"
    if p.structured_outputs and p.thinking_token_budget is not None and "after" not in parsed(p.structured_outputs):
        why = f"thinking_token_budget = {p.thinking_token_budget} does not go with structured_outputs"
        how = 'give its key after, such as "</think>", or the thoughts would have to fit too'
        yield ("thinking_token_budget", "structured_outputs"), f"{why}: {how}"
    if p.max_tokens == 0:
        keys = ("max_tokens", "prompt_logprobs", "labels")
        if p.prompt_logprobs is None:
            yield keys, "max_tokens = 0 must be at least 1: only a row with prompt_logprobs may generate nothing"
        if p.n > 1:
            yield ("n", "max_tokens"), f"n = {p.n} does not go with max_tokens = 0: nothing is generated"
    if p.min_tokens > p.max_tokens:
        message = f"min_tokens = {p.min_tokens} is above max_tokens = {p.max_tokens}"
        yield ("min_tokens", "max_tokens"), message


def keys_beyond_turns(params: SamplingParams) -> list[str]:
    """The given keys of [sampling] and [classify] that ``input.regenerate`` does not support."""
    is_beyond = {
        "n": params.n > 1,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "structured_outputs": bool(params.structured_outputs),
        "labels": bool(params.labels),
    }
    return [key for key, is_given in is_beyond.items() if is_given]
