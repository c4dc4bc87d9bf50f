"""Tokenizer and chat template of a model folder: text to token ids and back. Code of the folder is not run.

It reads ``tokenizer.json``, its ``_config``, ``{added_tokens,special_tokens_map,generation_config}.json``, templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import tokenizers

from batchgen.core.errors import ModelError, TokenizerError
from batchgen.core.model_files import MORE_TEMPLATES, generation_eos_token_ids, read_object, read_text
from batchgen.core.units import one_line
from batchgen.text.added_tokens import CONFIG, add_tokens, identity_tokens, read_settings
from batchgen.text.answer_facts import AnswerFacts
from batchgen.text.chat import Chat, ChatTemplate, ChatTemplateError, in_one
from batchgen.text.special_tokens import SpecialTokens
from batchgen.text.template_caps import TemplateCaps
from batchgen.text.turns import Turns, token_ranges

Templates = tuple[str, Mapping[str, str]]  # the place that errors name, and the texts by name

_MAX_FILE_BYTES = 1 << 26
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a token of one byte in SentencePiece's BPE


class Tokenizer:
    """A loaded tokenizer.

    Special tokens written out in a text (``<|im_end|>``) are encoded as those tokens, as in transformers and vLLM, so a
    prompt can end a turn. ``eos_token_ids``, ascending, are those that the folder names and the one that the chat
    template writes after an answer; ``decode`` skips ``silent_token_ids``. ``max_token_bytes`` is the most UTF-8 bytes
    that a token of a byte-level tokenizer encodes, None if unknown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may ask for either, which would change prompts silently
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.template_caps = TemplateCaps(chat_template) if chat_template else None
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.silent_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *self._ends_of_turn()}))
        self._shows = False  # special tokens, all but the silent ones
        # Bytes C3 A9 of UTF-8.
        self._is_byte_level = backend.decoder is not None and backend.decoder.decode(["Ã", "©"]) == "é"
        self.max_token_bytes = _max_token_bytes(backend) if self._is_byte_level else None
        if getattr(backend.model, "dropout", None):  # BPE dropout leaves out merges at random, for training
            backend.model.dropout = None
        backend.encode("")  # fails here rather than on each row if it adds special tokens that it does not have

    @classmethod
    def load(
        cls, folder: Path, now: datetime | None = None, vocab_size: int | None = None, template: Templates | None = None
    ) -> Tokenizer:
        """Load the files of ``folder``; ``now`` is the local time that its chat template may print.

        ``vocab_size`` is the model's, if that is known. ``template`` replaces the folder's own. Raises
        ModelError naming the file that is missing or unusable.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"no tokenizer.json in {folder}; give model.tokenizer a folder or Hub id that has one")
        special = special_tokens(folder)
        chat_template = compiled(*(template or _template_sources(folder)), special, now)
        eos_token_ids = set(generation_eos_token_ids(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            add_tokens(backend, read_settings(folder), vocab_size)
            if (token_id := backend.token_to_id(special.get("eos_token", ""))) is not None:
                eos_token_ids.add(token_id)
            return cls(backend, chat_template=chat_template, eos_token_ids=tuple(sorted(eos_token_ids)))
        except BaseException as error:
            raise ModelError(f"{path} is not a usable tokenizer: {reason(error)}") from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int] | TokenizerError]:
        """Token ids per text, or an error; ``add_special_tokens`` puts the tokenizer's own bos in front."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            problem = TokenizerError(f"the tokenizer cannot encode the text: {reason(error)}")
        else:
            return [encoding.ids for encoding in encodings]
        if len(texts) == 1:
            return [problem]
        return [answer for text in texts for answer in self.encode_batch([text], add_special_tokens)]

    def turns(self, chat: Mapping[str, Any], prompt: str) -> tuple[tuple[int, int], ...]:
        """The assistant's turns in a chat's prompt, as ranges of tokens; see ``Turns``. Raises ChatTemplateError."""
        if self._turns is None or self.template_caps is None:
            return ()
        ranges = self._turns.of(self.template_caps.form(chat), prompt)
        try:
            encoded = self._backend.encode(prompt, add_special_tokens=False)
        except BaseException as error:  # as in ``encode_batch``
            raise ChatTemplateError(f"the tokenizer cannot encode the text: {reason(error)}") from None
        return token_ranges(encoded.offsets, ranges)

    @cached_property
    def _turns(self) -> Turns | None:
        return Turns(self.chat_template) if self.chat_template else None

    def _ends_of_turn(self) -> Iterator[int]:
        """The added token, if any, that the chat template writes directly after an answer, blanks aside."""
        behind = self.chat_template.behind_answer().lstrip() if self.chat_template else ""
        ends = [token_id for token_id, token in self._added.items() if token and behind.startswith(token)]
        if ends:
            yield max(ends, key=lambda token_id: len(self._added[token_id]))

    @cached_property
    def answer_facts(self) -> AnswerFacts:
        """Facts of answers that its chat template states."""
        return AnswerFacts.of(self.chat_template.source if self.chat_template else "", self.token_id)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Its special tokens, to keep them out of the texts of rows."""
        return SpecialTokens(self._backend)

    def to_json(self) -> str:
        """The tokenizer as the text of a ``tokenizer.json``, without truncation and padding."""
        return self._backend.to_str()

    def showing(self, tokens: Collection[str]) -> Tokenizer:
        """The same tokenizer, but these special tokens are not silent: ``decode`` writes them out."""
        shown = copy(self)
        shown.silent_token_ids -= {self._backend.token_to_id(token) for token in tokens}
        shown._shows = True
        return shown

    def showing_in(self, texts: Iterable[str]) -> Tokenizer:
        """The same tokenizer, but special tokens that are written out in one of ``texts`` are not silent."""
        silent = {self._added[token_id] for token_id in self.silent_token_ids}
        named = {token for token in silent for text in texts if token in text}
        return self.showing(named) if named else self

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary; None for any other text."""
        return self._backend.token_to_id(token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, shown_in: str = "") -> str:
        """The text of generated ids; bytes of incomplete characters become U+FFFD.

        Special tokens are skipped, but not those that are written out in ``shown_in``. Raises TokenizerError.
        """
        if shown_in:
            return self.showing_in((shown_in,)).decode(ids, skip_special_tokens=skip_special_tokens)
        if self._shows and skip_special_tokens:
            ids, skip_special_tokens = [item for item in ids if item not in self.silent_token_ids], False
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise TokenizerError(f"the tokenizer cannot decode the tokens: {reason(error)}") from error

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token of byte-level or byte-fallback BPE; None for any other token."""
        token = self._backend.id_to_token(token_id)
        if not token:
            return None
        if match := _FALLBACK.fullmatch(token):
            return bytes([int(match[1], 16)])
        if not self._is_byte_level or any(char not in _BYTES for char in token):
            return None
        return bytes(_BYTES[char] for char in token)

    def render_chats(self, chats: Sequence[Chat]) -> Iterator[str | ChatTemplateError]:
        """Yield each chat's prompt text, bos included, or an error; see ``ChatTemplate.render``.

        Messages are as ``input.messages`` gives them; a chat with a part that the template does not show becomes an
        error, see ``TemplateCaps``. Encode the text with ``add_special_tokens=False``.
        """
        if self.template_caps is None:
            return repeat(ChatTemplateError("the model has no chat template"), len(chats))
        return self.template_caps.render([chat if isinstance(chat, Mapping) else {"messages": chat} for chat in chats])


def reason(error: BaseException) -> str:
    """The message of an error of the Rust library: a plain ``Exception``, or a ``BaseException`` if it panicked.

    Raises ``error`` itself if it has another origin: the handler of a signal, or memory that has run out.
    """
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
        raise error
    return one_line(error)


def _bytes_of_characters() -> dict[str, int]:
    """The byte of each character in byte-level BPE: printable bytes are themselves, others are U+0100 and later.

    The table of GPT-2: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


def _max_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    if backend.normalizer is not None:
        return None
    added = backend.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None  # such a token swallows any amount of space around it
    plain = (len(token) for token in backend.get_vocab(with_added_tokens=False))  # one character encodes one byte
    return max((*plain, *(len(token.content.encode()) for token in added.values())), default=None)


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing."""
    return read_object(path, _MAX_FILE_BYTES) if path.exists() else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of bos_token, eos_token and so on, which the files hold as strings or ``AddedToken`` objects."""
    return {key: str(token) for key, token in identity_tokens(read_settings(folder)).items()}


def _template_sources(folder: Path) -> Templates:
    """Templates by name: from ``chat_template.jinja`` and files of further ones, or from ``tokenizer_config.json``."""
    more = folder / MORE_TEMPLATES
    candidates = [folder / "chat_template.jinja", more / "default.jinja", more / "tool_use.jinja"]
    files = {path.stem.replace("chat_template", "default"): path for path in candidates if path.exists()}
    path = files.get("default", folder / CONFIG)
    templates = {} if "default" in files else _named_templates(path)
    templates |= {name: read_text(file, _MAX_FILE_BYTES) for name, file in files.items()}
    return str(path), templates


def compiled(
    source: str, templates: Mapping[str, str], special_tokens: Mapping[str, str], now: datetime | None
) -> ChatTemplate | None:
    """The template made of ``templates`` by name, if there are any. Raises ModelError, which names their place."""
    try:
        return ChatTemplate(in_one(templates), special_tokens, now) if templates else None
    except KeyError:
        raise ModelError(f"{source}: chat_template lists templates, but none is named 'default'") from None
    except ChatTemplateError as error:
        raise ModelError(f"{source}: {error}") from error


def _named_templates(path: Path) -> dict[str, str]:
    """The templates of a ``tokenizer_config.json`` by name: a text is the default."""
    source = _read_json(path).get("chat_template")
    if isinstance(source, list) and all(isinstance(item, dict) for item in source):
        source = {item.get("name"): item.get("template") for item in source}
    if source is None or isinstance(source, str):
        source = {"default": source} if source is not None else {}
    if not isinstance(source, dict) or not all(isinstance(text, str) for item in source.items() for text in item):
        raise ModelError(f"{path}: chat_template is neither a text nor a list of named texts")
    return source
