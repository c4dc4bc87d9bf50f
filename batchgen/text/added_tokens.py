"""Tokens that ``tokenizer_config.json`` adds to ``tokenizer.json`` or declares differently, as in transformers 5.

Fine-tunes and older files name special tokens only there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from batchgen.core.errors import ModelError
from batchgen.core.keys import INT32_MAX
from batchgen.core.model_files import is_token_id, read_object
from batchgen.core.units import shown

CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"  # and the key under which ``read_settings`` keeps what it holds
_MAP = "special_tokens_map.json"
_MAX_FILE_BYTES = 1 << 26
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))  # new ones get ids so
_MAX_DIGITS = 10  # of a token id, which fits 32 bits
_MARKS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in ``tokenizer_config.json``, which in older models lack the list of tokens.

    Then values of ``special_tokens_map.json`` replace its values, and tokens of ``added_tokens.json`` are added. Raises
    ModelError, also for entries that are not tokens.
    """
    own, older = (read_object(p, _MAX_FILE_BYTES) if (p := folder / name).exists() else {} for name in (CONFIG, _MAP))
    settings = own if "added_tokens_decoder" in own else own | older
    if "added_tokens_decoder" not in own and (oldest := folder / ADDED).exists():
        settings[ADDED] = _ids(oldest)
    try:
        _ = identity_tokens(settings), _extra(settings)
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from None
    return settings


def identity_tokens(settings: Mapping[str, Any]) -> dict[str, str | AddedToken]:
    """The tokens with a name, such as ``bos_token``: a text, or a token with its own settings."""
    extra = settings.get("extra_special_tokens")
    of_model = extra if isinstance(extra, dict) else {}
    values = {key: value for key, value in (*settings.items(), *of_model.items()) if key.endswith("_token")}
    tokens = {key: _token(value, key) for key, value in values.items() if isinstance(value, str | dict)}
    listed = {token.content: token for token in _listed(settings)}
    return {key: listed.get(str(_text(token)), token) for key, token in tokens.items()}


def add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], vocab_size: int | None) -> None:
    """Add the tokens of ``settings`` to a tokenizer; ``vocab_size`` is its model's, if that is known.

    A named token whose id is beyond the model's rows, such as one for padding, is left out: no text can use it.
    """
    named, tokens = identity_tokens(settings), _listed(settings)
    named_texts = {_text(token) for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in named_texts
    extra, room = _extra(settings), INT32_MAX if vocab_size is None else vocab_size
    tokens += _older(backend, settings, named_texts.union(map(_text, extra)))
    texts = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    room -= backend.get_vocab_size() + sum(backend.token_to_id(token.content) is None for token in tokens)
    order = {name: number for number, name in enumerate(_NAMES)}
    in_order = sorted(named, key=lambda name: order.get(name, len(order)))
    for item in (*(named[name] for name in in_order), *extra):
        if (text := _text(item)) in texts:
            continue
        is_new = backend.token_to_id(text) is None
        if not is_new or room > 0 or item in extra:
            tokens.append(AddedToken(item, special=True) if isinstance(item, str) else item)
            tokens[-1].special = True
            texts.add(text)
            room -= is_new
    backend.add_tokens(tokens)
    if settings.get("split_special_tokens") is True:
        backend.encode_special_tokens = True


def _ids(path: Path) -> dict[str, int]:
    """Texts and their ids. Raises ModelError."""
    ids = read_object(path, _MAX_FILE_BYTES)
    if not all(map(is_token_id, ids.values())):
        raise ModelError(f"{path}: must be an object of tokens and their ids")
    return ids


def _older(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Collection[str]
) -> Iterator[AddedToken]:
    """The tokens of ``added_tokens.json`` that ``tokenizer.json`` does not list, in the order of their ids."""
    listed, older = backend.get_added_tokens_decoder(), settings.get(ADDED, {})
    for text, token_id in sorted(older.items(), key=lambda item: item[1]):
        if token_id not in listed:
            yield AddedToken(text, normalized=text not in special, special=text in special)


def _extra(settings: Mapping[str, Any]) -> list[str | AddedToken]:
    """Special tokens without a name, under their newer or older key."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = settings.get(key)
        if isinstance(value, list) and value:
            return [_token(item, key) for item in value]
    return []


def _listed(settings: Mapping[str, Any]) -> list[AddedToken]:
    """All added tokens with their properties, in the order of their ids."""
    value = settings.get("added_tokens_decoder") or {}
    are_tokens = isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())
    if not are_tokens or not all(key.isdecimal() and len(key) <= _MAX_DIGITS for key in value):
        raise ModelError(f"added_tokens_decoder must list tokens by their ids, not {shown(value)}")
    tokens = [_token(value[key], "added_tokens_decoder") for key in sorted(value, key=int)]
    return [token for token in tokens if isinstance(token, AddedToken)]


def _token(value: Any, key: str) -> str | AddedToken:
    if isinstance(value, str):
        return value
    text = value.get("content") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ModelError(f"{key}: {shown(value)} is not a token")
    marks = {name: value[name] for name in _MARKS if isinstance(value.get(name), bool)}
    try:
        return AddedToken(text, **marks)
    except UnicodeEncodeError:  # a lone surrogate
        raise ModelError(f"{key}: {shown(value)} is not a token") from None


def _text(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content
