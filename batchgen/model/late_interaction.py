"""Late interaction: a vector for each token of a text, by settings of PyLate or sentence-transformers from 6 on.

Queries and documents are tokenized differently. Formulas: arXiv:2004.12832.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.model_files import read_object
from batchgen.core.units import shown
from batchgen.model.config_values import ConfigValues

_MAX_BYTES = 1 << 20  # of each file
SIDES = ("query", "document")
_LENGTHS = {"query": 32, "document": 180}  # tokens, if PyLate's file does not say
_PREFIXES = {"query": "[Q] ", "document": "[D] "}
_PYLATE_KEYS = ("query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion")


@dataclass(frozen=True, slots=True)
class Side:
    """Settings by which the texts of one side, queries or documents, become tokens and vectors.

    ``prefix`` precedes each text, without the white space around it if ``strips``; ``marker`` ("" for none) follows the
    first token. A text has at most ``max_tokens`` (None: the model's most). Shorter ones are filled with ``filler`` up
    to ``filled_to``; other tokens see the filler if ``attends``. Tokens in ``skipped`` do not get a vector.
    """

    prefix: str = ""
    strips: bool = False
    marker: str = ""
    max_tokens: int | None = None
    filler: str = ""
    filled_to: int = 0
    attends: bool = True
    skipped: tuple[str, ...] = ()


def read_sides(folder: Path, mask: Path | None) -> Mapping[str, Side]:
    """Sides of late interaction by name, if any; ``mask``: folder of ``MultiVectorMask``. Raises ModelError."""
    path = folder / "config_sentence_transformers.json"
    values = ConfigValues(read_object(path, _MAX_BYTES) if path.exists() else {}, str(path))
    if mask is not None:
        return _sentence_transformers(folder, mask, values)
    if values.raw.get("model_type") == "ColBERT" or any(key in values.raw for key in _PYLATE_KEYS):
        return {name: _pylate(folder, name, values) for name in SIDES}
    return {}


def _pylate(folder: Path, name: str, values: ConfigValues) -> Side:
    prompts, default = values.section("prompts", is_needed=False), values.text("default_prompt_name", default="")
    max_tokens = values.integer(f"{name}_length", default=_LENGTHS[name], minimum=3)
    side = Side(
        prefix=prompts.text(default, default=""),
        strips=True,
        marker=values.text(f"{name}_prefix", default=_PREFIXES[name]),
        max_tokens=max_tokens,
    )
    if name == "document":
        return replace(side, skipped=_words(values, "skiplist_words", list(string.punctuation)))
    if not values.flag("do_query_expansion", default=True):
        return side
    attends = values.flag("attend_to_expansion_tokens", default=False)
    return replace(side, filler=_filler(folder), filled_to=max_tokens, attends=attends)


def _sentence_transformers(folder: Path, mask: Path, values: ConfigValues) -> Mapping[str, Side]:
    path = folder / "sentence_bert_config.json"
    lengths = ConfigValues(read_object(path, _MAX_BYTES) if path.exists() else {}, str(path))
    path = mask / "config.json"
    masks = ConfigValues(read_object(path, _MAX_BYTES) if path.exists() else {}, str(path))
    masks.expect("keep_only_token_ids", None, "it is not computed here")
    words, tasks = _words(masks, "skiplist_words", []), _words(masks, "skiplist_tasks", ["document"])
    prompts = values.section("prompts", is_needed=False)
    prefixes = {"query": prompts.text("query", default="")}
    prefixes["document"] = prompts.text("document", "passage", "corpus", default="")
    sides = {}
    for name in SIDES:
        longest = lengths.integer(f"{name}_length", default=0, minimum=0) or None
        sides[name] = Side(prefixes[name], max_tokens=longest, skipped=words if name in tasks else ())
    if (expansion := lengths.section("query_expansion", is_needed=False)).raw:
        sides["query"] = _expanded(folder, sides["query"], expansion)
    return sides


def _expanded(folder: Path, side: Side, expansion: ConfigValues) -> Side:
    strategy, length = expansion.text("strategy", default=""), expansion.integer("length")
    if strategy not in ("fixed", "min"):
        raise expansion.error(f"strategy is {shown(strategy)}; known are 'fixed' and 'min'")
    longest = length if strategy == "fixed" else side.max_tokens and max(side.max_tokens, length)
    filler = expansion.text("token", default="") or _filler(folder)
    attends = expansion.flag("attend", default=False)
    return replace(side, max_tokens=longest, filler=filler, filled_to=length, attends=attends)


def _words(values: ConfigValues, name: str, default: list[str]) -> tuple[str, ...]:
    words = values.get(name, default=default)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise values.error(f"{name} must be a list of texts, not {shown(words)}")
    return tuple(words)


def _filler(folder: Path) -> str:
    """The token that fills up queries: the tokenizer's mask token or, without one, its end token. Raises ModelError."""
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := folder / name).exists():
            settings = read_object(path, _MAX_BYTES) | settings
    if settings.get("padding_side") == "left":
        raise ModelError(f"{folder}: queries are lengthened on their left side, which is not computed here")
    for name in ("mask_token", "eos_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    raise ModelError(f"{folder}: queries are lengthened by a token that the tokenizer's files do not name")
