"""Tokenizer and chat template of a GGUF file: its vocabulary and merges as a byte-level ``tokenizers`` tokenizer.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; end tokens as in llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest
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
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_WHOLE = (
    2,
    _CONTROL,
    _USER_DEFINED,
)  # types of tokens that are found whole in a text: unknown and control ones are special
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Texts of tokens that end an answer and are control tokens, whatever the metadata and their types say.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|eom_id|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
    *("<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
}
# The same for code models: the token under the key, or, if the file lacks the key, the first of these texts that is a
# token.
_CODE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# If all of the first texts are tokens, the second does not end an answer (it ends a part, or is a word) and gets the
# third as its type.
_NO_ENDS = (
    (("<|return|>", "<|call|>"), "<|end|>", _USER_DEFINED),
    (("<|calls|>", "<|flush|>"), "<|end|>", _USER_DEFINED),
    (("<|tool_response>",), "</s>", _NORMAL),
)
_REMEDY = "give --tokenizer a folder or Hub id with a tokenizer.json"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{{L}}\p{{N}}]+{}|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"


class _Kind(NamedTuple):
    """Settings that the name of a pre-tokenizer selects, taken from the ``tokenizer.json`` of its models.

    ``words``: expressions, each applied between the matches of the previous one. ``whole_words``: a word that is in the
    vocabulary becomes one token, whatever the merges say. ``is_composed``: texts become NFC. ``has_bos``: the default.
    """

    words: tuple[str, ...]
    whole_words: bool = False
    is_composed: bool = False
    has_bos: bool = False


_LLAMA = _Kind((_WORDS + "{1,3}" + _REST.format(r"[\r\n]*"),), whole_words=True, has_bos=True)
_QWEN = (_WORDS + _REST.format(r"[\r\n]*"),)
_DIGITS = _Kind((r"\p{N}", _GPT2))
_KINDS = {
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "gpt-2": _Kind((_GPT2,)),
    "qwen2": _Kind(_QWEN, is_composed=True),
    "deepseek-r1-qwen": _Kind(_QWEN),
    "tekken": _Kind((_TEKKEN + _REST.format(r"[\r\n/]*"),), whole_words=True, has_bos=True),
    "default": _Kind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), _LLAMA),
}


def read_gguf_tokenizer(path: Path, now: datetime | None = None, template: Templates | None = None) -> Tokenizer:
    """The tokenizer in a GGUF file, whose chat template may print the local time ``now``.

    Raises ModelError if the file is unusable, or its kind of tokenizer is not supported.
    """
    metadata = read_header(path, _ARRAYS).metadata
    model, name = (metadata.get(_KEY + key) for key in ("model", "pre"))
    if model != "gpt2":
        raise ModelError(f"{path}: {_KEY}model is {shown(model)}; tokenizers of 'gpt2' are read: {_REMEDY}")
    rules = _KINDS.get(name) if isinstance(name, str) else None
    if rules is None:
        names = ", ".join(map(repr, _KINDS))
        raise ModelError(f"{path}: {_KEY}pre is {shown(name)}; pre-tokenizers {names} are read: {_REMEDY}")
    arrays: list[Any] = [metadata.get(key) for key in _ARRAYS]
    tokens, merges, types = arrays
    if not _is_list(tokens, str) or not _is_list(merges, str) or not (types is None or _is_list(types, int)):
        raise ModelError(f"{path}: tokens, merges or token types of {_KEY[:-1]} are missing or no lists: {_REMEDY}")
    if metadata.get(_KEY + "add_sep_token"):
        raise ModelError(f"{path}: {_KEY}add_sep_token is true, which is not computed here: {_REMEDY}")
    special = {role: token for role, key in _SPECIAL.items() if (token := _named(metadata, key, tokens)) is not None}
    chat_template = compiled(*(template or _template_sources(path, metadata)), special, now)
    try:
        backend = _backend(rules, tokens, merges)
        _add_tokens(backend, tokens, types or ())
        _put_around(backend, special, metadata, has_bos=rules.has_bos)
        return Tokenizer(backend, chat_template=chat_template, eos_token_ids=tuple(_end_tokens(metadata, tokens)))
    except BaseException as error:
        raise ModelError(f"{path} has no usable tokenizer: {reason(error)}") from error


def _named(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> str | None:
    """The token whose id is under a key of the metadata."""
    token_id = metadata.get(f"{_KEY}{key}_token_id")
    return tokens[token_id] if type(token_id) is int and 0 <= token_id < len(tokens) else None


def _end_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """Ids of the tokens that end an answer, ascending."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ends = {token for token in _ENDS - _no_ends(ids).keys() if token in ids}
    named = [_named(metadata, key, tokens) for key in ("eos", "eot", "eom")]
    named += [
        _named(metadata, key, tokens) or next((text for text in texts if text in ids), None)
        for key, texts in _CODE_ENDS.items()
    ]
    return sorted(ids[token] for token in ends.union(token for token in named if token is not None))


def _no_ends(tokens: Collection[str]) -> dict[str, int]:
    """The tokens of ``_ENDS`` that do not end an answer in this vocabulary, with their types."""
    return {end: token_type for others, end, token_type in _NO_ENDS if all(token in tokens for token in others)}


def _put_around(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], metadata: Mapping[str, Any], *, has_bos: bool
) -> None:
    """Have the tokenizer put bos and eos around a text if the file says so."""
    bos = special.get("bos_token") if metadata.get(_KEY + "add_bos_token", has_bos) else None
    eos = special.get("eos_token") if metadata.get(_KEY + "add_eos_token") else None
    single = [part for part in (bos, "$A", eos) if part is not None]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    if ids:
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _is_list(value: object, element_type: type) -> bool:
    return isinstance(value, list) and all(type(element) is element_type for element in value)


def _backend(rules: _Kind, tokens: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE. Raises ValueError for a duplicate token or an invalid merge."""
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
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rules.whole_words))
    splits = [pre_tokenizers.Split(Regex(words), "isolated") for words in rules.words]
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, of_bytes])
    backend.decoder = decoders.ByteLevel()
    if rules.is_composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add the tokens of these types, and all that end answers, so that they are found before a text is normalized."""
    kinds = dict.fromkeys(_ENDS.union(*_CODE_ENDS.values()), _CONTROL) | _no_ends(frozenset(tokens))
    typed = ((token, kinds.get(token, kind)) for token, kind in zip_longest(tokens, types[: len(tokens)]))
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in typed
        if token and kind in _WHOLE
    ]
    backend.add_tokens(added)


def _template_sources(path: Path, metadata: Mapping[str, Any]) -> Templates:
    """Templates by name; empty if the file lacks a default one."""
    key = "tokenizer.chat_template"
    keys = {"default": key, "tool_use": f"{key}.tool_use"}
    templates = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    if not all(isinstance(source, str) for source in templates.values()):
        raise ModelError(f"{path}: {key} is not a text")
    return str(path), templates if "default" in templates else {}
