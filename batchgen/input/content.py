"""The content of a row: finds its prompt (a text, a chat or token ids) and its sampling values.

It checks the rows' content and the job's [input] section; ``requests`` counts tokens and builds requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.config.job import InputSpec
from batchgen.config.sampling import in_object
from batchgen.core.errors import RowErrorCode, UsageError
from batchgen.core.keys import TEMPLATE_KWARGS, resembling
from batchgen.core.units import shortened, shown
from batchgen.input.messages import Message, checked_messages, checked_tools
from batchgen.input.openai_batch import check_purpose, effort_kwargs, inputs_of, parse_batch_line
from batchgen.input.rows import Embedded, RowProblem, is_null, num_chars, wrong_type
from batchgen.input.template import Template
from batchgen.text.chat import CONTINUES, MAX_CHARS
from batchgen.text.special_tokens import SpecialTokens
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import tool_format

_MAX_SHOWN_CHARS = 60  # of a template, in messages


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text to be tokenized; ``add_special_tokens`` is false if a chat template has already added them."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat: the template's variables with ``messages``, from column ``name``; the job added ``num_added`` of them."""

    variables: Mapping[str, Any]
    name: str = "messages"
    num_added: int = 0


Prompt = PlainText | Chat | list[int]
_Reader = Callable[[str, Mapping[str, Any]], Prompt]  # reads the column of that name from a row


@dataclass(frozen=True, slots=True)
class Content:
    """Prompt of a row (``more``: further texts for several vectors), and its sampling values, not yet checked."""

    prompt: Prompt
    overrides: Mapping[str, Any]
    more: Sequence[PlainText | list[int]] = ()


class ContentFinder:
    """Finds the content of rows as the job's [input] says; see ``RequestBuilder`` for the rules.

    ``prompt_columns`` are columns that may hold the prompt, in order of preference; a job's ``template`` replaces them.
    A row's ``chat_template_kwargs`` override the job's, key by key; a name that the chat template never mentions is
    refused, since it would change nothing. ``tools`` and ``tool_choice`` are used with the row's messages; the choice
    "none" keeps tools out of the prompt. Raises UsageError if [input] cannot work with this tokenizer (None: the model
    lacks one).
    """

    def __init__(
        self,
        spec: InputSpec,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        embedded: Embedded | None = None,
    ) -> None:
        _check_spec(spec, tokenizer)
        self._special = _refused_tokens(spec, tokenizer)
        self._spec = spec
        self._has_tokenizer = tokenizer is not None
        self._names = tokenizer.chat_template.names if tokenizer and tokenizer.chat_template else frozenset[str]()
        self._tells_calls = tokenizer is not None and tool_format(tokenizer) is not None
        self._vocab_size = vocab_size
        template = Template.parse(spec.prompt) if spec.prompt and set(spec.prompt) & set("{}") else None
        self.template = None if spec.format == "openai-batch" else template
        self._of_template = f"the prompt that the template {shortened(spec.prompt or '', _MAX_SHOWN_CHARS)!r} makes"
        self.prompt_columns = self._column_readers()
        self._embedded = embedded

    def named_columns(self) -> Iterator[tuple[str, str]]:
        """(key, column) for every column that [input] names for the prompt."""
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
        is_sure = self._spec.is_mapped or self._spec.is_batch_line(columns)
        return is_sure or not self.prompt_columns.keys().isdisjoint(columns)

    def find(self, columns: Mapping[str, Any]) -> Content:
        """The content of a row. Raises RowProblem, with any code except ``bad_json`` and ``duplicate_id``."""
        if not self._spec.is_batch_line(columns):
            return Content(self._prompt(columns), self._overrides(columns))
        request = parse_batch_line(columns)
        check_purpose(request, self._embedded)
        sampling = {name: value for name, value in request.sampling.items() if value is not None}
        overrides = {**self._overrides(columns), **sampling}
        if request.is_chat:
            kwargs = effort_kwargs(request.effort, self._names)
            kwargs |= _checked_kwargs(request.variables["chat_template_kwargs"])
            variables = {**request.variables, "chat_template_kwargs": kwargs}
            if request.offers_tools and "tools" in self._names and not self._tells_calls:
                why = "this model's format of tool calls is unknown, so calls could not be found in its text"
                raise RowProblem(RowErrorCode.BAD_PARAM, f"body field 'tools': {why}")
            continues = request.variables[CONTINUES]
            return Content(self._from_messages("body.messages", request.content, variables, continues), overrides)
        contents = {"body.prompt": request.content}
        if self._embedded is not None:
            contents = inputs_of(request.content, self._embedded)
        first, *more = [self._plain(name, content) for name, content in contents.items()]
        return Content(first, overrides, more)

    def _plain(self, name: str, value: object) -> PlainText | list[int]:
        """Token ids, or a text that is not rendered as a chat even if the job has a ``chat_template``."""
        if isinstance(value, list):
            return self._from_ids(name, value)
        text = _checked_text(f"column {name!r}", value)
        self._require_tokenizer()
        return PlainText(self._checked(text), True)

    def _overrides(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return in_object(columns.get("sampling")) or {}
        except ValueError as error:
            raise RowProblem(RowErrorCode.BAD_TYPE, f"column 'sampling' {error}") from None

    def _column_readers(self) -> dict[str, _Reader]:
        """The columns a prompt may be in, each with its reader."""

        def from_text(name: str, columns: Mapping[str, Any]) -> Prompt:
            return self._from_text(f"column {name!r}", self._checked(columns[name]), columns)

        readers: dict[str, _Reader] = {
            "prompt_token_ids": lambda name, columns: self._from_ids(name, columns[name]),
            "messages": lambda name, columns: self._from_messages(name, columns[name], columns),
            "prompt": from_text,
            "text": from_text,
        }
        for key, read in readers.items():
            if name := getattr(self._spec, key, None):
                return {name: read}
        if not self._has_tokenizer:
            return {"prompt_token_ids": readers["prompt_token_ids"]}
        if not self._spec.is_templated:
            del readers["messages"]
        return readers

    def _prompt(self, columns: Mapping[str, Any]) -> Prompt:
        if self.template is not None:
            text = self.template.render(columns, self._checked)
            if self._special:  # finds tokens too of which only a part comes from the row
                own = Counter(self._special.written(self.template.render(columns, lambda _: "")))
                self._refuse(next(iter(Counter(self._special.written(text)) - own), ""))
            empty = self.template.empty_fields(columns)
            if empty and len(empty) == self.template.num_fields and text.strip():
                named = (
                    f"{', '.join(empty)}, which the prompt's template names, {'is' if len(empty) == 1 else 'are'} empty"
                )
                raise RowProblem(RowErrorCode.EMPTY_PROMPT, named)
            return self._from_text(self._of_template, text, columns)
        for name, read in self.prompt_columns.items():
            if name in columns and (self._spec.is_mapped or not is_null(columns[name])):
                return read(name, columns)
        if nulls := [name for name in self.prompt_columns if name in columns]:
            raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"column {nulls[0]!r} is empty")
        wanted = " or ".join(map(repr, self.prompt_columns))
        has = ", ".join(repr(name) for name in list(columns)[:8]) or "none"
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no column {wanted} for the prompt; the row's columns: {has}")

    def _from_text(self, what: str, value: object, columns: Mapping[str, Any]) -> Prompt:
        text = _checked_text(what, value)
        if not self._spec.is_templated:
            return PlainText(text, True)
        if self._spec.continue_final_message:
            why = f"{what} is not a chat: {CONTINUES} needs messages that end with an assistant text"
            raise RowProblem(RowErrorCode.BAD_PARAM, why)
        variables = {"chat_template_kwargs": columns.get("chat_template_kwargs")}
        return self._chat(what, [{"role": "user", "content": text}], variables)

    def _from_messages(
        self, name: str, value: object, columns: Mapping[str, Any], continues: bool | None = None
    ) -> Chat:
        if not self._spec.is_templated:
            what = f'{name!r} is a chat, but the job says chat_template = "none"'
            raise RowProblem(RowErrorCode.TEMPLATE_ERROR, what)
        return self._chat(name, self._checked(checked_messages(name, value)), columns, continues)

    def _chat(
        self, name: str, messages: Sequence[Message], columns: Mapping[str, Any], continues: bool | None = None
    ) -> Chat:
        """The chat of a row; ``continues`` overrides the job's ``continue_final_message``."""
        self._require_tokenizer()
        if (size := num_chars(messages)) > MAX_CHARS:
            message = f"the messages have {size:,} characters; no context takes more than {MAX_CHARS:,}"
            raise RowProblem(RowErrorCode.TOO_LONG, message)
        added = self._spec.system_before(messages)
        tools = checked_tools(columns["tools"]) if "tools" in columns else []
        choice = columns.get("tool_choice") if tools else None
        if not (is_null(choice) or choice in ("", "auto", "none")):
            why = "must be auto or none: no answer is forced to call a tool"
            raise RowProblem(RowErrorCode.BAD_PARAM, f"tool_choice = {shown(choice, 80)} {why}")
        kwargs = _checked_kwargs(columns.get("chat_template_kwargs"))
        kwargs = {key: self._checked(value) for key, value in kwargs.items()}
        offered = {"tools": self._checked(tools)} if tools and choice != "none" else {}
        variables = {**(self._spec.chat_template_kwargs or {}), **kwargs, **offered}
        if unused := [name for name in variables if name not in self._names]:
            why = f"chat_template_kwargs: {shown(unused[0], 60)}: the model's chat template has no such variable"
            why = "tools: this model's chat template cannot take tools" if unused[0] == "tools" else why
            raise RowProblem(RowErrorCode.BAD_PARAM, why)
        if self._spec.continue_final_message if continues is None else continues:
            _check_final(name, messages[-1])
            variables[CONTINUES] = True
        return Chat({**variables, "messages": [*added, *messages]}, name, len(added))

    def _checked(self, value: Any) -> Any:
        """A value of the row. Raises RowProblem if it writes out a special token that the job refuses."""
        self._refuse(self._special.first_in(value) if self._special else "")
        return value

    def _refuse(self, token: str) -> None:
        if token:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"the prompt holds {token}, which special_tokens says to refuse")

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


def _refused_tokens(spec: InputSpec, tokenizer: Tokenizer | None) -> SpecialTokens | None:
    """Special tokens that rows may not write, if the job refuses any. Raises UsageError if they cannot be found."""
    if spec.special_tokens == "allow" or tokenizer is None:
        return None
    special = tokenizer.special_tokens
    if special.normalized is not None:
        why = f"is not possible: the tokenizer changes texts before it looks for {special.normalized}"
        raise UsageError(f'input.special_tokens = "{spec.special_tokens}" {why}')
    return special


def _checked_kwargs(value: object) -> dict[str, Any]:
    """A row's own variables of the chat template; null and an empty cell mean "not given"."""
    if is_null(value) or value == "":
        return {}
    try:
        kwargs = TEMPLATE_KWARGS.parse(value) or {}
    except ValueError as error:
        raise RowProblem(RowErrorCode.BAD_PARAM, f"chat_template_kwargs = {shown(value, 80)} {error}") from None
    return {name: item for name, item in kwargs.items() if item is not None}


def _check_final(name: str, message: Message) -> None:
    """Raises RowProblem if the last message cannot be continued: only an assistant's text can."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        what = "calls tools" if message.get("tool_calls") else f"is of role {shown(message['role'], 40)}"
        why = f"{name}: the last message {what}: {CONTINUES} needs a chat that ends in a text of the assistant"
        raise RowProblem(RowErrorCode.BAD_PARAM, why)


def _checked_text(what: str, value: object) -> str:
    if not (is_null(value) or isinstance(value, str)):
        raise wrong_type(what, value, "a string")
    if not isinstance(value, str) or not value or value.isspace():
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"{what} is empty")
    return value


def _check_spec(spec: InputSpec, tokenizer: Tokenizer | None) -> None:
    mapped = next((key for key in ("messages", "prompt_token_ids", "prompt") if getattr(spec, key)), None)
    if mapped and spec.format == "openai-batch":
        why = "does not go with input.format = 'openai-batch', whose prompts are in `body`: leave one of them out"
        raise UsageError(f"input.{mapped} {why}")
    for key in ("prompt", "system"):
        try:
            (getattr(spec, key) or "").encode()
        except UnicodeEncodeError:  # Python reads such bytes of a command line as lone surrogates
            raise UsageError(f"input.{key} holds bytes that are not UTF-8; write it in UTF-8") from None
    if spec.prompt_token_ids:
        return
    if tokenizer is None:
        for key in ("prompt", "messages", "system", "chat_template_kwargs"):
            if getattr(spec, key):
                remedy = "name one in model.tokenizer, or give rows prompt_token_ids"
                raise UsageError(f"input.{key} needs a tokenizer and this model has none; {remedy}")
    elif not spec.is_templated:
        for key in ("messages", "system", "chat_template_kwargs"):
            if getattr(spec, key):
                raise UsageError(f'input.{key} needs a chat: drop it, or drop input.chat_template = "none"')
    elif tokenizer.chat_template is None:
        remedy = 'set input.chat_template = "none" for raw completion, or name a file that has one'
        raise UsageError(f"the model has no chat template; {remedy}")
    else:
        _check_names(spec.chat_template_kwargs or (), tokenizer.chat_template.names)


def _check_names(kwargs: Iterable[str], names: Collection[str]) -> None:
    for name in kwargs:
        if name not in names:
            what = f"the model's chat template has no variable {shown(name)}{resembling(name, sorted(names))}"
            raise UsageError(f"input.chat_template_kwargs: {what}")
