"""Capabilities of a chat template, found with a few chats, and the check that a prompt shows each part of its chat.

If plain texts do not suffice, the chat is rendered with marks, which miss changes before the end of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from batchgen.text.chat import ChatTemplate, ChatTemplateError
from batchgen.text.marks import REASONING, Location, MarkedChat, Variables

ALIASES = {"developer": "system", "function": "tool"}  # OpenAI's names of roles, and what templates call them
_ALIASES = ({}, *({role: alias} for role, alias in ALIASES.items()), ALIASES)
_ROLES = frozenset({"system", "user", "assistant", "tool"})  # may be the "else" of a template, unlike others
_ROLE = "zqroleqz"  # known to no template
_CHECKED = ("tool_calls", "refusal", *REASONING)  # fields that may hold more than the content
_MIN_CHARS = 12  # of a text that the prompt has nowhere else by chance
_REMEDY = "leave it out, or name in model.tokenizer a folder whose template shows it"
_HIDDEN = f"the model's chat template does not show it; {_REMEDY}"
_NO_ROLE = f"the model's chat template does not know this role; {_REMEDY}"
_UNCHECKED = "the model's chat template fails on them with other words, so whether it shows them cannot be known"

# The chats of the trials.
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}
_CALL = {"id": "callcall1", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "f", "tool_call_id": "callcall1", "content": "c"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
_THOUGHTS = dict.fromkeys(REASONING, "t")


class HiddenError(ChatTemplateError):
    """A part of a chat would be missing or changed in its prompt; ``str()`` is one line."""

    def __init__(self, location: Location, why: str = _HIDDEN) -> None:
        self._location, self._why = location, why
        super().__init__(self.describe())

    @property
    def num_shown(self) -> int:
        """The number of messages before the first hidden one."""
        return self._location.message or 0

    def describe(self, messages: str = "messages", num_added: int = 0) -> str:
        """The problem in words; ``messages`` names the row's messages, which follow ``num_added`` of the job."""
        location = self._location
        if location.message is None:
            field = location.key
        elif location.message < num_added:
            field = "input.system"
        else:
            field = f"{messages}[{location.message - num_added}].{location.key}"
        role = f" (role {location.role[:40]!r})" if location.role and location.role not in _ROLES else ""
        return f"{field}{role}: {self._why}"


class TemplateCaps:
    """Renders chats with a template, and refuses those that it shows only in part; for one thread."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(self, chats: Sequence[Variables]) -> Iterator[str | ChatTemplateError]:
        """Yield the prompt of each chat's ``form``, or an error of the template, or a HiddenError."""
        for chat in chats:
            yield self._rendered(chat)[1]

    def form(self, chat: Variables) -> Variables:
        """The first form of a chat whose prompt shows all parts; otherwise the form that shows the most messages.

        Contents are tried unchanged (if the template takes lists), then with lists joined by newlines to one text, as
        in vLLM, then with each text as a list of one part, then joined in such a list. A role of ``ALIASES`` is
        replaced by its alias if the template does not know it.
        """
        return self._rendered(chat)[0]

    def _rendered(self, chat: Variables) -> tuple[Variables, str | ChatTemplateError]:
        """The form of a chat and its prompt, or the form that shows the most messages and its error."""
        refused: list[tuple[Variables, ChatTemplateError]] = []
        for form in self._forms(chat):
            prompt = self._render(form)
            problem = self._problem(form, prompt) if isinstance(prompt, str) else prompt
            if problem is None:
                return form, prompt
            refused.append((form, problem))
        return max(refused, key=lambda each: each[1].num_shown if isinstance(each[1], HiddenError) else 0)

    def _forms(self, chat: Variables) -> Iterator[Variables]:
        """The forms of a chat, in the order in which they are tried."""
        tried: list[list[Mapping[str, Any]]] = []
        for change in (dict, _joined, _listed, _joined_part) if self._takes_parts else (_joined, _listed, _joined_part):
            for aliases in _ALIASES:
                messages = [
                    change({**each, "role": aliases.get(each["role"], each["role"])}) for each in chat["messages"]
                ]
                if messages not in tried:
                    tried.append(messages)
                    yield {**chat, "messages": messages}

    @cached_property
    def _takes_parts(self) -> bool:
        return self._hidden({"messages": [_PARTS]}) == []

    @cached_property
    def table(self) -> Mapping[str, bool]:
        """Parts that the template shows: the system's turn, tools, calls of tools, their results, thoughts."""
        calling = {"messages": [_USER, _CALLED, _RESULT], "tools": [_TOOL]}
        thinking = {**calling, "messages": [_USER, {**_CALLED, **_THOUGHTS}, _RESULT]}
        answered, thoughtful = {"messages": [_USER, _RESULT]}, {"messages": [_USER, {**_ANSWER, **_THOUGHTS}]}
        return {
            "system": self._shows({"messages": [{"role": "system", "content": "s"}, _USER]}, 0),
            "tools": self._shows({"messages": [_USER], "tools": [_TOOL, _TOOL]}, None),
            "calls": self._shows(calling, 1),
            "results": self._shows(calling, 2) or self._shows(answered, 1),
            "thoughts": self._shows(thoughtful, 1) or self._shows(thinking, 1),
        }

    def _render(self, chat: Variables) -> str | ChatTemplateError:
        return next(self._template.render([chat]))

    def _problem(self, chat: Variables, prompt: str) -> HiddenError | None:
        messages = chat["messages"]
        for number, role in enumerate(str(message.get("role")) for message in messages):
            if role not in _ROLES:
                other = [*messages[:number], {**messages[number], "role": _ROLE}, *messages[number + 1 :]]
                if self._render({**chat, "messages": other}) == prompt:
                    return HiddenError(Location(number, "role", role), _NO_ROLE)
        if _shows_texts(chat, prompt):
            return None
        hidden = self._hidden(chat)
        if hidden is None:
            return HiddenError(Location(None, "messages"), _UNCHECKED)
        # Templates may leave out earlier thoughts by design; leaving out all thoughts is a loss.
        lost = (location for location in hidden if location.key not in REASONING or not self.table["thoughts"])
        return next(map(HiddenError, lost), None)

    def _shows(self, chat: Variables, message: int | None) -> bool:
        """Whether all parts of a message, or of the tools, are in the prompt of a form of a chat."""
        tried = map(self._hidden, self._forms(chat))
        return any(hidden is not None and all(location.message != message for location in hidden) for hidden in tried)

    def _hidden(self, form: Variables) -> Sequence[Location] | None:
        """The parts that are not in the prompt of a form; None if the template fails on it with marks."""
        marked = MarkedChat(form)
        prompt = self._render(marked.variables)
        return marked.hidden(prompt) if isinstance(prompt, str) else None


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the parts of its content as one text."""
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def _listed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _joined_part(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return _listed(_joined(message))


def _shows_texts(chat: Variables, prompt: str) -> bool:
    """Whether a prompt surely has the texts of a chat in their order, and the chat has nothing else to be shown."""
    others = [value for key, value in chat.items() if key != "messages" and not isinstance(value, bool)]
    if not all(isinstance(value, str) and len(value) < _MIN_CHARS for value in others):
        return False
    end = 0
    for message in chat["messages"]:
        content = message.get("content")
        if not isinstance(content, str) or not message.keys().isdisjoint(_CHECKED):
            return False
        text = content.strip()
        start = prompt.find(text, end)
        if start < 0 or 0 < len(text) < _MIN_CHARS:
            return False
        end = start + len(text)
    return True
