"""The model folder's own chat template, rendered in the environment that ``transformers`` gives it.

A template is untrusted code: jinja2's sandbox and a limit on a prompt's length bound it, but not its time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from batchgen.core.units import one_line

MAX_CHARS = 1 << 24  # of one prompt: beyond any context
CONTINUES = "continue_final_message"  # a variable of a chat, which the template does not see
_END = "THEFINALMESSAGEENDSHERE "

Chat = Sequence[Mapping[str, Any]] | Mapping[str, Any]  # its messages, or all of its variables, ``messages`` among them


class ChatTemplateError(Exception):
    """The template does not compile, or refuses or fails on these messages; ``str()`` is one line."""


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError when the source does not compile.

    ``special_tokens`` are named as a template expects, such as ``bos_token``. ``now`` is the local time that it may
    print. ``names`` are the variables that it takes from outside, ``words`` the keys and texts that it may look for in
    them. ``has_marks``: it has generation blocks.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: datetime | None = None,
        marks: tuple[str, str] = ("", ""),
    ) -> None:
        """``marks`` are written before and after the content of generation blocks."""
        self.source, self._now, self._special_tokens = source, now or datetime.now(), special_tokens
        environment = _environment(self._now.replace(tzinfo=None), marks)
        try:
            tree = environment.parse(source)
            words = {node.value for node in tree.find_all(nodes.Const)} | {n.attr for n in tree.find_all(nodes.Getattr)}
            self.words = frozenset(word for word in words if isinstance(word, str) and word.isidentifier())
            calls = [node.call.node for node in tree.find_all(nodes.CallBlock)]
            self.has_marks = any(getattr(call, "identifier", "") == _GenerationBlock.identifier for call in calls)
            functions = {node.name for node in tree.find_all(nodes.Name)} & environment.globals.keys()
            self.names = frozenset(meta.find_undeclared_variables(tree) | functions)
            self._template = environment.from_string(tree)
        except Exception as error:  # code of a stranger, whose constants are computed here, may raise anything
            raise ChatTemplateError(f"the chat template does not compile: {one_line(error)}") from error
        constant = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens}
        self._template.globals = {**self._template.globals, **constant}  # a plain dict: jinja copies it per prompt

    def render(self, chats: Sequence[Chat]) -> Iterator[str | ChatTemplateError]:
        """Yield the prompt of each chat, including the header of the assistant's turn, or an error.

        With ``CONTINUES`` the prompt ends with the text of the final message, as in transformers.
        """
        for chat in chats:
            try:
                yield self._prompt(chat)
            except Exception as error:  # as above
                yield ChatTemplateError(f"the chat template failed: {one_line(error)}")

    def marking(self, begin: str, end: str) -> ChatTemplate:
        """The same template, but it writes these marks before and after the content of generation blocks."""
        return ChatTemplate(self.source, self._special_tokens, self._now, (begin, end))

    def behind_answer(self) -> str:
        """The text that the template writes after a final answer of the assistant; "" if it fails on a plain chat."""
        texts = {"user": "a", "assistant": _END.strip()}
        as_texts = [{"role": role, "content": text} for role, text in texts.items()]
        as_lists = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts.items()]
        for prompt in self.render(
            [{"messages": each, "add_generation_prompt": False} for each in (as_texts, as_lists)]
        ):
            if isinstance(prompt, str) and _END.strip() in prompt:
                return prompt.rpartition(_END.strip())[2]
        return ""

    def _prompt(self, chat: Chat) -> str:
        # As JSON: a value without a JSON type, such as a date, is its ``str()`` in a template too.
        variables = json.loads(json.dumps(chat if isinstance(chat, Mapping) else {"messages": chat}, default=str))
        if not variables.pop(CONTINUES, False):
            return self._rendered(variables)
        final = variables["messages"][-1]
        part, key = (final["content"][-1], "text") if isinstance(final["content"], list) else (final, "content")
        text, part[key] = part[key], part[key] + _END
        prompt = self._rendered({**variables, "add_generation_prompt": False})
        end = prompt.rfind(_END.rstrip())
        if end < 0 or text.strip() not in prompt:
            raise jinja2.TemplateError("it changes the text of the final message, which is to be continued")
        return prompt[:end] if prompt.startswith(_END, end) else prompt[:end].rstrip()  # this template strips texts

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise jinja2.TemplateError(f"it makes a text of more than {MAX_CHARS:,} characters")
        prompt = "".join(pieces)
        prompt.encode()  # fails on lone surrogates, as tokenizers do
        return prompt


def in_one(templates: Mapping[str, str]) -> str:
    """One template in place of two: "tool_use" for chats with tools, "default" for others.

    transformers and vLLM choose between them in the same way; templates with other names are not used for chats. Raises
    KeyError if "default" is missing.
    """
    default = templates["default"]
    if (for_tools := templates.get("tool_use")) is None:
        return default
    # Each template begins a line, as it would alone: the newline before it is removed with the block. A newline at the
    # end of a template is not part of it.
    texts = [text.removesuffix("\n") for text in (for_tools, default)]
    return "{%+ if tools %}\n" + "{%+ else %}\n".join(texts) + "{%+ endif +%}"


def _environment(now: datetime, marks: tuple[str, str]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.extensions[_GenerationBlock.identifier].marks = marks  # type: ignore[attr-defined]  # it is that class
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _Namespace
    environment.globals["strftime_now"] = now.strftime
    return environment


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks text to train on; in a prompt only its content remains.

    As in ``transformers`` it is a call block, so that variables set inside stay inside.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it
    marks = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return f"{self.marks[0]}{caller()}{self.marks[1]}"


class _Namespace(Namespace):
    """``namespace`` that refuses names which the sandbox cannot read: they would be empty in the prompt."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``self`` may be a name in it
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot have {name!r}: names with an underscore in front are not for templates"
        )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
