"""Turns of the assistant in the prompt of a chat: the tokens that a student model is trained on.

``{% generation %}`` may mark them; otherwise a turn is what its message changes in the prompt, and its end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from batchgen.text.chat import ChatTemplate, ChatTemplateError

Range = tuple[int, int]  # the first index, and the index after the last
_OTHERS = ("a7q", "7qz")  # texts that begin and end with other characters


class Turns:
    """Finds the turns of the assistant in prompts that ``template`` makes."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._marks = [f"\ufdd0{token_hex(8)}{end}" for end in "[]"]  # no text has them
        self._marking = template.marking(*self._marks) if template.has_marks else None
        self._end = template.behind_answer().rstrip()

    def of(self, chat: Mapping[str, Any], prompt: str) -> list[Range]:
        """Turns as ranges of characters of the ``prompt`` of ``chat``, in order. Raises ChatTemplateError."""
        return list(self._marked(chat, prompt) if self._marking is not None else self._rendered(chat, prompt))

    def _marked(self, chat: Mapping[str, Any], prompt: str) -> Iterator[Range]:
        assert self._marking is not None
        text, (begin, end) = _text_of(self._marking, chat), self._marks
        start, turns = 0, []
        for number, part in enumerate(text.split(begin)):
            inside, _, rest = part.partition(end)
            if number:
                turns.append((start, start + len(inside)))
            start += len(inside) + len(rest)
        if text.replace(begin, "").replace(end, "") != prompt:
            raise ChatTemplateError("assistant_mask: the chat template changes the text that it marks with generation")
        yield from (turn for turn in turns if turn[0] < turn[1])

    def _rendered(self, chat: Mapping[str, Any], prompt: str) -> Iterator[Range]:
        messages = chat["messages"]
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            others = []
            for text in _OTHERS:
                content = [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text
                changed = [*messages[:number], {"role": "assistant", "content": content}, *messages[number + 1 :]]
                others.append(_text_of(self._template, {**chat, "messages": changed}))
            if others[0] == others[1]:
                raise ChatTemplateError("assistant_mask: the chat template does not show other answers in their place")
            start = min(common_length(prompt, other) for other in others)
            same = min(common_length(prompt[::-1], other[::-1]) for other in others)
            end = max(start, len(prompt) - same)
            if self._end and prompt.startswith(self._end, end):
                end += len(self._end)
            yield start, end


def token_ranges(offsets: Sequence[Range], turns: Sequence[Range]) -> tuple[Range, ...]:
    """The ranges of the tokens that contain a character of a turn; ``offsets`` are the characters of each token."""
    ranges, token = [], 0
    for start, end in turns:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        first = token
        while token < len(offsets) and offsets[token][0] < end:
            token += 1
        ranges.append((first, token))
    return tuple(ranges)


def _text_of(template: ChatTemplate, chat: Mapping[str, Any]) -> str:
    text = next(template.render([chat]))
    if isinstance(text, ChatTemplateError):
        raise ChatTemplateError(f"assistant_mask: {text}")
    return text


def common_length(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low
