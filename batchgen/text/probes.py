"""Probes of a chat template: whether each text, call and tool of a chat is in its prompt.

A template has branches for the roles and fields that it knows; anything else leaves no trace in the prompt. So each
shape of a chat (roles, and which fields hold something) is rendered once with a mark in place of each text. A part
whose mark is missing is passed in another form that the template shows, or refused by name. Changes to a text, such as
trimming, are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from batchgen.text.chat import ChatTemplateError
from batchgen.text.marks import REASONING, Place, Seen, Variables, function_of, marked_chat

Answer = str | ChatTemplateError  # a prompt, or why it cannot be made
ALIASES = {"developer": "system", "function": "tool"}  # OpenAI's names of roles, and what templates call them
_ROLES = frozenset({"system", "user", "assistant", "tool"})  # may be the "else" of a template, unlike others
ROLES = _ROLES | ALIASES.keys()
_ROLE = "zqroleqz"  # known to no template
_MAX_SHAPES = 4096  # shapes, of some hundred bytes each
_REMEDY = "leave it out, or name in model.tokenizer a folder whose template shows it"
_HIDDEN = f"the model's chat template never shows it; {_REMEDY}"
_NO_ROLE = f"the model's chat template does not know this role, and shows the turn under another one; {_REMEDY}"
_UNCHECKED = "the model's chat template fails on them with other words, so whether it shows them cannot be known"


class HiddenError(ChatTemplateError):
    """A part of a chat would be missing or changed in its prompt; ``str()`` is one line."""

    def __init__(self, place: Place, why: str = _HIDDEN) -> None:
        self._place, self._why = place, why
        super().__init__(self.describe())

    def describe(self, messages: str = "messages", num_added: int = 0) -> str:
        """The problem in words; ``messages`` names the row's messages, which follow ``num_added`` of the job."""
        place = self._place
        if place.message is None:
            where = place.key
        elif place.message < num_added:
            where = "input.system"
        else:
            where = f"{messages}[{place.message - num_added}].{place.key}"
        role = f" (role {place.role[:40]!r})" if place.role and place.role not in _ROLES else ""
        return f"{where}{role}: {self._why}"


@dataclass(frozen=True, slots=True)
class _Form:
    """Form in which the template gets a chat: messages whose parts are joined, and roles replaced by their alias."""

    joined: frozenset[int] = frozenset()
    renamed: frozenset[str] = frozenset()

    def of(self, chat: Variables) -> Variables:
        messages = [self._message(number, message) for number, message in enumerate(chat["messages"])]
        return {**chat, "messages": messages} if self != _Form() else chat

    def _message(self, number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if number in self.joined:
            message = {**message, "content": "\n".join(part["text"] for part in message["content"])}  # as vLLM joins
        return {**message, "role": ALIASES[message["role"]]} if message.get("role") in self.renamed else message


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Findings about all chats of a shape; ``is_open`` if the template refuses the probe itself."""

    form: _Form
    hidden: HiddenError | None = None
    is_open: bool = False


_TOO_DEEP = _Verdict(_Form(), HiddenError(Place(None, "messages"), "they are nested too deeply"))
_Examination = Generator[Variables, Answer, _Verdict]  # asks for chats to be rendered


class Probes:
    """Renders chats with ``render``, and refuses those that a template shows only in part; for one thread."""

    def __init__(self, render: Callable[[Sequence[Variables]], Iterator[Answer]]) -> None:
        self._render = render
        self._by_shape: dict[bytes, _Verdict] = {}
        self._shows_reasoning: bool | None = None

    def render(self, chats: Sequence[Variables]) -> Iterator[Answer]:
        """Per chat, in order, its prompt, or the error of ``render``, or a HiddenError.

        A template that takes lists gets the parts of a content; others get them joined by newlines, as in vLLM. A role
        of ``ALIASES`` is replaced by its alias if the template does not know it.
        """
        verdicts = self._verdicts(chats)
        shown = [verdict.form.of(chat) for chat, verdict in zip(chats, verdicts, strict=True) if verdict.hidden is None]
        answers = self._render(shown)
        for verdict in verdicts:
            answer = next(answers) if verdict.hidden is None else verdict.hidden
            is_unsure = verdict.is_open and isinstance(answer, str)
            yield HiddenError(Place(None, "messages"), _UNCHECKED) if is_unsure else answer

    def shown(self, chat: Variables) -> Variables:
        """A chat in the form in which ``render`` gives it to the template."""
        return self._verdicts([chat])[0].form.of(chat)

    def _verdicts(self, chats: Sequence[Variables]) -> list[_Verdict]:
        shapes = [_shape(chat) for chat in chats]
        new = {shape: chat for shape, chat in zip(shapes, chats, strict=True) if shape not in self._by_shape}
        new.pop(b"", None)
        examined = self._examined(self._examine(chat, appends=False) for chat in new.values())
        verdicts = {shape: self._by_shape[shape] for shape in shapes if shape in self._by_shape} | {b"": _TOO_DEEP}
        verdicts |= zip(new, examined, strict=True)
        for shape in new:
            self._by_shape[shape] = verdicts[shape]
        while len(self._by_shape) > _MAX_SHAPES:
            del self._by_shape[next(iter(self._by_shape))]
        # The template may demand something of the texts themselves: each such chat is a shape by itself.
        own = [number for number, shape in enumerate(shapes) if verdicts[shape].is_open]
        examined = self._examined(self._examine(chats[number], appends=True) for number in own)
        alone = dict(zip(own, examined, strict=True))
        return [alone.get(number, verdicts[shape]) for number, shape in enumerate(shapes)]

    def _examined(self, examinations: Iterable[_Examination]) -> list[_Verdict]:
        """The verdicts of examinations, in order; the chats that they ask for next are rendered together."""
        running = dict(enumerate(examinations))
        chats = {number: next(examination) for number, examination in running.items()}
        verdicts: dict[int, _Verdict] = {}
        while chats:
            answers = list(self._render(list(chats.values())))
            for number, answer in zip(list(chats), answers, strict=True):
                try:
                    chats[number] = running[number].send(answer)
                except StopIteration as end:
                    verdicts[number] = end.value
                    del chats[number]
        return [verdicts[number] for number in running]

    def _examine(self, chat: Variables, *, appends: bool) -> _Examination:
        """Find the form in which the template shows a chat; ``appends`` puts marks after the texts."""
        messages = chat["messages"]
        lists = frozenset(n for n, message in enumerate(messages) if isinstance(message.get("content"), list))
        form = _Form()
        seen = yield from _probed(chat, form, appends)
        if lists and (joined := lists if seen is None else lists & (seen.dumped | {p.message for p in seen.hidden})):
            form = _Form(joined)
            seen = yield from _probed(chat, form, appends)
            if seen is None and joined != lists:
                form = _Form(lists)
                seen = yield from _probed(chat, form, appends)
        for role in sorted({str(message.get("role")) for message in messages} - _ROLES):
            is_known = seen is not None and not any(place.role == role for place in seen.hidden)
            if seen is not None and is_known:
                marked, _ = marked_chat(_with_role(form.of(chat), role), appends)
                is_known = (yield marked) != seen.prompt
            if not is_known and role in ALIASES:
                form = replace(form, renamed=form.renamed | {role})
                seen = yield from _probed(chat, form, appends)
            elif not is_known and seen is not None and not any(place.role == role for place in seen.hidden):
                number = next(n for n, message in enumerate(messages) if message.get("role") == role)
                return _Verdict(form, HiddenError(Place(number, "role", role), _NO_ROLE))
        if seen is None:
            return _Verdict(form, is_open=True)
        for place in seen.hidden:
            # That earlier thoughts are left out is how a template is meant; that all are is a loss.
            if place.key not in REASONING or not (yield from self._reasoning_shown()):
                return _Verdict(form, HiddenError(place))
        return _Verdict(form)

    def _reasoning_shown(self) -> Generator[Variables, Answer, bool]:
        """Ask the template whether it shows the thoughts of the last turn, before an answer or a call."""
        if self._shows_reasoning is None:
            user = {"role": "user", "content": "a"}
            thoughts = dict.fromkeys(REASONING, "zq0qz")
            call = {"id": "callcall1", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
            answered = [user, {"role": "assistant", "content": "b", **thoughts}]
            called = [user, {"role": "assistant", "content": "", **thoughts, "tool_calls": [call]}]
            called.append({"role": "tool", "name": "f", "tool_call_id": "callcall1", "content": "c"})
            is_shown = False
            for messages in (answered, called):
                answer = yield {"messages": messages}
                is_shown = is_shown or (isinstance(answer, str) and "zq0qz" in answer)
            self._shows_reasoning = is_shown
        return self._shows_reasoning


def _probed(chat: Variables, form: _Form, appends: bool) -> Generator[Variables, Answer, Seen | None]:
    """Findings in the template's prompt of a chat in some form; None if it fails."""
    marked, marks = marked_chat(form.of(chat), appends)
    answer = yield marked
    return marks.seen(answer) if isinstance(answer, str) else None


def _with_role(chat: Variables, role: str) -> Variables:
    messages = [{**m, "role": _ROLE} if m.get("role") == role else m for m in chat["messages"]]
    return {**chat, "messages": messages}


def _shape(chat: Variables) -> bytes:
    """Digest of all that a template may branch on: all but the words of texts, names, ids and schemas.

    It is ``b""`` if the chat is nested too deeply.
    """
    others = [item for item in chat.items() if item[0] not in ("messages", "tools")]
    try:
        messages = [_message_shape(message) for message in chat["messages"]]
        tools = [(sorted(tool), _outline(function_of(tool), depth=2)) for tool in chat.get("tools") or ()]
        return blake2b(repr((messages, tools, others)).encode(), digest_size=16).digest()
    except RecursionError:
        return b""


def _message_shape(message: Mapping[str, Any]) -> object:
    return [(key, value if key == "role" else _field_shape(key, value)) for key, value in message.items()]


def _field_shape(key: str, value: Any) -> object:
    if key == "tool_calls":
        return [_call_shape(call) for call in value]
    is_text = key in ("content", "refusal", "name", *REASONING) or key.endswith("id")
    return _outline(value) if is_text else value


def _call_shape(call: Mapping[str, Any]) -> object:
    """A call with the types of its arguments, without their names, which differ from function to function."""
    function = function_of(call)
    arguments = function.get("arguments")
    values = list(arguments.values()) if isinstance(arguments, dict) else arguments
    return _outline({**call, "function": {**function, "arguments": values}})


def _outline(value: Any, depth: int = -1) -> object:
    """A value without its words and numbers, down to some depth."""
    if isinstance(value, str):
        return bool(value) + bool(value.strip())
    if isinstance(value, dict) and depth:
        return [(key, item if key == "type" else _outline(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list) and depth:
        return [_outline(item, depth - 1) for item in value]
    return type(value).__name__, bool(value) and isinstance(value, dict | list)
