"""Facts of a chat template that change an answer, or how it is split into fields, without changing the prompt.

They are part of each row's fingerprint, so that an update recomputes rows that another template would change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

_NAME = r"[\w:.-]{0,24}(?:think|thought|reason)[\w:.-]{0,24}"
_CLOSING = re.compile(rf"<(/){_NAME}>|\[(/){_NAME}\]|<\|(END_){_NAME}\|>", re.IGNORECASE)
_USUAL = "</think>"


class ToolSigns(NamedTuple):
    """Signs of the format of a family's tool calls: its first marker, or a text in the template."""

    markers: tuple[str, ...]
    sign: str = ""


TOOL_SIGNS = {
    "LFM2": ToolSigns(("<|tool_call_start|>", "<|tool_call_end|>")),
    "Mistral": ToolSigns(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "Hermes": ToolSigns(("<tool_call>", "</tool_call>")),
    "Llama 3": ToolSigns(("<|python_tag|>",), sign='"parameters":'),
}


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Facts of answers that a template states.

    ``closing`` is the marker that ends thoughts: ``</think>`` if the template has it or lacks a marker, otherwise its
    first one, such as ``[/THINK]``. ``thinks``: the marker is in the template or is a token. ``tools`` names the family
    of ``TOOL_SIGNS`` in whose format tool calls are written, "" if it is unknown.
    """

    closing: str
    thinks: bool
    tools: str

    @classmethod
    def of(cls, source: str, token_id: Callable[[str], int | None]) -> AnswerFacts:
        """The facts of a template's text; ``token_id`` gives the id of a token or None."""
        match = None if _USUAL in source else _CLOSING.search(source)
        closing = match[0] if match else _USUAL
        return cls(closing, closing in source or token_id(closing) is not None, _family(source, token_id))

    def used(self, names: Collection[str]) -> str:
        """The named facts as a text for fingerprints; "" without ``names``."""
        values = [(item.name, getattr(self, item.name)) for item in fields(self) if item.name in names]
        return repr(values) if values else ""


def _family(source: str, token_id: Callable[[str], int | None]) -> str:
    signs = TOOL_SIGNS.items()
    shown = (name for name, how in signs if how.markers[0] in source)
    in_vocabulary = (name for name, how in signs if token_id(how.markers[0]) is not None)
    signed = (name for name, how in signs if how.sign and how.sign in source)
    return next((name for names in (shown, in_vocabulary, signed) for name in names), "")
