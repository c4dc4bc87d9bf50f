"""Tokenizer and chat template of a GGUF file: its vocabulary and merges as a byte-level ``tokenizers`` tokenizer.

The metadata name a pre-tokenizer and do not describe it, so that only vocabularies of known ones are read; how those
split a text is told by the ``tokenizer.json`` of their models. The keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from batchgen.core.errors import ModelError
from batchgen.core.gguf import read_header
from batchgen.core.units import shown
from batchgen.text.tokenizer import Templates, Tokenizer, compiled, reason

_KEY = "tokenizer.ggml."
_ARRAYS = [_KEY + name for name in ("tokens", "merges", "token_type")]
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are found whole in a text; only the first are special
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_REMEDY = "give --tokenizer a folder or Hub id with a tokenizer.json"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Kind(NamedTuple):
    """Settings that the name of a pre-tokenizer stands for.

    ``words`` are found by this expression, or, where it is empty, by that of GPT-2 once digits are split off. With
    ``whole_words`` a word of the vocabulary is its token, whatever the merges make of it. ``is_composed``: texts are
    brought to the normal form NFC first. ``has_bos``: a bos is put in front where the file does not say.
    """

    words: str = ""
    whole_words: bool = False
    is_composed: bool = False
    has_bos: bool = False


_LLAMA = _Kind(_WORDS.format(digits="{1,3}"), whole_words=True, has_bos=True)
_KINDS = {
    "smollm": _Kind(),
    "qwen2": _Kind(_WORDS.format(digits=""), is_composed=True),
    "llama-bpe": _LLAMA,
    "lfm2": _LLAMA,
}


def read_gguf_tokenizer(path: Path, now: datetime | None = None, template: Templates | None = None) -> Tokenizer:
    """The tokenizer in a GGUF file; ``now`` is the local time that its chat template may print.

    Its end tokens are in the config that is read from the same file. Raises ModelError if the file is unusable, or has
    no tokenizer of a kind that is read.
    """
    metadata = read_header(path, _ARRAYS).metadata
    model, name = (metadata.get(_KEY + key) for key in ("model", "pre"))
    if model != "gpt2":
        raise ModelError(f"{path}: {_KEY}model is {shown(model)}; tokenizers of 'gpt2' are read: {_REMEDY}")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        names = ", ".join(map(repr, _KINDS))
        raise ModelError(f"{path}: {_KEY}pre is {shown(name)}; pre-tokenizers {names} are read: {_REMEDY}")
    arrays: list[Any] = [metadata.get(key) for key in _ARRAYS]
    tokens, merges, types = arrays
    if not _is_list(tokens, str) or not _is_list(merges, str) or not (types is None or _is_list(types, int)):
        raise ModelError(f"{path}: tokens, merges or token types of {_KEY[:-1]} are missing or no lists: {_REMEDY}")
    special = {}
    for role, key in _SPECIAL.items():
        token_id = metadata.get(f"{_KEY}{key}_token_id")
        if type(token_id) is int and token_id < len(tokens):
            special[role] = tokens[token_id]
    chat_template = compiled(*(template or _template_sources(path, metadata)), special, now)
    bos = special.get("bos_token") if metadata.get(_KEY + "add_bos_token", kind.has_bos) else None
    try:
        backend = _backend(kind, tokens, merges)
        _add_tokens(backend, tokens, types or ())
        if bos is not None:
            ids = [(bos, backend.token_to_id(bos))]
            backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=ids)
        return Tokenizer(backend, chat_template=chat_template)
    except BaseException as error:
        raise ModelError(f"{path} has no usable tokenizer: {reason(error)}") from error


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(element) is kind for element in value)


def _backend(kind: _Kind, tokens: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE. Raises ValueError for a token that is there twice or a merge that is none."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise ValueError(f"token {shown(twice)} is there twice")
    pairs = []
    for merge in merges:
        if merge.count(" ") != 1:
            raise ValueError(f"merge {shown(merge)} is not of two tokens")
        first, _, second = merge.partition(" ")
        pairs.append((first, second))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind.whole_words))
    split: Any = pre_tokenizers.Digits(individual_digits=True)
    if kind.words:
        split = pre_tokenizers.Split(Regex(kind.words), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    backend.decoder = decoders.ByteLevel()
    if kind.is_composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Have the tokens of these types found whole in a text, before any normal form."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _template_sources(path: Path, metadata: Mapping[str, Any]) -> Templates:
    """Templates by name; none without a default one."""
    key = "tokenizer.chat_template"
    keys = {"default": key, "tool_use": f"{key}.tool_use"}
    templates = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    if not all(isinstance(source, str) for source in templates.values()):
        raise ModelError(f"{path}: {key} is no text")
    return str(path), templates if "default" in templates else {}
