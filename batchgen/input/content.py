"""The content of a row: where its prompt is, what text, chat or token ids that makes, and its sampling values.

It checks the rows' content and the job's [input] section; it counts no tokens and builds no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.config.job import InputSpec
from batchgen.config.sampling import PARAM_KEYS
from batchgen.core.errors import RowErrorCode, UsageError
from batchgen.core.units import shortened
from batchgen.input.openai_batch import parse_batch_line
from batchgen.input.rows import RowProblem, type_name, wrong_type
from batchgen.input.template import Template
from batchgen.text.tokenizer import Tokenizer

_MAX_SHOWN_CHARS = 60  # of a template, in messages
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text yet to be tokenized; ``add_special_tokens`` is false where a chat template has written them."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages yet to be rendered by the model's chat template."""

    messages: Sequence[Message]


Prompt = PlainText | Chat | list[int]


@dataclass(frozen=True, slots=True)
class Content:
    """What a row asks for: its prompt, and the sampling values it brings, not yet checked."""

    prompt: Prompt
    overrides: Mapping[str, Any]


class ContentFinder:
    """Finds the content of rows as the job's [input] says; see ``RequestBuilder`` for the rules.

    ``param_columns`` is the job's ``sampling.columns``; ``("*",)`` stands for all of ``all_param_columns``: the
    sampling keys except the names of columns that the prompt or the id is made of. ``prompt_columns`` are the columns
    a prompt may be in, the first choice first; ``template`` takes their place where the job has one. Raises UsageError
    when [input] cannot work with this tokenizer (None: the model has none).
    """

    def __init__(
        self, spec: InputSpec, tokenizer: Tokenizer | None, vocab_size: int, param_columns: Sequence[str] = ()
    ) -> None:
        _check_spec(spec, tokenizer)
        self._spec = spec
        self._has_tokenizer = tokenizer is not None
        self._vocab_size = vocab_size
        template = Template.parse(spec.prompt) if spec.prompt and set(spec.prompt) & set("{}") else None
        self.template = None if spec.format == "openai-batch" else template
        self.prompt_columns = self._column_readers()
        named = {spec.id, spec.prompt, spec.messages, spec.prompt_token_ids, *(template.columns if template else ())}
        self.all_param_columns = set(PARAM_KEYS) - named
        self._param_columns = self.all_param_columns if tuple(param_columns) == ("*",) else set(param_columns)

    def named_columns(self) -> Iterator[tuple[str, str]]:
        """The columns that [input] says the prompt is in, each after the key that names it."""
        spec = self._spec
        if spec.format == "openai-batch":
            yield "input.format = 'openai-batch'", "body"
        elif self.template:
            yield from (("input.prompt", name) for name in sorted(self.template.columns))
        else:
            named = {key: getattr(spec, key) for key in ("messages", "prompt_token_ids", "prompt")}
            yield from ((f"input.{key}", name) for key, name in named.items() if name)

    def may_have_prompt(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row is an OpenAI Batch line or has a column that its prompt may be in, whatever its value."""
        if self._spec.is_mapped or self._spec.is_batch_line(columns) or self._is_only_text(columns):
            return True
        return not self.prompt_columns.keys().isdisjoint(columns)

    def find(self, columns: Mapping[str, Any]) -> Content:
        """Raises RowProblem with any of the codes of a row but ``bad_json``, ``too_long`` and ``duplicate_id``."""
        if not self._spec.is_batch_line(columns):
            return Content(self._prompt(columns), self._overrides(columns))
        request = parse_batch_line(columns)
        if request.is_chat:
            return Content(self._from_messages("body.messages", request.content), request.sampling)
        if isinstance(request.content, list):
            return Content(self._from_ids("body.prompt", request.content), request.sampling)
        # A completion is raw whatever the job's ``chat`` says.
        text = _checked_text("column 'body.prompt'", request.content)
        self._require_tokenizer()
        return Content(PlainText(text, True), request.sampling)

    def _overrides(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        overrides = {name: value for name, value in columns.items() if name in self._param_columns}
        given = columns.get("sampling")
        if given is None:
            return overrides
        if not isinstance(given, dict):
            raise wrong_type("column 'sampling'", given, "an object")
        return overrides | given

    def _column_readers(self) -> dict[str, Callable[[str, Any], Prompt]]:
        """The columns a prompt may be in, each with what reads it."""
        readers: dict[str, Callable[[str, Any], Prompt]] = {
            "prompt_token_ids": self._from_ids,
            "messages": self._from_messages,
            "prompt": lambda name, value: self._from_text(f"column {name!r}", value),
        }
        for key, read in readers.items():
            if name := getattr(self._spec, key):
                return {name: read}
        if not self._has_tokenizer:
            return {"prompt_token_ids": self._from_ids}
        if not self._spec.chat:
            del readers["messages"]
        return readers

    def _prompt(self, columns: Mapping[str, Any]) -> Prompt:
        if self.template is not None:
            shown = shortened(self._spec.prompt or "", _MAX_SHOWN_CHARS)
            return self._from_text(f"the prompt that the template {shown!r} makes", self.template.render(columns))
        for name, read in self.prompt_columns.items():
            if name in columns and (self._spec.is_mapped or columns[name] is not None):
                return read(name, columns[name])
        if self._is_only_text(columns):
            return self._from_text("column 'text'", columns["text"])
        wanted = " or ".join(map(repr, self.prompt_columns))
        has = ", ".join(repr(name) for name in list(columns)[:8]) or "none"
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no column {wanted} for the prompt; the row's columns: {has}")

    def _is_only_text(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row's only column is ``text``, which is its prompt where the job names none."""
        return not self._spec.is_mapped and self._has_tokenizer and columns.keys() == {"text"}

    def _from_text(self, what: str, value: object) -> Prompt:
        text = _checked_text(what, value)
        return self._chat([{"role": "user", "content": text}]) if self._spec.chat else PlainText(text, True)

    def _from_messages(self, name: str, value: object) -> Chat:
        if not self._spec.chat:
            raise RowProblem(RowErrorCode.TEMPLATE_ERROR, f"{name!r} is a chat, but the job says chat = false")
        return self._chat(_checked_messages(name, value))

    def _chat(self, messages: Sequence[Message]) -> Chat:
        self._require_tokenizer()
        if self._spec.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._spec.system}, *messages]
        return Chat(messages)

    def _require_tokenizer(self) -> None:
        if not self._has_tokenizer:
            message = "the model has no tokenizer, so a prompt must be a list of token ids"
            raise RowProblem(RowErrorCode.BAD_TYPE, message)

    def _from_ids(self, name: str, value: object) -> list[int]:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise RowProblem(RowErrorCode.BAD_TYPE, f"column {name!r} is not a list of token ids (integers)")
        if not value:
            raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"column {name!r} has no token ids")
        if min(value) < 0 or max(value) >= self._vocab_size:
            message = f"column {name!r} has a token id outside the model's vocabulary, 0 to {self._vocab_size - 1}"
            raise RowProblem(RowErrorCode.BAD_PARAM, message)
        return value


def _checked_text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(what, value, "a string")
    if not value or value.isspace():
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"{what} is empty")
    return value


def _checked_messages(name: str, value: object) -> list[Message]:
    """The messages in column ``name``: objects with a ``role`` and a ``content`` that is text.

    Content given as OpenAI's list of ``{"type": "text", "text": ...}`` parts is joined; other fields go to the
    chat template untouched.
    """
    if not isinstance(value, list):
        raise wrong_type(f"column {name!r}", value, "a list of messages")
    messages = [_checked_message(f"{name}[{number}]", item) for number, item in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"column {name!r} has no message with any text")
    return messages


def _checked_message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(where, message, "an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise wrong_type(f"{where}.role", role, "a string")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{number}]", part) for number, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong_type(f"{where}.content", content, "a string")
    return {**message, "content": content}


def _part_text(where: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type_name(part)
    raise RowProblem(RowErrorCode.BAD_TYPE, f"{where} is {kind!r}: only text parts are supported")


def _check_spec(spec: InputSpec, tokenizer: Tokenizer | None) -> None:
    for key in ("prompt", "system"):
        try:
            (getattr(spec, key) or "").encode()
        except UnicodeEncodeError:  # Python reads such bytes of a command line as lone surrogates
            raise UsageError(f"input.{key} holds bytes that are not UTF-8; write it in UTF-8") from None
    if spec.prompt_token_ids:
        return
    if tokenizer is None:
        for key in ("prompt", "messages", "system"):
            if getattr(spec, key):
                remedy = "name one in model.tokenizer, or give rows prompt_token_ids"
                raise UsageError(f"input.{key} needs a tokenizer and this model has none; {remedy}")
    elif not spec.chat:
        for key in ("messages", "system"):
            if getattr(spec, key):
                raise UsageError(f"input.{key} needs a chat: drop it, or drop input.chat = false")
    elif not tokenizer.has_chat_template:
        raise UsageError("the model has no chat template; set input.chat = false (--no-chat) for raw completion")
