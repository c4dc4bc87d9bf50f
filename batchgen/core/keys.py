"""Declarations of settings keys: a dataclass field with the kind of its values, its help line and its default.

Loader, flags, help and resume read them, so a key is declared only here; sampling values are vLLM's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from batchgen.core.structured import canonical
from batchgen.core.synonyms import synonym_of
from batchgen.core.units import shown

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_SAMPLES = 128
MAX_LABELS = 1000
MAX_BAD_WORDS = 1000
# Variables of a chat template that something else sets, in addition to all that end in "_token".
_SET_ELSEWHERE = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_SET_ELSEWHERE |= {"strftime_now", "raise_exception"}
_MIN_TEMPERATURE = 0.01  # vLLM raises smaller positive ones to this: dividing logits by less overflows float16


class Kind(NamedTuple):
    """The values that a key takes; ``metavar`` names the value in help, and is "" for a switch.

    ``parse`` turns a TOML or JSON value into the field's, or raises ``ValueError`` without naming key or value.
    ``from_text`` turns a flag's text into TOML's value. ``repeats``: the flag may be given several times. ``none`` is
    how a job file writes None.
    """

    parse: Callable[[Any], Any]
    metavar: str = ""
    from_text: Callable[[str], object] = str
    choices: tuple[str, ...] = ()
    repeats: bool = False
    none: str | None = None

    def then(self, convert: Callable[[Any], Any], **changes: Any) -> Kind:
        """This kind with ``convert`` applied to what ``parse`` gives; it may raise ``ValueError`` as well."""
        parse = self.parse
        return self._replace(parse=lambda value: convert(parse(value)), **changes)


Resume = Literal["same", "compared", "free"]


class Key(NamedTuple):
    """A declared key. ``help`` describes the value, for a switch the value that is not the default.

    ``resume`` says what a resume may change: nothing, because outputs depend on the value ("same"); the value, but not
    what it refers to, such as the content of a file ("compared"); or everything ("free").
    """

    name: str
    default: Any
    kind: Kind
    help: str
    flag: str
    resume: Resume

    def written(self, value: Any) -> Any:
        """A value of the field as a job file and ``job.json`` hold it."""
        return self.kind.none if value is None else value


def key(kind: Kind, text: str, default: Any, *, flag: str = "", resume: Resume = "same") -> Any:
    """Declare a key: kind, help line, default, flag (if not ``--name``), and what a resume may change."""
    return field(default=default, metadata={"kind": kind, "help": text, "flag": flag, "resume": resume})


def keys_of(*classes: type[Any]) -> dict[str, Key]:
    """The keys that dataclasses declare, by name; fields without a declaration are left out."""
    items = [item for cls in classes for item in fields(cls) if item.metadata]
    flags = {item.name: item.metadata["flag"] or item.name.replace("_", "-") for item in items}
    return {item.name: Key(item.name, item.default, **{**item.metadata, "flag": flags[item.name]}) for item in items}


def resembling(name: str, names: Sequence[str]) -> str:
    """A hint that names the most similar of ``names``, or ""."""
    close = get_close_matches(name, names, n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for an unknown name: its meaning in other tools, the most similar of ``names``, or all of them."""
    if synonym := synonym_of(name):
        return synonym.hint()
    return resembling(name, names) or f" (known: {', '.join(names)})"


def _number_in(text: str) -> object:
    """The number in a flag's text; other texts stay unchanged, since the kind's own message is better."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def integer(low: int, high: int = INT64_MAX, what: str = "an integer") -> Kind:
    """Integers from ``low`` to ``high``."""
    is_bounded = high < INT64_MAX or low < 0
    bounds = f"from {low} to {high}" if is_bounded else f"of at least {low} and at most 2**63 - 1"

    def parse(value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas stores an integer column with gaps as floats
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be {what} {bounds}")
        return value

    return Kind(parse, "N", _number_in)


def integer_or_auto(low: int, high: int = INT64_MAX) -> Kind:
    """Integers from ``low`` to ``high``, or "auto", which becomes None."""
    kind = integer(low, high, '"auto" or an integer')
    parse = kind.parse
    return kind._replace(parse=lambda value: None if value == "auto" else parse(value), metavar="N|auto", none="auto")


def number(low: float, high: float = math.inf, *, above_low: bool = False) -> Kind:
    """Finite numbers from ``low`` to ``high``; with ``above_low`` greater than ``low``."""
    lower = "above" if above_low else "of at least"
    upper = f" and at most {high:g}" if high < math.inf else ""

    def parse(value: object) -> float:
        if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 1e300:
            number = float(value) + 0.0  # never -0.0, whose bits read as a huge integer
            if low <= number <= high and not (above_low and number == low):
                return number
        raise ValueError(f"must be a finite number {lower} {low:g}{upper}")

    return Kind(parse, "NUMBER", _number_in)


def one_of(*choices: str) -> Kind:
    """One of a few words."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return Kind(parse, "|".join(choices), choices=choices)


def string(metavar: str = "TEXT", *, empty: bool = False) -> Kind:
    """Strings; the empty one only with ``empty``."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not (value or empty):
            raise ValueError(f"must be a string{'' if empty else ' that is not empty'}")
        return value

    return Kind(parse, metavar)


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _strings(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a string or a list of strings")
    if not all(items):
        raise ValueError("holds an empty string")
    return tuple(items)


def _template_kwargs(value: object) -> dict[str, Any] | None:
    try:
        kwargs = json.loads(value) if isinstance(value, str) else value
        json.dumps(kwargs, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        kwargs = None  # a date of TOML, NaN, a lone surrogate
    if not isinstance(kwargs, dict):
        raise ValueError('must be an object of JSON values, such as {"enable_thinking": false}')
    if reserved := [name for name in kwargs if name in _SET_ELSEWHERE or name.endswith("_token")]:
        raise ValueError(f"sets {shown(reserved[0])}, which batchgen sets itself")
    return kwargs or None


BOOL = Kind(_bool)
TEMPLATE_KWARGS = Kind(_template_kwargs, "JSON")
STRINGS = Kind(_strings, "TEXT", repeats=True)  # a list of strings that are not empty, or one such string
_num_likeliest = integer(0, INT32_MAX).parse
_bias = number(-100, 100).parse
_token_id = integer(0, INT32_MAX, "a list of token ids, each").parse


def _num_logprobs(value: object) -> object:
    if isinstance(value, bool):
        return 0 if value else None  # OpenAI's chats say true for "the chosen token's"
    return _num_likeliest(value)


def _max_repeats(value: int) -> int:
    if value == 1:
        raise ValueError("must be 0 (never) or an integer of at least 2")  # every token is there once
    return value


def _at_most(limit: int) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Takes up to ``limit`` different strings that can be tokenized."""

    def distinct(texts: tuple[str, ...]) -> tuple[str, ...]:
        if len(texts) > limit:
            raise ValueError(f"must be a list of at most {limit} strings, not of {len(texts)}")
        if max(map(len, texts), default=0) > MAX_STOP_CHARS:
            raise ValueError(f"holds a string of more than {MAX_STOP_CHARS} characters")
        return tuple(dict.fromkeys(_encodable(texts)))

    return distinct


def _labels(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) == 1:  # a single flag may list them, since a single label is useless
        texts = tuple(filter(None, map(str.strip, texts[0].split(","))))
    more = "; give --labels A,B, or --labels once per label" if len(texts) == 1 else ""
    if texts and not 2 <= len(texts) <= MAX_LABELS:
        raise ValueError(f"must be a list of 2 to {MAX_LABELS} strings, not of {len(texts)}{more}")
    if len(set(texts)) < len(texts):
        raise ValueError("holds the same label twice")
    return _encodable(texts)


def _encodable(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which no text has") from None
    return texts


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of token ids")
    return tuple(map(_token_id, value))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by ascending id, from an object, its JSON text, or pairs."""
    try:
        parsed: Any = json.loads(value) if isinstance(value, str) else value
        items = parsed.items() if isinstance(parsed, dict) else parsed
        pairs = [(token, bias) for token, bias in items if bias is not None]  # null: another row of the table has it
        biases = {_token_id(int(t) if isinstance(t, str) else t): _bias(bias) for t, bias in pairs}
    except (TypeError, ValueError, RecursionError):
        what = 'must be an object from token ids to numbers from -100 to 100, such as {"50256": -100}'
        raise ValueError(what) from None
    if len(biases) < len(pairs):
        raise ValueError("holds the same token twice")
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias))


TEMPERATURE = number(0).then(lambda value: max(value, _MIN_TEMPERATURE) if value else 0.0)
TOP_K = integer(-1, INT32_MAX).then(lambda value: max(value, 0))  # vLLM writes "off" as 0 or -1
LOGPROBS = Kind(_num_logprobs, "K", _number_in)
THINKING_BUDGET = integer(-1, INT32_MAX).then(lambda value: None if value == -1 else value)  # -1 as in vLLM
MAX_REPEATS = integer(0, INT32_MAX).then(_max_repeats)
STOP = STRINGS.then(_at_most(MAX_STOP_STRINGS))
BAD_WORDS = STRINGS.then(_at_most(MAX_BAD_WORDS))
LABELS = STRINGS.then(_labels)
STRUCTURED = Kind(canonical, "JSON|FILE")
TOKEN_IDS = Kind(_token_ids, "IDS", lambda text: [_number_in(part) for part in text.split(",")])
LOGIT_BIAS = Kind(_logit_bias, "JSON")
ALLOWED_TOKEN_IDS = TOKEN_IDS.then(lambda ids: tuple(sorted(set(ids))))
